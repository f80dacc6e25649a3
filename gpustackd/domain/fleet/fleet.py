"""The fleet as arrays, kept current by rows from the database and by this process's own decisions.

Workers lie along the first axis (position `w`), their GPUs in slots along the second (slot `s`). Positions
and slots are stable while a worker lives. All sizes are bytes; `UNKNOWN` (-1) stands for NULL.

Free memory that a decision may use is `capacity - allocated - assumed`: `allocated` is what the database
says, `assumed` what this process decided and has not seen committed. Every change stamps the worker with a
new `tick`, so that cached results know which workers to compute again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.backends import DeviceKind, architecture, device_kind
from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.columns import UNKNOWN, Bools, Codes, Ints, grown
from gpustackd.domain.fleet.occupancy import Occupancy, Place
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.outcome import Placement

MAX_FREE_POSITIONS = 256
"""Freed positions are used again only when there are more of them than this and than workers: until then
positions are in the order of worker ids."""
FOREIGN_CHANGE = 32 * 2**20
"""Bytes by which others' memory on a GPU has to change to count as a change: usage samples fluctuate, and
every change makes the worker be computed again."""

_WORKER_COLUMNS: Mapping[str, tuple[type[np.generic], int]] = {
    "alive": (np.bool_, 0),
    "touched": (np.int64, 0),
    "described": (np.int64, 0),
    "worker_id": (np.int64, 0),
    "cluster": (np.int64, 0),
    "state": (np.int16, 0),
    "ready": (np.bool_, 0),
    "unified": (np.bool_, 0),
    "worker_over": (np.bool_, 0),
    "ram_capacity": (np.int64, UNKNOWN),
    "ram_allocated": (np.int64, 0),
    "worker_version": (np.int64, 0),
    "arch": (np.int32, 0),
    "ram_free": (np.int64, 0),
}
_GPU_COLUMNS: Mapping[str, tuple[type[np.generic], int]] = {
    "gpu_id": (np.int64, 0),
    "gpu_index": (np.int64, -1),
    "gpu_type": (np.int32, -1),
    "gpu_open": (np.bool_, 0),
    "gpu_over": (np.bool_, 0),
    "vram_total": (np.int64, UNKNOWN),
    "vram_capacity": (np.int64, UNKNOWN),
    "vram_allocated": (np.int64, 0),
    "gpu_version": (np.int64, 0),
    "gpu_kind": (np.int32, -1),
    "foreign": (np.int64, 0),
    "usable": (np.bool_, 0),
    "free": (np.int64, 0),
    "ratio": (np.float64, 0),
}
"""Name -> (type, value of an empty place)."""


class Fleet:
    """The columnar view that decisions read. Not thread-safe; one owner changes it."""

    # Per worker, shape (positions,).
    alive: Bools
    """Whether a worker is at this position."""
    touched: Ints
    """Tick of the last change of the worker, its GPUs or what instances hold there."""
    described: Ints
    """Tick of the last change of what filters look at: the worker's row, the kinds of its GPUs."""
    worker_id: Ints
    cluster: Ints
    """Cluster id; 0 = none."""
    state: NDArray[np.int16]
    """Index into `states`."""
    ready: Bools
    unified: Bools
    worker_over: Bools
    """Marked as over-committed."""
    ram_capacity: Ints
    ram_allocated: Ints
    worker_version: Ints
    arch: NDArray[np.int32]
    """Index into `architectures`."""

    # Per GPU, shape (positions, slots).
    gpu_id: Ints
    """0 = no GPU in this slot."""
    gpu_index: Ints
    gpu_type: NDArray[np.int32]
    """Index into `types`; -1 = no GPU."""
    gpu_open: Bools
    gpu_over: Bools
    """Marked as over-committed."""
    vram_total: Ints
    vram_capacity: Ints
    vram_allocated: Ints
    gpu_version: Ints
    gpu_kind: NDArray[np.int32]
    """Index into `kinds`; -1 = no GPU."""
    foreign: Ints
    """VRAM that other processes hold beyond the worker's reserve, where that counts."""

    # Derived from the columns above; `renew` brings them up to date for workers that changed.
    usable: Bools
    """A GPU is there, open, of known size and not over-committed."""
    free: Ints
    """Free VRAM; 0 where not usable."""
    ratio: NDArray[np.float64]
    """Free VRAM as a share of the total."""
    ram_free: Ints

    def __init__(self, workers: int = 64, slots: int = 8) -> None:
        workers, slots = max(workers, 1), max(slots, 1)
        for name, (kind, empty) in _WORKER_COLUMNS.items():
            setattr(self, name, np.full(workers, empty, kind))
        for name, (kind, empty) in _GPU_COLUMNS.items():
            setattr(self, name, np.full((workers, slots), empty, kind))
        self.tick = 0
        self.count = 0
        """Positions in use run from 0 to count - 1; some may be free again (`alive`)."""
        self.roster = 0
        """Rises whenever a worker appears, goes or is renamed."""
        self.inventory = 0
        """Rises whenever a GPU appears, goes or changes its size."""
        self.worker_rows: list[WorkerRow | None] = []
        """By position."""
        self.gpu_rows: dict[int, GpuRow] = {}
        """By GPU id."""
        self.by_name: dict[str, int] = {}
        """Worker name -> position."""
        self.position: dict[int, int] = {}
        """Worker id -> position."""
        self.slot: dict[int, Place] = {}
        """GPU id -> (worker position, slot)."""
        self.occupancy = Occupancy(self.position, self.slot, workers, slots)
        self._type_codes: Codes[str] = Codes()
        self._state_codes: Codes[str] = Codes()
        self._kind_codes: Codes[DeviceKind] = Codes()
        self._arch_codes = Codes([""])
        self.types = self._type_codes.values
        """GPU types seen so far."""
        self.states = self._state_codes.values
        """Worker states seen so far."""
        self.kinds = self._kind_codes.values
        """Kinds of devices seen so far."""
        self.architectures = self._arch_codes.values
        """CPU architectures seen so far; the first one stands for "not known"."""
        self._free_positions: list[int] = []
        self._order: tuple[int, Ints | None] = (-1, None)
        self._largest: tuple[int, int] | None = None
        self._renewed = -1

    @property
    def slots(self) -> int:
        """GPU slots that every worker has room for."""
        return int(self.gpu_id.shape[1])

    # -- rows from the database ------------------------------------------------------------------------

    def put_worker(self, row: WorkerRow) -> None:
        """Add a worker or overwrite what is known of it. GPUs, bookings and assumed amounts stay."""
        w = self.position.get(row.id)
        if w is None:
            w = self._new_position(row.id)
            self.roster += 1
        else:
            old = self.worker_rows[w]
            if old is not None and old.name != row.name:
                self.roster += 1
                if self.by_name.get(old.name) == w:
                    del self.by_name[old.name]
            if row.version != self.worker_version[w]:
                self.occupancy.worker_changed(row.id)
        self.worker_rows[w] = row
        self.by_name[row.name] = w
        self.alive[w] = True
        self.worker_id[w] = row.id
        self.cluster[w] = row.cluster_id or 0
        self.state[w] = self._state_codes.code(row.state)
        self.ready[w] = row.state == "READY"
        self.unified[w] = row.unified_memory
        self.worker_over[w] = row.over_committed
        self.ram_capacity[w] = UNKNOWN if row.ram_capacity is None else row.ram_capacity
        self.ram_allocated[w] = row.ram_allocated
        self.worker_version[w] = row.version
        self.arch[w] = self._arch_codes.code(architecture(row.cpu_arch))
        self.describe(w)

    def _new_position(self, worker_id: int) -> int:
        if len(self._free_positions) > max(MAX_FREE_POSITIONS, len(self.position)):
            w = self._free_positions.pop()
        else:
            w = self.count
            self.count += 1
            self.worker_rows.append(None)
            if w >= len(self.alive):
                self._grow(2 * len(self.alive), self.slots)
        self.position[worker_id] = w
        self.occupancy.add_worker(worker_id, w)
        return w

    def _grow(self, workers: int, slots: int) -> None:
        for name, (_, empty) in _WORKER_COLUMNS.items():
            setattr(self, name, grown(getattr(self, name), (workers,), empty))
        for name, (_, empty) in _GPU_COLUMNS.items():
            setattr(self, name, grown(getattr(self, name), (workers, slots), empty))
        self.occupancy.grow(workers, slots)

    def put_gpu(self, row: GpuRow) -> None:
        """Add a GPU or overwrite what is known of it; assumed amounts stay. A GPU of a worker that is not
        known is ignored (and forgotten, if it was known elsewhere)."""
        place = self.slot.get(row.id)
        w = self.position.get(row.worker_id)
        if place is not None and place[0] != w:
            self.drop_gpu(row.id)
            place = None
        if w is None:
            return
        fresh = place is None
        if place is None:
            first = int(self.gpu_id[w].argmin())  # no GPU has id 0
            if self.gpu_id[w, first]:
                first = self.slots
                self._grow(len(self.alive), 2 * self.slots)
            place = (w, first)
            self.slot[row.id] = place
        elif row.version != self.gpu_version[place]:
            self.occupancy.worker_changed(row.worker_id)
        self.gpu_rows[row.id] = row
        self.gpu_id[place] = row.id
        self.gpu_index[place] = row.index
        self.gpu_type[place] = self._type_codes.code(row.type)
        self.gpu_open[place] = row.open
        self.gpu_over[place] = row.over_committed
        total = UNKNOWN if row.vram_total is None else row.vram_total
        if fresh or total != self.vram_total[place]:
            self._inventory_changed()
        self.vram_total[place] = total
        self.vram_capacity[place] = UNKNOWN if row.capacity is None else row.capacity
        self.vram_allocated[place] = row.vram_allocated
        self.gpu_version[place] = row.version
        kind = self._kind_codes.code(device_kind(row.type, row.runtime_version, row.arch_family, row.name))
        other = fresh or self.gpu_kind[place] != kind
        self.gpu_kind[place] = kind
        if fresh:
            self.occupancy.add_gpu(row.id, row.worker_id, place)
        if other:
            self.describe(w)
        else:
            self.touch(w)

    def drop_gpu(self, gpu_id: int) -> None:
        """Forget a GPU; its bookings stay known but count nowhere."""
        place = self.slot.get(gpu_id)
        if place is None:
            return
        self.occupancy.drop_gpu(gpu_id, self.gpu_rows[gpu_id].worker_id, place)
        del self.slot[gpu_id]
        del self.gpu_rows[gpu_id]
        for name, (_, empty) in _GPU_COLUMNS.items():
            getattr(self, name)[place] = empty
        self._inventory_changed()
        self.describe(place[0])

    def drop_worker(self, worker_id: int) -> None:
        """Forget a worker, its GPUs and every booking on it."""
        w = self.position.get(worker_id)
        if w is None:
            return
        self.set_bookings(worker_id, ())
        for gpu_id in [int(g) for g in self.gpu_id[w] if g]:
            self.drop_gpu(gpu_id)
        self.occupancy.drop_worker(worker_id, w)
        row = self.worker_rows[w]
        if row is not None and self.by_name.get(row.name) == w:
            del self.by_name[row.name]
        self.worker_rows[w] = None
        for name, (_, empty) in _WORKER_COLUMNS.items():
            getattr(self, name)[w] = empty
        del self.position[worker_id]
        self._free_positions.append(w)
        self.roster += 1
        self.describe(w)

    def set_foreign(self, held: Mapping[int, int]) -> bool:
        """Set what other processes hold beyond the worker's reserve: GPU id -> bytes; GPUs not named hold
        nothing. Changes below `FOREIGN_CHANGE` are ignored. Returns whether any GPU got memory back."""
        now = np.zeros_like(self.foreign)
        for gpu_id, size in held.items():
            place = self.slot.get(gpu_id)
            if place is not None:
                now[place] = size
        before = self.foreign
        changed = now != before
        changed &= (now == 0) | (before == 0) | (np.abs(now - before) >= FOREIGN_CHANGE)
        if not changed.any():
            return False
        less = bool(np.any(now[changed] < before[changed]))
        before[changed] = now[changed]
        self.tick += 1
        self.touched[changed.any(axis=1)] = self.tick
        return less

    # -- what instances hold ---------------------------------------------------------------------------

    def set_bookings(self, worker_id: int, rows: Iterable[Booking]) -> None:
        """Replace all that is known of the ledger on one worker; assumptions stay."""
        self.occupancy.set_bookings(worker_id, rows)
        self._touch_changed()

    def add_booking(self, b: Booking) -> None:
        """Count one ledger row among the occupants; `vram_allocated` and `ram_allocated` stay as they are."""
        self.occupancy.add(b)
        self._touch_changed()

    def remove_instance(self, instance_id: int) -> None:
        """Forget every ledger row of one instance."""
        self.occupancy.remove_instance(instance_id)
        self._touch_changed()

    def assume(self, placement: Placement, instance_id: int, model_id: int, backend: str = "") -> None:
        """Count a placement that was decided but is not committed, so that the next decision sees it.

        On unified memory its VRAM counts on the worker's pool too. Raises ValueError where the instance has
        an assumed placement already.
        """
        self.occupancy.assume(placement, instance_id, model_id, backend)
        self._touch_changed()

    def forget(self, instance_id: int) -> None:
        """Drop an assumed placement that was not committed. Unknown instance: nothing happens."""
        self.occupancy.forget(instance_id)
        self._touch_changed()

    def confirm(self, instance_id: int) -> tuple[int, ...]:
        """Assumed becomes allocated after a commit; versions rise as the commit raised them.

        A ledger row of a GPU raises that GPU's version by one. The worker's version rises by one where RAM is
        booked there, where memory is unified, or where the part has no GPU. Where the feed has delivered the
        ledger rows of this instance already, nothing is added a second time. Returns ids of workers of which
        rows were read in between without those ledger rows: read them again. Unknown instance: nothing
        happens. What is free stays as it was, so no worker counts as changed.
        """
        done = self.occupancy.confirm(instance_id)
        if done is None:
            return ()
        self._touch_changed()
        for b in done.bookings:
            w = self.position.get(b.worker_id)
            if w is None:
                continue
            place = self.slot.get(b.gpu_id) if b.gpu_id is not None else None
            if place is not None:
                self.vram_allocated[place] += b.vram
                self.gpu_version[place] += 1
            self.ram_allocated[w] += b.ram + (b.vram if self.unified[w] else 0)
            if self.unified[w] != (b.worker_id in done.unified):
                self.touch(w)
        for worker_id in done.touched_workers:
            w = self.position.get(worker_id)
            if w is not None:
                self.worker_version[w] += 1
        return tuple(sorted(done.stale_workers))

    def without(self, instance_id: int) -> Fleet:
        """The same fleet as if one instance held nothing: a view for one decision, never to be changed."""
        view = copy.copy(self)
        for name in ("vram_allocated", "ram_allocated", "touched", "usable", "free", "ratio", "ram_free"):
            setattr(view, name, getattr(self, name).copy())
        view.occupancy = self.occupancy.without(instance_id)
        view._touch_changed()
        for b in self.occupancy.by_instance.get(instance_id, ()):
            w = view.position.get(b.worker_id)
            if w is None:
                continue
            place = view.slot.get(b.gpu_id) if b.gpu_id is not None else None
            if place is not None:
                view.vram_allocated[place] = max(0, view.vram_allocated[place] - b.vram)
            held = b.ram + (b.vram if view.unified[w] else 0)
            view.ram_allocated[w] = max(0, view.ram_allocated[w] - held)
        return view

    # -- changes ---------------------------------------------------------------------------------------

    def touch(self, w: int) -> None:
        """Stamp a worker as changed."""
        self.tick += 1
        self.touched[w] = self.tick

    def describe(self, w: int) -> None:
        """Stamp a worker as changed in what filters look at."""
        self.touch(w)
        self.described[w] = self.tick

    def _touch_changed(self) -> None:
        changed = self.occupancy.changed
        for w in changed:
            self.touch(w)
        changed.clear()

    def _inventory_changed(self) -> None:
        self.inventory += 1
        self._largest = None

    # -- what is free ----------------------------------------------------------------------------------

    def free_vram(self, where: Any = slice(None)) -> Ints:
        """(len(where), slots) free bytes of the worker positions `where` (an array or slice).

        0 where unknown or over-committed; on unified memory never more than the one pool has left.
        """
        # an unknown capacity is below 0, and so is what is left of it
        free: Ints = self.vram_capacity[where] - self.vram_allocated[where]
        free -= self.occupancy.vram_assumed[where]
        free -= self.foreign[where]
        np.maximum(free, 0, out=free)
        free *= ~self.gpu_over[where]
        unified: Bools = self.unified[where]
        if unified.any():
            pool = self.free_ram(where)
            np.minimum(free, pool[:, None], out=free, where=unified[:, None])
        return free

    def free_ram(self, where: Any = slice(None)) -> Ints:
        """(len(where),) free RAM of the worker positions `where`; 0 where unknown or over-committed."""
        free: Ints = self.ram_capacity[where] - self.ram_allocated[where]
        free -= self.occupancy.ram_assumed[where]
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
        """Total bytes of the largest GPU, and of all GPUs of the largest worker: bounds that nothing on one
        GPU or one worker can exceed."""
        if self._largest is None:
            total = np.maximum(self.vram_total[: self.count], 0)
            sums = total.sum(axis=1)
            self._largest = (int(total.max(initial=0)), int(sums.max(initial=0)))
        return self._largest

    # -- looking up ------------------------------------------------------------------------------------

    def row(self, w: int) -> WorkerRow:
        """The worker at a live position. Raises KeyError where there is none."""
        row = self.worker_rows[w]
        if row is None:
            raise KeyError(f"no worker at position {w}")
        return row

    @property
    def order(self) -> Ints | None:
        """Worker ids by position, where positions are not in their order (workers went and others came);
        None = they are. Equal places are told apart in this order."""
        if self._order[0] != self.roster:
            ids = self.worker_id[: self.count][self.alive[: self.count]]
            self._order = (self.roster, None if bool((ids[1:] > ids[:-1]).all()) else self.worker_id)
        return self._order[1]
