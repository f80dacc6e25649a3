"""The fleet as columns: workers along one axis, their GPUs in slots along a second.

Worker position `w` and slot `s` are stable while the worker lives; a freed position is used again.
Free memory that a decision may use is `capacity - allocated - assumed`: `allocated` is what the
database says, `assumed` what this process decided but has not committed yet. Every change stamps the
worker with a new `tick`, so that results kept per demand know which workers to compute again.
All sizes are bytes; -1 stands for "unknown" (a NULL in the row).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
NO_SLOT = -1

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker as read from the database (capacity and allocation as stored there)."""

    id: int
    name: str
    cluster_id: int | None
    state: str
    version: int = 0
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ram_capacity: int | None = None
    """RAM total less reserves (on unified memory less the GPU's reserve too); None = unknown."""
    ram_allocated: int = 0
    unified_memory: bool = False
    over_committed: bool = False
    vram_reserved: int = 0
    cpu_arch: str | None = None
    ip: str | None = None
    advertise_address: str | None = None
    ifname: str | None = None


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU as read from the database."""

    id: int
    worker_id: int
    index: int
    type: str
    version: int = 0
    vram_total: int | None = None
    capacity: int | None = None
    """VRAM total less the worker's reserve; None = unknown, and then nothing is placed there."""
    vram_allocated: int = 0
    open: bool = True
    """Worker READY and GPU schedulable."""
    schedulable: bool = True
    over_committed: bool = False
    vendor: str | None = None
    name: str | None = None
    uuid: str | None = None
    arch_family: str | None = None
    compute_capability: str | None = None
    runtime_version: str | None = None
    vram_used: int | None = None
    links: Mapping[str, Any] | None = None
    network: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Booking:
    """One ledger row: what an instance holds on a GPU (`gpu_id` set) or in a worker's RAM."""

    instance_id: int
    model_id: int
    worker_id: int
    gpu_id: int | None
    vram: int
    ram: int
    part: str = "main"
    occupies: bool = True
    """False for the RAM row of a part that holds GPUs too: that part is counted by its GPU rows."""


