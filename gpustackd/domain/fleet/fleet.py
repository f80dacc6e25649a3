"""The fleet as columns, kept current by rows from the database and by this process's own decisions.

Worker position `w` and slot `s` are stable while the worker lives; freed positions are used again, where
there are many.
Free memory that a decision may use is `capacity - allocated - assumed`: `allocated` is what the
database says, `assumed` what this process decided but has not seen committed. Every change stamps the
worker with a new `tick`, so that results kept per demand know which workers to compute again.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpustackd.domain.backends import device_kind
from gpustackd.domain.fleet.columns import UNKNOWN, Bools, Ints
from gpustackd.domain.fleet.occupancy import Assumption, Occupancy
from gpustackd.domain.fleet.rows import Booking, GpuRow, WorkerRow
from gpustackd.domain.outcome import Placement

SPARE = 256
"""Freed positions beyond which (and beyond the number of workers) they are used again: as long as they are
not, positions are in the order of ids."""
FOREIGN_NEWS = 32 * 2**20
"""Bytes: usage samples tremble, and every change has the worker looked at anew."""

__all__ = ["UNKNOWN", "Booking", "Bools", "Fleet", "GpuRow", "Ints", "WorkerRow"]


class Fleet(Occupancy):
    """The columnar view that decisions read. Not thread-safe; one owner mutates it."""

    def __init__(self, workers: int = 64, slots: int = 8) -> None:
        super().__init__(workers, slots)
        self.roster = 0
        """Rises whenever a worker appears, goes or is renamed."""
        self._free_positions: list[int] = []
        self._order: tuple[int, Ints | None] = (-1, None)
        self.worker_rows: list[WorkerRow | None] = []
        self.gpu_rows: dict[int, GpuRow] = {}
        self.by_name: dict[str, int] = {}

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
                self._cross(row.id)
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
        self.arch[w] = self.arch_code(row.cpu_arch)
        self.describe(w)

    def _new_position(self, worker_id: int) -> int:
        if len(self._free_positions) > max(SPARE, len(self.position)):
            w = self._free_positions.pop()
        else:
            w = self.count
            self.count += 1
            self.worker_rows.append(None)
            if w >= len(self.alive):
                self._grow(2 * len(self.alive), self.slots)
        self.position[worker_id] = w
        self._seat_worker(worker_id, w)
        return w

    def put_gpu(self, row: GpuRow) -> None:
        """Add a GPU or overwrite what is known of it; assumed amounts stay. A GPU of a worker that is
        not known is passed over (and forgotten, if it was known elsewhere)."""
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
            self._cross(row.worker_id)
        self.gpu_rows[row.id] = row
        self.gpu_id[place] = row.id
        self.gpu_index[place] = row.index
        self.gpu_type[place] = self.type_code(row.type)
        self.gpu_open[place] = row.open
        self.gpu_over[place] = row.over_committed
        total = UNKNOWN if row.vram_total is None else row.vram_total
        if fresh or total != self.vram_total[place]:
            self.inventory_changed()
        self.vram_total[place] = total
        self.vram_capacity[place] = UNKNOWN if row.capacity is None else row.capacity
        self.vram_allocated[place] = row.vram_allocated
        self.gpu_version[place] = row.version
        kind = self.kind_code(device_kind(row.type, row.runtime_version, row.arch_family, row.name))
        other = fresh or self.gpu_kind[place] != kind
        self.gpu_kind[place] = kind
        if fresh:
            self._seat_gpu(row.id, row.worker_id, place)
        if other:
            self.describe(w)
        else:
            self.touch(w)

    def drop_gpu(self, gpu_id: int) -> None:
        """Forget a GPU; what is booked on it stays in the ledger's picture, but counts nowhere."""
        place = self.slot.get(gpu_id)
        if place is None:
            return
        self._unseat_gpu(gpu_id, self.gpu_rows[gpu_id].worker_id, place)
        del self.slot[gpu_id]
        del self.gpu_rows[gpu_id]
        self._clear_gpu(place)
        self.inventory_changed()
        self.describe(place[0])

    def drop_worker(self, worker_id: int) -> None:
        """Forget a worker, its GPUs and every booking on it."""
        w = self.position.get(worker_id)
        if w is None:
            return
        self.set_bookings(worker_id, ())
        for gpu_id in [int(g) for g in self.gpu_id[w] if g]:
            self.drop_gpu(gpu_id)
        self._unseat_worker(worker_id, w)
        row = self.worker_rows[w]
        if row is not None and self.by_name.get(row.name) == w:
            del self.by_name[row.name]
        self.worker_rows[w] = None
        self._clear_worker(w)
        del self.position[worker_id]
        self._free_positions.append(w)
        self.roster += 1
        self.describe(w)

    def set_foreign(self, held: Mapping[int, int]) -> bool:
        """What processes of others hold beyond the worker's reserve, by GPU id in bytes; GPUs not named hold
        nothing. A change of less than `FOREIGN_NEWS` is no news. Returns whether any of it was given back."""
        now = np.zeros_like(self.foreign)
        for gpu_id, size in held.items():
            place = self.slot.get(gpu_id)
            if place is not None:
                now[place] = size
        before = self.foreign
        news = now != before
        news &= (now == 0) | (before == 0) | (np.abs(now - before) >= FOREIGN_NEWS)
        if not news.any():
            return False
        less = bool(np.any(now[news] < before[news]))
        before[news] = now[news]
        self.tick += 1
        self.touched[news.any(axis=1)] = self.tick
        return less

    # -- own decisions ---------------------------------------------------------------------------------

    def assume(self, placement: Placement, instance_id: int, model_id: int, backend: str = "") -> None:
        """Count a placement that was decided but is not committed, so that the next decision sees it.

        On unified memory its VRAM counts on the worker's pool too. Raises ValueError where the
        instance has an assumed placement already.
        """
        if instance_id in self.assumed:
            raise ValueError(f"instance {instance_id} has an assumed placement already")
        self._assume(Assumption.of(placement, instance_id, model_id, backend))

    def confirm(self, instance_id: int) -> tuple[int, ...]:
        """Assumed becomes allocated after a commit; versions rise as the commit raised them.

        A GPU row of the ledger raises that GPU's version by one. The worker's version rises by one if
        RAM is booked there, if memory is unified, or if the part has no GPU. Where the feed has already
        delivered the ledger rows of this instance, nothing is added a second time. Returns ids of workers
        of which rows were overwritten in between without those ledger rows: read these again.
        Unknown instance: nothing happens. What is free stays as it was, so no worker counts as changed.
        """
        taken = self._lift(instance_id)
        if taken is None:
            return ()
        known = {(b.worker_id, b.gpu_id) for b in self.by_instance.get(instance_id, ())}
        crossed = self._crossed.pop(instance_id, set())
        for b in taken.bookings:
            if (b.worker_id, b.gpu_id) in known:
                crossed.discard(b.worker_id)
                self._sit(b, -1)
                continue
            self._enter(b)  # it sat here as assumed, and goes on sitting here
            w = self.position.get(b.worker_id)
            if w is None:
                continue
            place = self.slot.get(b.gpu_id) if b.gpu_id is not None else None
            if place is not None:
                self.vram_allocated[place] += b.vram
                self.gpu_version[place] += 1
            self.ram_allocated[w] += b.ram + (b.vram if self.unified[w] else 0)
            if self.unified[w] != (b.worker_id in taken.unified):
                self.touch(w)
        for worker_id in taken.worker_rows - {worker_id for worker_id, _ in known}:
            w = self.position.get(worker_id)
            if w is not None:
                self.worker_version[w] += 1
        return tuple(sorted(crossed))

    def forget(self, instance_id: int) -> None:
        """Drop an assumed placement that was not committed. Unknown instance: nothing happens."""
        self._forget_assumption(instance_id)
        self._crossed.pop(instance_id, None)

    # -- looking up ------------------------------------------------------------------------------------

    def row(self, w: int) -> WorkerRow:
        """The worker at a live position. Raises KeyError where there is none."""
        found = self.worker_rows[w]
        if found is None:
            raise KeyError(f"no worker at position {w}")
        return found

    @property
    def order(self) -> Ints | None:
        """Worker ids by position, where positions are not in their order (workers went and others came);
        None = they are. Equal places are told apart in this order."""
        if self._order[0] != self.roster:
            ids = self.worker_id[: self.count][self.alive[: self.count]]
            self._order = (self.roster, None if bool((ids[1:] > ids[:-1]).all()) else self.worker_id)
        return self._order[1]
