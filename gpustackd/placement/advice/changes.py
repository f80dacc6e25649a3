"""One change that could help: what it is, what it costs, and how the fleet looks with it.

A change of the fleet is made on the fleet itself and undone after the trial; a change of the model carries
the edited model. Costs are no money: they order suggestions by how much is given up or has to be bought.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.placement.diagnostics.wording import gib, some

Undo = Callable[[], None]


class ChangeKind(StrEnum):
    """Kinds of changes, as data knows them."""

    OPEN_GPUS = "open_gpus"
    READY_WORKER = "ready_worker"
    EDIT_MODEL = "edit_model"
    STOP_INSTANCES = "stop_instances"
    ADD_GPU = "add_gpu"
    ADD_WORKER = "add_worker"


class Change(Protocol):
    """What every change can say and do."""

    @property
    def kind(self) -> ChangeKind:
        """Of which kind it is."""

    @property
    def cost(self) -> float:
        """The less, the sooner it is suggested."""

    @property
    def text(self) -> str:
        """The act in words, as one tells somebody to do it."""

    def as_json(self) -> dict[str, Any]:
        """The act as data: names, and columns with their new values."""

    def make(self, fleet: Fleet) -> Undo:
        """Have the fleet as if it were done; returns how to take it back."""


@dataclass(frozen=True, slots=True)
class Holder:
    """An instance that holds memory."""

    id: int
    name: str
    model: str
    model_id: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EditModel:
    """Other columns of the model."""

    columns: Mapping[str, Any]
    """Column -> value as the row would hold it."""
    spec: ModelSpec = field(compare=False)
    """The model with these columns."""
    text: str = ""
    cost: float = 3.0
    family: str = ""
    """What it edits: of several edits of one family the smallest is enough."""
    less_memory: bool = False
    """Whether it gives the engine less memory than it has now: then one longest sequence must still fit."""
    kind: ChangeKind = ChangeKind.EDIT_MODEL

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "model": self.spec.name, "columns": dict(self.columns)}

    def make(self, fleet: Fleet) -> Undo:
        return _nothing


@dataclass(frozen=True, slots=True)
class OpenGpus:
    """GPUs of one worker made schedulable again."""

    worker: str
    gpus: tuple[GpuRow, ...]
    kind: ChangeKind = ChangeKind.OPEN_GPUS

    @property
    def cost(self) -> float:
        return 1.0 + 0.01 * len(self.gpus)

    @property
    def text(self) -> str:
        names = [f"{self.worker}:{g.type}:{g.index}" for g in self.gpus]
        return f"uncordon {some(names, 8)} (schedulable is false)"

    def as_json(self) -> dict[str, Any]:
        cards = [{"type": g.type, "index": g.index} for g in self.gpus]
        return {"kind": self.kind.value, "worker": self.worker, "gpus": cards}

    def make(self, fleet: Fleet) -> Undo:
        before = [gpu_now(fleet, g.id) for g in self.gpus]
        for row in before:
            w = fleet.position[row.worker_id]
            fleet.put_gpu(replace(row, schedulable=True, open=bool(fleet.ready[w])))
        return lambda: _put_gpus(fleet, before)


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that is READY again."""

    worker: str
    worker_id: int
    state: str
    """What it is now."""
    kind: ChangeKind = ChangeKind.READY_WORKER

    @property
    def cost(self) -> float:
        return 2.0 if self.state == "MAINTENANCE" else 7.0

    @property
    def text(self) -> str:
        if self.state == "MAINTENANCE":
            return f"take worker {self.worker} out of maintenance"
        return f"bring worker {self.worker} back (it is {self.state})"

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "worker": self.worker, "state": self.state}

    def make(self, fleet: Fleet) -> Undo:
        w = fleet.position[self.worker_id]
        worker, gpus = worker_now(fleet, w), gpus_now(fleet, w)
        fleet.put_worker(replace(worker, state="READY"))
        _put_gpus(fleet, [replace(g, open=g.schedulable) for g in gpus])

        def undo() -> None:
            fleet.put_worker(worker)
            _put_gpus(fleet, gpus)

        return undo


@dataclass(frozen=True, slots=True)
class StopInstances:
    """Instances that give back what they hold."""

    holders: tuple[Holder, ...]
    bytes_held: int = 0
    kind: ChangeKind = ChangeKind.STOP_INSTANCES

    @property
    def cost(self) -> float:
        weight = sum(1.0 + max(h.priority, 0) / (10 + abs(h.priority)) for h in self.holders)
        return 5.0 + weight + min(self.bytes_held / 2**40, 0.9) / 10

    @property
    def text(self) -> str:
        names = [f"{h.name} of {h.model}" for h in self.holders]
        return f"stop {some(names, 8)} to free {gib(self.bytes_held)}"

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "instances": [h.name for h in self.holders]}

    def make(self, fleet: Fleet) -> Undo:
        undo = [give_back(fleet, h.id) for h in self.holders]

        def all_back() -> None:
            for one in reversed(undo):
                one()

        return all_back


@dataclass(frozen=True, slots=True)
class AddGpu:
    """One more GPU of a kind that is known, in a worker that is there."""

    worker: str
    row: GpuRow
    kind: ChangeKind = ChangeKind.ADD_GPU
    cost: float = 8.0

    @property
    def text(self) -> str:
        return f"add one more {_card(self.row)} to worker {self.worker}"

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "worker": self.worker, "gpu": card_columns(self.row)}

    def make(self, fleet: Fleet) -> Undo:
        fleet.put_gpu(self.row)
        return lambda: fleet.drop_gpu(self.row.id)


