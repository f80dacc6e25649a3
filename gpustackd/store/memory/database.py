"""The tables in memory and what users do to them: the rules of the schema as plain Python.

The rules are those of the triggers in the migrations: capacity on the row that it guards, over-commit marks,
lawful state changes, memory given back on delete, instances requeued when their worker or GPU goes. There is
one thread, so every method is a transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from gpustackd.domain.bookings import Booking
from gpustackd.domain.lifecycle import InstanceState, WorkerState, lawful
from gpustackd.errors import Refused
from gpustackd.store.memory.records import (
    PLACEMENT_COLUMNS,
    UNVERSIONED,
    GpuRecord,
    InstanceRecord,
    ModelRow,
    WorkerRecord,
    check_instance,
    is_less,
    mark_over_commit,
)

Row = TypeVar("Row", GpuRecord, InstanceRecord, WorkerRecord)


TABLES = (
    "clusters",
    "workers",
    "gpu_devices",
    "models",
    "model_instances",
    "model_files",
    "instance_types",
    "inference_backends",
)


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A row of `scheduling_decisions`."""

    instance_id: int
    placement_epoch: int
    attempt: int
    replica: str
    outcome: str


class MemoryDatabase:
    """The tables, rows by id. `clock` (seconds since 1970) stands for the database's clock."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self.clusters: dict[int, dict[str, Any]] = {}
        self.workers: dict[int, WorkerRecord] = {}
        self.gpu_devices: dict[int, GpuRecord] = {}
        self.models: dict[int, ModelRow] = {}
        self.model_instances: dict[int, InstanceRecord] = {}
        self.model_files: dict[int, dict[str, Any]] = {}
        self.instance_types: dict[int, dict[str, Any]] = {}
        self.inference_backends: dict[int, dict[str, Any]] = {}
        self.ledger: dict[int, list[Booking]] = {}
        """instance id -> its ledger rows."""
        self.decisions: list[DecisionRecord] = []
        self._last_id = 0
        self.last_change = 0
        """Number of changes to workers and GPUs so far."""

    def table(self, name: str) -> dict[int, Any]:
        """Rows by id. Raises Refused where there is no such table."""
        if name not in TABLES:
            raise Refused(f"there is no table {name} in memory")
        rows: dict[int, Any] = getattr(self, name)
        return rows

    # -- inserting --------------------------------------------------------------------------------------

    def insert(self, table: str, **columns: Any) -> int:
        """Insert one row as a user does; returns its id. Raises Refused as the schema would."""
        rows = self.table(table)
        id_ = int(columns.pop("id", 0)) or self._next_id(rows)
        row: Any
        if table == "workers":
            row = _made(WorkerRecord, id_, columns)
        elif table == "gpu_devices":
            row = self._new_gpu(id_, columns)
        elif table == "models":
            row = ModelRow(id_, str(columns.pop("name")), columns)
        elif table == "model_instances":
            row = self._new_instance(id_, columns)
        else:
            row = {"id": id_, **columns}
        self._check(table, row)
        rows[id_] = row
        if isinstance(row, WorkerRecord | GpuRecord):
            row.allocated, row.over_committed, row.version = 0, False, 0
            self.stamp(row)
        return id_

    def insert_named(self, names: Sequence[str], **columns: Any) -> list[int]:
        """Insert instances that differ in name only, in this order; their ids. The names taken are read once.
        Raises Refused as `insert` does."""
        taken = {i.name for i in self.model_instances.values()}
        ids: list[int] = []
        for name in names:
            if name in taken:
                raise Refused(f"the name {name} is taken in model_instances")
            taken.add(name)
            row = self._new_instance(self._next_id(self.model_instances), {"name": name, **columns})
            check_instance(row)
            self.model_instances[row.id] = row
            ids.append(row.id)
        return ids

    def begin_ids_after(self, taken: Iterable[int]) -> None:
        """Start the sequence of ids above all of these."""
        self._last_id = max([self._last_id, *taken])

    def _next_id(self, rows: Mapping[int, Any]) -> int:
        self._last_id += 1
        while self._last_id in rows:
            self._last_id += 1
        return self._last_id

    def _new_gpu(self, id_: int, columns: dict[str, Any]) -> GpuRecord:
        host = self.workers.get(columns.pop("worker_id"))
        if host is None:
            raise Refused("there is no such worker")
        return _made(GpuRecord, id_, {"host": host, **columns})

    def _new_instance(self, id_: int, columns: dict[str, Any]) -> InstanceRecord:
        if columns.get("model_id") not in self.models:
            raise Refused("there is no such model")
        row = _made(InstanceRecord, id_, {"created_at": self.clock(), **columns})
        held = any(getattr(row, c) is not None for c in (*PLACEMENT_COLUMNS, "lease_owner"))
        if row.state != InstanceState.PENDING or held or row.placement_epoch:
            raise Refused("a new instance must be PENDING and hold nothing")
        return row

    # -- changing ---------------------------------------------------------------------------------------

    def update(self, table: str, id_: int, **changes: Any) -> None:
        """Change columns of one row as a user does. Raises Refused as the schema would."""
        row = self.table(table)[id_]
        if isinstance(row, WorkerRecord):
            self._update_worker(row, changes)
        elif isinstance(row, GpuRecord):
            self._update_gpu(row, changes)
        elif isinstance(row, InstanceRecord):
            self._update_instance(row, changes)
        elif isinstance(row, ModelRow):
            row.name = changes.pop("name", row.name)
            picked = changes.get("gpu_selector", row.columns.get("gpu_selector"))
            silent = UNVERSIONED if picked is None else UNVERSIONED - {"replicas"}
            row.version += any(row.columns.get(c) != v for c, v in changes.items() if c not in silent)
            row.columns |= changes
        else:
            row.update(changes)

    def _update_worker(self, row: WorkerRecord, changes: Mapping[str, Any]) -> None:
        self._check("workers", _with(row, changes))
        if _same(row, changes, {"heartbeat_at"}):
            return
        before = row.capacity, row.unified_memory
        to_gpus = row.state == WorkerState.READY, row.vram_reserved, row.unified_memory
        gpus = [(g, g.capacity) for g in self.gpus_of(row.id)]
        _set(row, changes)
        if row.unified_memory != before[1]:
            on_it = [b for held in self.ledger.values() for b in held if b.worker_id == row.id]
            row.ram_allocated = sum(b.ram + (b.vram if row.unified_memory else 0) for b in on_it)
        mark_over_commit(row, shrank=row.unified_memory != before[1] or is_less(row.capacity, before[0]))
        row.version += 1
        self.stamp(row)
        if to_gpus != (row.state == WorkerState.READY, row.vram_reserved, row.unified_memory):
            for gpu, capacity in gpus:
                self._gpu_changed(gpu, capacity)

    def _update_gpu(self, row: GpuRecord, changes: Mapping[str, Any]) -> None:
        if not _same(row, {k: v for k, v in changes.items() if k in ("index", "type")}, set()):
            raise Refused("a GPU cannot become another one", "delete the row and insert another")
        self._check("gpu_devices", _with(row, changes))
        if _same(row, changes, {"vram_used", "vram_used_at"}):
            _set(row, changes)  # a usage sample is no change of the row's version
            return
        capacity = row.capacity
        _set(row, changes)
        self._gpu_changed(row, capacity)

    def _gpu_changed(self, row: GpuRecord, before: int | None) -> None:
        mark_over_commit(row, shrank=is_less(row.capacity, before))
        row.version += 1
        self.stamp(row)

    def _update_instance(self, row: InstanceRecord, changes: Mapping[str, Any]) -> None:
        new = _with(row, changes)
        cleared = new.worker_id is None and new.placement_epoch > row.placement_epoch
        if not lawful(row.state, InstanceState(new.state), placement_cleared=cleared):
            raise Refused(f"instance {row.name} cannot go from {row.state} to {new.state}")
        if new.worker_id not in (None, row.worker_id):
            raise Refused(f"instance {row.name} is placed by a commit alone")
        if new.placement_epoch < row.placement_epoch or new.model_id != row.model_id:
            raise Refused("the epoch never falls and the model stays")
        self._check("model_instances", new)
        _set(row, changes)
        if new.worker_id is None:
            self._give_back(self.ledger.pop(row.id, ()))

    # -- deleting ---------------------------------------------------------------------------------------

    def delete(self, table: str, *ids: int) -> None:
        """Delete rows, as a user's DELETE would: what instances held is given back, and instances on a worker
        or GPU that goes are requeued. Raises Refused where rows still refer to a cluster."""
        rows = self.table(table)
        gone = {i for i in ids if i in rows}
        if table == "models":
            self.delete(
                "model_instances", *[i.id for i in self.model_instances.values() if i.model_id in gone]
            )
        elif table == "model_instances":
            self._give_back([b for i in gone for b in self.ledger.pop(i, ())])
        elif table == "workers":
            hit = [i for i, held in self.ledger.items() if any(b.worker_id in gone for b in held)]
            for gpu in [g.id for g in self.gpu_devices.values() if g.host.id in gone]:
                del self.gpu_devices[gpu]
            for file in [f["id"] for f in self.model_files.values() if f["worker_id"] in gone]:
                del self.model_files[file]
            self._remove(rows, gone)
            self.evict(hit, "a worker that this instance used was removed; it is placed anew")
            return
        elif table == "gpu_devices":
            hit = [i for i, held in self.ledger.items() if any(b.gpu_id in gone for b in held)]
            self._remove(rows, gone)
            self.evict(hit, "a GPU that this instance used was removed; it is placed anew")
            return
        elif table == "clusters" and any(r.cluster_id in gone for r in self.workers.values()):
            raise Refused("the cluster still has workers")
        self._remove(rows, gone)

    @staticmethod
    def _remove(rows: dict[int, Any], ids: Iterable[int]) -> None:
        for i in ids:
            del rows[i]

    def evict(self, ids: Sequence[int], why: str) -> None:
        """Requeue placed instances: PENDING, placement cleared, epoch raised, all they held given back."""
        freed: list[Booking] = []
        for i in ids:
            row = self.model_instances[i]
            freed.extend(self.ledger.pop(i, ()))
            if row.worker_id is None:
                continue
            row.clear_placement()
            row.state, row.state_message, row.reasons = InstanceState.PENDING, why, None
            row.placement_epoch += 1
            row.attempts, row.next_attempt_at = 0, None
        self._give_back(freed)

    def _give_back(self, freed: Sequence[Booking]) -> None:
        touched: dict[tuple[str, int], WorkerRecord | GpuRecord] = {}
        for b in freed:
            host, gpu = self.workers.get(b.worker_id), self.gpu_devices.get(b.gpu_id or 0)
            if host is not None and (host.unified_memory or b.gpu_id is None):
                host.ram_allocated -= b.ram + (b.vram if host.unified_memory else 0)
                touched["workers", host.id] = host
            if gpu is not None:
                gpu.vram_allocated -= b.vram
                touched["gpu_devices", gpu.id] = gpu
        for row in touched.values():
            row.version += 1
            mark_over_commit(row, shrank=False)
            self.stamp(row)

    # -- rows -------------------------------------------------------------------------------------------

    def gpus_of(self, worker_id: int) -> list[GpuRecord]:
        """The GPUs of a worker."""
        return [g for g in self.gpu_devices.values() if g.host.id == worker_id]

    def stamp(self, row: WorkerRecord | GpuRecord) -> None:
        """Mark a worker or GPU as changed, for whoever reads changes."""
        self.last_change += 1
        row.changed = self.last_change

    def _check(self, table: str, row: Any) -> None:
        """Uniqueness, sizes, known states, and what a state of an instance holds. Raises Refused."""
        others = [r for r in self.table(table).values() if _id(r) != _id(row)]
        if isinstance(row, GpuRecord):
            key = row.host.id, row.type, row.index
            if any((g.host.id, g.type, g.index) == key for g in others):
                raise Refused(f"worker {row.host.name} has a GPU {row.type}:{row.index} already")
        elif not isinstance(row, dict) and any(r.name == row.name for r in others):
            raise Refused(f"the name {row.name} is taken in {table}")
        sizes = ("ram_total", "ram_reserved", "vram_reserved", "vram_total", "vram_used", "index")
        if any((getattr(row, s, None) or 0) < 0 for s in sizes):
            raise Refused("sizes are not negative")
        if isinstance(row, WorkerRecord) and row.state not in list(WorkerState):
            raise Refused(f"{row.state} is no state of a worker")
        if isinstance(row, InstanceRecord):
            check_instance(row)


def _id(row: Any) -> int:
    return int(row["id"] if isinstance(row, dict) else row.id)


def _made(kind: type[Row], id_: int, columns: dict[str, Any]) -> Row:
    try:
        return kind(id=id_, **columns)
    except TypeError as error:
        raise Refused(f"no such column: {error}") from None


def _with(row: Any, changes: Mapping[str, Any]) -> Any:
    new = copy(row)
    _set(new, changes)
    return new


def _set(row: Any, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if name not in type(row).__slots__:
            raise Refused(f"there is no column {name}")
        setattr(
            row, name, InstanceState(value) if isinstance(row, InstanceRecord) and name == "state" else value
        )


def _same(row: Any, changes: Mapping[str, Any], ignored: set[str]) -> bool:
    return all(c in ignored or getattr(row, c, None) == v for c, v in changes.items())
