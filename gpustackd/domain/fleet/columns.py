"""The arrays of the fleet: workers along one axis, their GPUs in slots along a second.

All sizes are bytes; -1 stands for "unknown" (a NULL in the row).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.backends import DeviceKind, architecture

UNKNOWN = -1

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Columns:
    """Storage that grows by doubling; positions and slots stay where they are."""

    def __init__(self, workers: int, slots: int) -> None:
        self.tick = 0
        self.count = 0
        """Positions in use run from 0 to count - 1; some may be dead (`alive`)."""
        self.inventory = 0
        """Rises whenever a GPU appears, goes or has another size."""
        self._largest: tuple[int, int] | None = None
        self.types: list[str] = []
        self._type_code: dict[str, int] = {}
        self.states: list[str] = []
        self._state_code: dict[str, int] = {}
        self.kinds: list[DeviceKind] = []
        """Kinds of devices that were ever seen; never fewer."""
        self._kind_code: dict[DeviceKind, int] = {}
        self.architectures: list[str] = [""]
        """CPU architectures that were ever seen; the first stands for "not known"."""
        self._allocate(max(workers, 1), max(slots, 1))

    def _allocate(self, workers: int, slots: int) -> None:
        self.alive: Bools = np.zeros(workers, np.bool_)
        self.touched: Ints = np.zeros(workers, np.int64)
        """Tick of the last change of the worker, its GPUs or who sits on them."""
        self.described: Ints = np.zeros(workers, np.int64)
        """Tick of the last change of what filters look at: the worker's row, the kinds of its cards."""
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
        self.arch: NDArray[np.int32] = np.zeros(workers, np.int32)
        """Position of the CPU architecture in `architectures`."""
        self.occupants: NDArray[np.int32] = np.zeros(workers, np.int32)
        """GPU slots (or CPU placements) held by instances of any model."""
        self.spanning: NDArray[np.int32] = np.zeros(workers, np.int32)
        """Instances with a part here and another part on another worker."""
        shape = (workers, slots)
        self.gpu_id: Ints = np.zeros(shape, np.int64)
        """0 = no GPU in this slot."""
        self.gpu_index: Ints = np.full(shape, -1, np.int64)
        self.gpu_type: NDArray[np.int32] = np.full(shape, -1, np.int32)
        self.gpu_open: Bools = np.zeros(shape, np.bool_)
        self.gpu_over: Bools = np.zeros(shape, np.bool_)
        self.vram_total: Ints = np.full(shape, UNKNOWN, np.int64)
        self.vram_capacity: Ints = np.full(shape, UNKNOWN, np.int64)
        self.vram_allocated: Ints = np.zeros(shape, np.int64)
        self.vram_assumed: Ints = np.zeros(shape, np.int64)
        self.gpu_version: Ints = np.zeros(shape, np.int64)
        self.gpu_kind: NDArray[np.int32] = np.full(shape, -1, np.int32)
        """Position of the device's kind in `kinds`; -1 = no GPU."""
        self.foreign: Ints = np.zeros(shape, np.int64)
        """VRAM that processes of others hold beyond the worker's reserve, where that counts."""
        self.gpu_occupants: NDArray[np.int32] = np.zeros(shape, np.int32)
        # What follows from the columns above, brought up to date by `renew` for workers that changed.
        self.usable: Bools = np.zeros(shape, np.bool_)
        """A GPU is there, open, of known size and not over-committed."""
        self.free: Ints = np.zeros(shape, np.int64)
        """Free VRAM; 0 where not usable."""
        self.ratio: NDArray[np.float64] = np.zeros(shape)
        """Free VRAM as a part of the total."""
        self.ram_free: Ints = np.zeros(workers, np.int64)
        self._renewed = -1

    _WORKER_COLUMNS = (
        "alive", "touched", "described", "worker_id", "cluster", "state", "ready", "unified", "worker_over",
        "ram_capacity", "ram_allocated", "ram_assumed", "worker_version", "arch", "occupants",
        "spanning",
    )  # fmt: skip
    _GPU_COLUMNS = (
        "gpu_id", "gpu_index", "gpu_type", "gpu_open", "gpu_over", "vram_total", "vram_capacity",
        "vram_allocated", "vram_assumed", "gpu_version", "gpu_kind", "foreign", "gpu_occupants",
    )  # fmt: skip
    _EMPTY = {  # noqa: RUF012 - read only
        "ram_capacity": UNKNOWN, "gpu_index": -1, "gpu_type": -1, "gpu_kind": -1, "vram_total": UNKNOWN,
        "vram_capacity": UNKNOWN,
    }  # fmt: skip

    def _grow(self, workers: int, slots: int) -> None:
        old = {n: getattr(self, n) for n in (*self._WORKER_COLUMNS, *self._GPU_COLUMNS)}
        self._allocate(workers, slots)
        for name in self._WORKER_COLUMNS:
            getattr(self, name)[: len(old[name])] = old[name]
        for name in self._GPU_COLUMNS:
            rows, cols = old[name].shape
            getattr(self, name)[:rows, :cols] = old[name]

    def _clear_worker(self, w: int) -> None:
        for name in self._WORKER_COLUMNS:
            getattr(self, name)[w] = self._EMPTY.get(name, 0)

    def _clear_gpu(self, place: tuple[int, int]) -> None:
        for name in self._GPU_COLUMNS:
            getattr(self, name)[place] = self._EMPTY.get(name, 0)

    @property
    def slots(self) -> int:
        """GPU slots that every worker has room for."""
        return int(self.gpu_id.shape[1])

    def type_code(self, name: str) -> int:
        """The small integer that stands for a GPU type in `gpu_type`."""
        if name not in self._type_code:
            self._type_code[name] = len(self.types)
            self.types.append(name)
        return self._type_code[name]

    def kind_code(self, kind: DeviceKind) -> int:
        """The small integer that stands for a kind of device in `gpu_kind`."""
        if kind not in self._kind_code:
            self._kind_code[kind] = len(self.kinds)
            self.kinds.append(kind)
        return self._kind_code[kind]

    def arch_code(self, cpu_arch: str | None) -> int:
        """The small integer that stands for a CPU architecture in `arch`."""
        name = architecture(cpu_arch)
        if name not in self.architectures:
            self.architectures.append(name)
        return self.architectures.index(name)

    def state_code(self, name: str) -> int:
        """The small integer that stands for a worker state in `state`."""
        if name not in self._state_code:
            self._state_code[name] = len(self.states)
            self.states.append(name)
        return self._state_code[name]

    def touch(self, w: int) -> None:
        """Stamp a worker as changed."""
        self.tick += 1
        self.touched[w] = self.tick

    def describe(self, w: int) -> None:
        """Stamp a worker as changed in what filters look at."""
        self.touch(w)
        self.described[w] = self.tick

    def inventory_changed(self) -> None:
        """Note that a GPU appeared, went or has another size."""
        self.inventory += 1
        self._largest = None

    # -- what is free ------------------------------------------------------------------------------------

    def free_vram(self, where: Any = slice(None)) -> Ints:
        """Free bytes per slot of the worker positions `where` (an array or slice); 0 where unknown or
        over-committed, and on unified memory never more than the one pool has left."""
        # an unknown capacity is below 0, and so is what is left of it
        free: Ints = self.vram_capacity[where] - self.vram_allocated[where]
        free -= self.vram_assumed[where]
        free -= self.foreign[where]
        np.maximum(free, 0, out=free)
        free *= ~self.gpu_over[where]
        unified: Bools = self.unified[where]
        if unified.any():
            pool = self.free_ram(where)
            np.minimum(free, pool[:, None], out=free, where=unified[:, None])
        return free

    def free_ram(self, where: Any = slice(None)) -> Ints:
        """Free RAM of the worker positions `where` (an array or slice); 0 where unknown or over-committed."""
        free: Ints = self.ram_capacity[where] - self.ram_allocated[where]
        free -= self.ram_assumed[where]
        np.maximum(free, 0, out=free)
        free *= ~self.worker_over[where]
        return free

    def renew(self) -> None:
        """Bring `usable`, `free`, `ratio` and `ram_free` up to date."""
        if self._renewed == self.tick:
            return
        rows = (self.touched[: self.count] > self._renewed).nonzero()[0]
        self._renewed = self.tick
        total = self.vram_total[rows]
        usable = self.gpu_open[rows] & ~self.gpu_over[rows]
        usable &= self.vram_capacity[rows] != UNKNOWN
        usable &= total > 0
        free = self.free_vram(rows)
        free *= usable
        self.usable[rows] = usable
        self.free[rows] = free
        self.ratio[rows] = free / np.maximum(total, 1)
        self.ram_free[rows] = self.free_ram(rows)

    @property
    def largest(self) -> tuple[int, int]:
        """Total bytes of the largest GPU, and of all GPUs of the largest worker: bounds that nothing on
        one GPU or one worker can exceed."""
        if self._largest is None:
            total = np.maximum(self.vram_total[: self.count], 0)
            sums = total.sum(axis=1)
            self._largest = (int(total.max(initial=0)), int(sums.max(initial=0)))
        return self._largest