@dataclass(frozen=True, slots=True)
class AddWorker:
    """One more worker like one that is there."""

    like: str
    row: WorkerRow
    gpus: tuple[GpuRow, ...]
    columns: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    kind: ChangeKind = ChangeKind.ADD_WORKER
    cost: float = 10.0

    @property
    def text(self) -> str:
        cards = f"{len(self.gpus)} x {_card(self.gpus[0])}" if self.gpus else "no GPU"
        return f"add one more worker like {self.like} ({cards})"

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind.value, "like": self.like, "worker": self.row.name,
                "columns": dict(self.columns), "gpus": [card_columns(g) for g in self.gpus]}  # fmt: skip

    def make(self, fleet: Fleet) -> Undo:
        fleet.put_worker(self.row)
        _put_gpus(fleet, self.gpus)
        return lambda: fleet.drop_worker(self.row.id)


@dataclass(frozen=True, slots=True)
class Together:
    """Two changes that only help together."""

    first: EditModel
    second: Change

    @property
    def kind(self) -> ChangeKind:
        return self.second.kind

    @property
    def cost(self) -> float:
        return self.first.cost + self.second.cost

    @property
    def text(self) -> str:
        return f"{self.first.text}; and {self.second.text}"

    def as_json(self) -> dict[str, Any]:
        return {"kind": "together", "changes": [self.first.as_json(), self.second.as_json()]}

    def make(self, fleet: Fleet) -> Undo:
        return self.second.make(fleet)


def edit_of(change: Change) -> EditModel | None:
    """The edit of the model in a change, if there is one."""
    if isinstance(change, EditModel):
        return change
    return change.first if isinstance(change, Together) else None


def give_back(fleet: Fleet, instance_id: int) -> Undo:
    """Have the fleet as if an instance held nothing; returns how to take that back."""
    held = list(fleet.occupancy.by_instance.get(instance_id, ()))
    workers = {b.worker_id for b in held if b.worker_id in fleet.position}
    positions = {i: fleet.position[i] for i in workers}
    rows = {i: worker_now(fleet, w) for i, w in positions.items()}
    gpus = {b.gpu_id: gpu_now(fleet, b.gpu_id) for b in held if b.gpu_id in fleet.gpu_rows}
    fleet.remove_instance(instance_id)
    for gpu_id, gpu in gpus.items():
        mine = sum(b.vram for b in held if b.gpu_id == gpu_id)
        fleet.put_gpu(_less_on_gpu(gpu, mine))
    for worker_id, row in rows.items():
        unified = row.unified_memory
        mine = sum(b.ram + (b.vram if unified else 0) for b in held if b.worker_id == worker_id)
        fleet.put_worker(_less_on_worker(row, mine))

    def undo() -> None:
        for row in rows.values():
            fleet.put_worker(row)
        _put_gpus(fleet, gpus.values())
        for b in held:
            fleet.add_booking(b)

    return undo


def more_free(fleet: Fleet, worker_id: int, vram: int, ram: int) -> Undo:
    """Have a worker as if up to `vram` bytes more of each card were free, and `ram` of its RAM."""
    w = fleet.position[worker_id]
    worker, gpus = worker_now(fleet, w), gpus_now(fleet, w)
    _put_gpus(fleet, [replace(g, vram_allocated=max(g.vram_allocated - vram, 0)) for g in gpus])
    pool = ram + (vram * len(gpus) if worker.unified_memory else 0)
    fleet.put_worker(replace(worker, ram_allocated=max(worker.ram_allocated - pool, 0)))

    def undo() -> None:
        fleet.put_worker(worker)
        _put_gpus(fleet, gpus)

    return undo


def gpu_now(fleet: Fleet, gpu_id: int) -> GpuRow:
    """A GPU's row with what is booked on it by now."""
    place = fleet.slot[gpu_id]
    return replace(
        fleet.gpu_rows[gpu_id],
        vram_allocated=int(fleet.vram_allocated[place]),
        over_committed=bool(fleet.gpu_over[place]),
        version=int(fleet.gpu_version[place]),
    )


def gpus_now(fleet: Fleet, w: int) -> list[GpuRow]:
    """The GPUs of a worker position, as `gpu_now`."""
    return [gpu_now(fleet, int(g)) for g in fleet.gpu_id[w] if g]


def worker_now(fleet: Fleet, w: int) -> WorkerRow:
    """A worker's row with what is booked on it by now."""
    return replace(
        fleet.row(w),
        ram_allocated=int(fleet.ram_allocated[w]),
        over_committed=bool(fleet.worker_over[w]),
        version=int(fleet.worker_version[w]),
    )


def card_columns(row: GpuRow) -> dict[str, Any]:
    """A GPU as a Worker document lists it."""
    names = ("index", "type", "vendor", "name", "arch_family", "compute_capability", "runtime_version",
             "vram_total")  # fmt: skip
    return {n: getattr(row, n) for n in names if getattr(row, n) is not None}


def _less_on_gpu(row: GpuRow, by: int) -> GpuRow:
    left = max(row.vram_allocated - by, 0)
    fits = left == 0 or (row.capacity is not None and left <= row.capacity)
    return replace(row, vram_allocated=left, over_committed=row.over_committed and not fits)


def _less_on_worker(row: WorkerRow, by: int) -> WorkerRow:
    left = max(row.ram_allocated - by, 0)
    fits = left == 0 or (row.ram_capacity is not None and left <= row.ram_capacity)
    return replace(row, ram_allocated=left, over_committed=row.over_committed and not fits)


def _put_gpus(fleet: Fleet, rows: Any) -> None:
    for row in rows:
        fleet.put_gpu(row)


def _card(row: GpuRow) -> str:
    size = "" if row.vram_total is None else f" with {gib(row.vram_total)}"
    return f"{row.name or row.type}{size}"


def _nothing() -> None:
    """Nothing to undo."""