class Fleet:
    """The columnar view that decisions read. Not thread-safe; one owner mutates it."""

    def __init__(self, workers: int = 64, slots: int = 8) -> None:
        self.tick = 0
        self.count = 0
        """Positions in use run from 0 to count - 1; some may be dead (`alive`)."""
        self._free_positions: list[int] = []
        self.position: dict[int, int] = {}
        self.slot: dict[int, tuple[int, int]] = {}
        """gpu id -> (worker position, slot)."""
        self.worker_rows: list[WorkerRow | None] = []
        self.gpu_rows: dict[int, GpuRow] = {}
        self.by_name: dict[str, int] = {}
        self.types: list[str] = []
        self._type_code: dict[str, int] = {}
        self.states: list[str] = []
        self._state_code: dict[str, int] = {}
        self._allocate(workers, slots)
        self.bookings: dict[int, dict[int, Booking]] = {}
        """worker id -> {n: Booking} of the ledger, as far as known."""
        self.by_instance: dict[int, list[Booking]] = {}
        self.model_on_worker: dict[int, dict[int, int]] = defaultdict(dict)
        """model id -> {worker position: GPU slots (or CPU placements) it holds there}."""
        self.model_on_gpu: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
        self.instances_on_worker: dict[int, dict[int, int]] = defaultdict(dict)
        """worker id -> {instance id: ledger rows it has there}."""

    # -- storage ------------------------------------------------------------------------------------

    def _allocate(self, workers: int, slots: int) -> None:
        self.alive: Bools = np.zeros(workers, np.bool_)
        self.touched: Ints = np.zeros(workers, np.int64)
        self.worker_id: Ints = np.zeros(workers, np.int64)
        self.cluster: Ints = np.zeros(workers, np.int64)
        self.state: NDArray[np.int16] = np.zeros(workers, np.int16)
        self.ready: Bools = np.zeros(workers, np.bool_)
        self.unified: Bools = np.zeros(workers, np.bool_)
        self.worker_over: Bools = np.zeros(workers, np.bool_)
        self.ram_capacity: Ints = np.full(workers, UNKNOWN, np.int64)
        self.ram_allocated: Ints = np.zeros(workers, np.int64)
        self.ram_assumed: Ints = np.zeros(workers, np.int64)
        self.worker_version: Ints = np.zeros(workers, np.int64)
        self.occupants: NDArray[np.int32] = np.zeros(workers, np.int32)
        """GPU slots (or CPU placements) held by instances of any model."""
        shape = (workers, slots)
        self.gpu_id: Ints = np.zeros(shape, np.int64)
        """0 = no GPU in this slot."""
        self.gpu_index: NDArray[np.int32] = np.full(shape, -1, np.int32)
        self.gpu_type: NDArray[np.int16] = np.full(shape, -1, np.int16)
        self.gpu_open: Bools = np.zeros(shape, np.bool_)
        self.gpu_over: Bools = np.zeros(shape, np.bool_)
        self.vram_total: Ints = np.full(shape, UNKNOWN, np.int64)
        self.vram_capacity: Ints = np.full(shape, UNKNOWN, np.int64)
        self.vram_allocated: Ints = np.zeros(shape, np.int64)
        self.vram_assumed: Ints = np.zeros(shape, np.int64)
        self.gpu_version: Ints = np.zeros(shape, np.int64)
        self.gpu_occupants: NDArray[np.int32] = np.zeros(shape, np.int32)

    _WORKER_COLUMNS = ("alive touched worker_id cluster state ready unified worker_over ram_capacity ram_allocated"
                       " ram_assumed worker_version occupants").split()  # fmt: skip
    _GPU_COLUMNS = ("gpu_id gpu_index gpu_type gpu_open gpu_over vram_total vram_capacity vram_allocated"
                    " vram_assumed gpu_version gpu_occupants").split()  # fmt: skip

    def _grow(self, workers: int, slots: int) -> None:
        old = {n: getattr(self, n) for n in (*self._WORKER_COLUMNS, *self._GPU_COLUMNS)}
        self._allocate(workers, slots)
        for name in self._WORKER_COLUMNS:
            getattr(self, name)[: len(old[name])] = old[name]
        for name in self._GPU_COLUMNS:
            rows, cols = old[name].shape
            getattr(self, name)[:rows, :cols] = old[name]

    @property
    def slots(self) -> int:
        return int(self.gpu_id.shape[1])

    def type_code(self, name: str) -> int:
        """The small integer that stands for a GPU type in `gpu_type`."""
        if name not in self._type_code:
            self._type_code[name] = len(self.types)
            self.types.append(name)
        return self._type_code[name]

    def state_code(self, name: str) -> int:
        if name not in self._state_code:
            self._state_code[name] = len(self.states)
            self.states.append(name)
        return self._state_code[name]

    def touch(self, w: int) -> None:
        self.tick += 1
        self.touched[w] = self.tick

    # -- rows from the database ------------------------------------------------------------------------

    def put_worker(self, row: WorkerRow) -> None:
        """Add a worker or overwrite what is known of it. Its GPUs and bookings stay."""
        w = self.position.get(row.id)
        if w is None:
            if self._free_positions:
                w = self._free_positions.pop()
            else:
                w = self.count
                self.count += 1
                self.worker_rows.append(None)
                if w >= len(self.alive):
                    self._grow(2 * len(self.alive), self.slots)
            self.position[row.id] = w
        else:
            old = self.worker_rows[w]
            if old is not None and old.name != row.name and self.by_name.get(old.name) == w:
                del self.by_name[old.name]
        self.worker_rows[w] = row
        self.by_name[row.name] = w
        self.alive[w] = True
        self.worker_id[w] = row.id
        self.cluster[w] = row.cluster_id or 0
        self.state[w] = self.state_code(row.state)
        self.ready[w] = row.state == "READY"
        self.unified[w] = row.unified_memory
        self.worker_over[w] = row.over_committed
        self.ram_capacity[w] = UNKNOWN if row.ram_capacity is None else row.ram_capacity
        self.ram_allocated[w] = row.ram_allocated
        self.worker_version[w] = row.version
        self.touch(w)

    def put_gpu(self, row: GpuRow) -> None:
        """Add a GPU or overwrite what is known of it. A GPU of an unknown worker is passed over."""
        place = self.slot.get(row.id)
        if place is None:
            w = self.position.get(row.worker_id)
            if w is None:
                return
            empty = np.flatnonzero(self.gpu_id[w] == 0)
            if not len(empty):
                self._grow(len(self.alive), 2 * self.slots)
                empty = np.flatnonzero(self.gpu_id[w] == 0)
            place = (w, int(empty[0]))
            self.slot[row.id] = place
        self.gpu_rows[row.id] = row
        self.gpu_id[place] = row.id
        self.gpu_index[place] = row.index
        self.gpu_type[place] = self.type_code(row.type)
        self.gpu_open[place] = row.open
        self.gpu_over[place] = row.over_committed
        self.vram_total[place] = UNKNOWN if row.vram_total is None else row.vram_total
        self.vram_capacity[place] = UNKNOWN if row.capacity is None else row.capacity
        self.vram_allocated[place] = row.vram_allocated
        self.gpu_version[place] = row.version
        self.touch(place[0])

    def drop_gpu(self, gpu_id: int) -> None:
        place = self.slot.pop(gpu_id, None)
        if place is None:
            return
        del self.gpu_rows[gpu_id]
        for name in self._GPU_COLUMNS:
            getattr(self, name)[place] = 0
        self.gpu_index[place] = self.gpu_type[place] = -1
        self.vram_total[place] = self.vram_capacity[place] = UNKNOWN
        for counts in self.model_on_gpu.values():
            counts.pop(place, None)
        self.touch(place[0])

    def drop_worker(self, worker_id: int) -> None:
        w = self.position.get(worker_id)
        if w is None:
            return
        self.set_bookings(worker_id, ())
        for gpu_id in [int(g) for g in self.gpu_id[w] if g]:
            self.drop_gpu(gpu_id)
        row = self.worker_rows[w]
        if row is not None and self.by_name.get(row.name) == w:
            del self.by_name[row.name]
        self.worker_rows[w] = None
        for name in self._WORKER_COLUMNS:
            getattr(self, name)[w] = 0
        self.ram_capacity[w] = UNKNOWN
        del self.position[worker_id]
        self._free_positions.append(w)
        self.touch(w)

    # -- who sits where ----------------------------------------------------------------------------------

    def set_bookings(self, worker_id: int, bookings: Iterable[Booking]) -> None:
        """Replace all that is known of the ledger on one worker."""
        for old in list(self.bookings.get(worker_id, {}).values()):
            self._forget(old)
        self.bookings.pop(worker_id, None)
        for b in bookings:
            self.add_booking(b)

    def add_booking(self, b: Booking) -> None:
        """Count one ledger row among the occupants (memory is `vram_allocated`, not touched here)."""
        self.bookings.setdefault(b.worker_id, {})[id(b)] = b
        self.by_instance.setdefault(b.instance_id, []).append(b)
        here = self.instances_on_worker[b.worker_id]
        here[b.instance_id] = here.get(b.instance_id, 0) + 1
        self._count(b, 1)

    def remove_instance(self, instance_id: int) -> None:
        """Forget every ledger row of one instance."""
        for b in list(self.by_instance.get(instance_id, ())):
            self._forget(b)

    def _forget(self, b: Booking) -> None:
        rows = self.bookings.get(b.worker_id)
        if rows is None or rows.pop(id(b), None) is None:
            return
        mine = self.by_instance[b.instance_id]
        mine.remove(b)
        if not mine:
            del self.by_instance[b.instance_id]
        here = self.instances_on_worker[b.worker_id]
        here[b.instance_id] -= 1
        if not here[b.instance_id]:
            del here[b.instance_id]
        self._count(b, -1)

    def _count(self, b: Booking, by: int) -> None:
        w = self.position.get(b.worker_id)
        if w is None or not b.occupies:
            return
        mine = self.model_on_worker[b.model_id]
        mine[w] = mine.get(w, 0) + by
        if mine[w] <= 0:
            del mine[w]
        self.occupants[w] += by
        place = self.slot.get(b.gpu_id) if b.gpu_id is not None else None
        if place is not None:
            slots = self.model_on_gpu[b.model_id]
            slots[place] = slots.get(place, 0) + by
            if slots[place] <= 0:
                del slots[place]
            self.gpu_occupants[place] += by
        self.touch(w)

    # -- what is free ------------------------------------------------------------------------------------

    def free_vram(self, where: Any = slice(None)) -> Ints:
        """Free bytes per slot of the worker positions `where`; 0 where unknown or over-committed,
        and on unified memory never more than the one pool has left."""
        free = self.vram_capacity[where] - self.vram_allocated[where] - self.vram_assumed[where]
        free = np.where((self.vram_capacity[where] == UNKNOWN) | self.gpu_over[where], 0, np.maximum(free, 0))
        unified = self.unified[where]
        if np.any(unified):
            pool = self.free_ram(where)
            free = np.where(np.expand_dims(unified, -1), np.minimum(free, np.expand_dims(pool, -1)), free)
        return free

    def free_ram(self, where: Any = slice(None)) -> Ints:
        """Free RAM per worker position; 0 where unknown or over-committed."""
        free = self.ram_capacity[where] - self.ram_allocated[where] - self.ram_assumed[where]
        return np.where((self.ram_capacity[where] == UNKNOWN) | self.worker_over[where], 0, np.maximum(free, 0))

    def row(self, w: int) -> WorkerRow:
        """The worker at a live position."""
        found = self.worker_rows[w]
        if found is None:
            raise KeyError(f"no worker at position {w}")
        return found

    def positions_by_id(self) -> Ints:
        """Live positions in the order of worker ids: the stable order of every walk."""
        live = np.flatnonzero(self.alive[: self.count])
        return live[np.argsort(self.worker_id[live], kind="stable")]

    def gpu_ids_of(self, worker_ids: Sequence[int]) -> list[int]:
        found: list[int] = []
        for worker_id in worker_ids:
            w = self.position.get(worker_id)
            if w is not None:
                found.extend(int(g) for g in self.gpu_id[w] if g)
        return found
