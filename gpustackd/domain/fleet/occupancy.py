"""Which instances hold what: ledger rows and assumed placements, counted per worker, GPU and model.

Counts are always those of the bookings whose worker (and GPU) is known now, in whatever order rows of the
ledger, of workers and of GPUs arrive or go.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.bookings import Booking, bookings, worker_booking
from gpustackd.domain.fleet.columns import Ints, grown
from gpustackd.domain.outcome import Placement

Place = tuple[int, int]
"""Worker position and slot."""
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class AssumedPlacement:
    """A placement decided and not seen committed, as the ledger rows that the commit will write."""

    bookings: tuple[Booking, ...]
    touched_workers: frozenset[int]
    """Workers whose own row the commit touches (RAM, unified memory, or a part without a GPU)."""
    unified: frozenset[int]

    @classmethod
    def of(cls, placement: Placement, instance_id: int, model_id: int, backend: str) -> AssumedPlacement:
        """From a placement of one instance."""
        return cls(
            tuple(bookings(placement, instance_id, model_id, backend)),
            frozenset(p.worker_id for p in placement.parts if worker_booking(p) is not None),
            frozenset(p.worker_id for p in placement.parts if p.unified),
        )


@dataclass(frozen=True, slots=True)
class ConfirmedPlacement:
    """What a confirmed placement adds to the rows of workers and GPUs, where it is not in them already."""

    bookings: tuple[Booking, ...]
    touched_workers: frozenset[int]
    unified: frozenset[int]
    stale_workers: frozenset[int]
    """Workers of which rows were read while the placement was assumed, without its ledger rows."""


class Occupancy:
    """Bookings and assumptions of one fleet, whose maps of positions and slots it reads.

    Whatever changes a count adds the worker's position to `changed`, which the fleet empties.
    """

    def __init__(
        self, position: Mapping[int, int], slot: Mapping[int, Place], workers: int, slots: int
    ) -> None:
        self._position = position
        """worker id -> position."""
        self._slot = slot
        """GPU id -> (worker position, slot)."""
        self.changed: list[int] = []
        self.occupants: NDArray[np.int32] = np.zeros(workers, np.int32)
        """(workers,) GPU slots (or CPU placements) held by instances of any model."""
        self.spanning: NDArray[np.int32] = np.zeros(workers, np.int32)
        """(workers,) Instances with a part here and another part on another worker."""
        self.ram_assumed: Ints = np.zeros(workers, np.int64)
        """(workers,) Bytes of assumed placements."""
        self.gpu_occupants: NDArray[np.int32] = np.zeros((workers, slots), np.int32)
        """(workers, slots) Instances on the GPU."""
        self.vram_assumed: Ints = np.zeros((workers, slots), np.int64)
        """(workers, slots) Bytes of assumed placements."""
        self.by_instance: dict[int, list[Booking]] = {}
        """instance id -> its ledger rows, as far as known."""
        self.assumed: dict[int, AssumedPlacement] = {}
        """instance id -> what it will hold once committed."""
        self.model_on_worker: dict[int, dict[int, int]] = defaultdict(dict)
        """model id -> {worker position: GPU slots (or CPU placements) it holds there}."""
        self.model_on_gpu: dict[int, dict[int, dict[int, int]]] = defaultdict(dict)
        """model id -> {worker position: {slot: instances of it there}}."""
        self.instances_on_worker: dict[int, dict[int, int]] = defaultdict(dict)
        """worker id -> {instance id: ledger rows, real or assumed, it has there}."""
        self._on_worker: dict[int, dict[int, Booking]] = {}
        """worker id -> {id of the object: Booking} of the ledger."""
        self._assumed_on: dict[int, dict[int, list[Booking]]] = defaultdict(dict)
        """worker id -> {instance id: assumed bookings}."""
        self._crossed: dict[int, set[int]] = defaultdict(set)
        """instance id -> workers of which newer rows were read while its placement was assumed."""
        self._workers_of: dict[int, dict[int, int]] = {}
        """instance id -> {worker id: ledger rows, real or assumed}; two workers = a distributed instance."""

    # -- the ledger --------------------------------------------------------------------------------------

    def set_bookings(self, worker_id: int, rows: Iterable[Booking]) -> None:
        """Replace all that is known of the ledger on one worker; assumptions stay."""
        for old in list(self._on_worker.get(worker_id, {}).values()):
            self._remove(old)
        self._on_worker.pop(worker_id, None)
        for b in rows:
            self.add(b)

    def add(self, b: Booking) -> None:
        """Count one ledger row. The memory it holds is a matter of the GPU's or worker's row."""
        self._enter(b)
        self._count(b, 1)

    def remove_instance(self, instance_id: int) -> None:
        """Forget every ledger row of one instance."""
        for b in list(self.by_instance.get(instance_id, ())):
            self._remove(b)

    def workers_of(self, instance_id: int) -> tuple[int, ...]:
        """Ids of the workers on which an instance has a part."""
        return tuple(self._workers_of.get(instance_id, ()))

    def rows_of(self, instance_id: int) -> list[Booking]:
        """Ledger rows of an instance, real or assumed, as far as known."""
        assumed = self.assumed.get(instance_id)
        return [*self.by_instance.get(instance_id, ()), *(assumed.bookings if assumed else ())]

    def _enter(self, b: Booking) -> None:
        self._on_worker.setdefault(b.worker_id, {})[id(b)] = b
        self.by_instance.setdefault(b.instance_id, []).append(b)

    def _remove(self, b: Booking) -> None:
        rows = self._on_worker.get(b.worker_id)
        if rows is None or rows.pop(id(b), None) is None:
            return
        mine = self.by_instance[b.instance_id]
        # by identity: two rows of one instance may be equal
        del mine[next(i for i, x in enumerate(mine) if x is b)]
        if not mine:
            del self.by_instance[b.instance_id]
        self._count(b, -1)

    # -- assumed placements ------------------------------------------------------------------------------

    def assume(self, placement: Placement, instance_id: int, model_id: int, backend: str) -> None:
        """Count a placement that is not committed yet. Raises ValueError where the instance has one."""
        if instance_id in self.assumed:
            raise ValueError(f"instance {instance_id} has an assumed placement already")
        a = AssumedPlacement.of(placement, instance_id, model_id, backend)
        for b in a.bookings:
            self.assumed[instance_id] = a
            self._assumed_on[b.worker_id].setdefault(instance_id, []).append(b)
            self._add_assumed(b, 1, b.worker_id in a.unified)
            self._count(b, 1)

    def forget(self, instance_id: int) -> None:
        """Drop an assumed placement. Unknown instance: nothing happens."""
        a = self._take_assumed(instance_id)
        for b in a.bookings if a is not None else ():
            self._count(b, -1)
        self._crossed.pop(instance_id, None)

    def confirm(self, instance_id: int) -> ConfirmedPlacement | None:
        """Assumed becomes booked. None where nothing is assumed for the instance.

        Ledger rows of the instance that were read meanwhile are not entered a second time.
        """
        a = self._take_assumed(instance_id)
        if a is None:
            return None
        known = {(b.worker_id, b.gpu_id) for b in self.by_instance.get(instance_id, ())}
        stale = self._crossed.pop(instance_id, set())
        entered = []
        for b in a.bookings:
            if (b.worker_id, b.gpu_id) in known:
                stale.discard(b.worker_id)
                self._count(b, -1)
            else:
                self._enter(b)  # it was counted as assumed, and stays counted
                entered.append(b)
        read = {worker_id for worker_id, _ in known}
        return ConfirmedPlacement(tuple(entered), a.touched_workers - read, a.unified, frozenset(stale))

    def worker_changed(self, worker_id: int) -> None:
        """Note that a newer version of a row was read on a worker where placements may be assumed."""
        for instance_id in self._assumed_on.get(worker_id, ()):
            self._crossed[instance_id].add(worker_id)

    def _take_assumed(self, instance_id: int) -> AssumedPlacement | None:
        """Remove an assumption and its bytes; the counts stay as they are."""
        a = self.assumed.pop(instance_id, None)
        if a is None:
            return None
        for b in a.bookings:
            on = self._assumed_on[b.worker_id]
            on.pop(instance_id, None)
            if not on:
                del self._assumed_on[b.worker_id]
            self._add_assumed(b, -1, b.worker_id in a.unified)
        return a

    def _add_assumed(self, b: Booking, by: int, unified: bool) -> None:
        w = self._position.get(b.worker_id)
        if w is None:
            return
        self.ram_assumed[w] += by * (b.ram + (b.vram if unified else 0))
        place = self._slot.get(b.gpu_id) if b.gpu_id is not None else None
        if place is not None:
            self.vram_assumed[place] += by * b.vram

    # -- counting ----------------------------------------------------------------------------------------

    def _count(self, b: Booking, by: int) -> None:
        here = self.instances_on_worker[b.worker_id]
        _add(here, b.instance_id, by)
        if not here:
            del self.instances_on_worker[b.worker_id]
        self._count_workers(b, by)
        w = self._position.get(b.worker_id)
        if w is None:
            return
        self.changed.append(w)
        if b.occupies:
            self._count_on_worker(b, w, by)
            place = self._slot.get(b.gpu_id) if b.gpu_id is not None else None
            if place is not None:
                self._count_on_gpu(b, place, by)

    def _count_workers(self, b: Booking, by: int) -> None:
        mine = self._workers_of.setdefault(b.instance_id, {})
        before = set(mine)
        _add(mine, b.worker_id, by)
        after = set(mine)
        if not mine:
            del self._workers_of[b.instance_id]
        if before == after:
            return
        for worker_id in before | after:
            change = (len(after) > 1 and worker_id in after) - (len(before) > 1 and worker_id in before)
            w = self._position.get(worker_id)
            if change and w is not None:
                self.spanning[w] += change
                self.changed.append(w)

    def _count_on_worker(self, b: Booking, w: int, by: int) -> None:
        counts = self.model_on_worker[b.model_id]
        _add(counts, w, by)
        if not counts:
            del self.model_on_worker[b.model_id]
        self.occupants[w] += by

    def _count_on_gpu(self, b: Booking, place: Place, by: int) -> None:
        workers = self.model_on_gpu[b.model_id]
        slots = workers.setdefault(place[0], {})
        _add(slots, place[1], by)
        if not slots:
            del workers[place[0]]
            if not workers:
                del self.model_on_gpu[b.model_id]
        self.gpu_occupants[place] += by

    def _on(self, worker_id: int) -> list[tuple[Booking, bool]]:
        """All bookings on a worker and whether each is only assumed."""
        held = [(b, False) for b in self._on_worker.get(worker_id, {}).values()]
        for rows in self._assumed_on.get(worker_id, {}).values():
            held.extend((b, True) for b in rows)
        return held

    # -- workers and GPUs that come and go ---------------------------------------------------------------

    def grow(self, workers: int, slots: int) -> None:
        """Make room for so many positions and slots."""
        for name in ("occupants", "spanning", "ram_assumed"):
            setattr(self, name, grown(getattr(self, name), (workers,)))
        for name in ("gpu_occupants", "vram_assumed"):
            setattr(self, name, grown(getattr(self, name), (workers, slots)))

    def add_worker(self, worker_id: int, w: int) -> None:
        """Count what was known of a worker before it had a position."""
        for b, assumed in self._on(worker_id):
            if b.occupies:
                self._count_on_worker(b, w, 1)
            if assumed:
                unified = worker_id in self.assumed[b.instance_id].unified
                self.ram_assumed[w] += b.ram + (b.vram if unified else 0)
        here = self.instances_on_worker.get(worker_id, ())
        self.spanning[w] = sum(len(self._workers_of[i]) > 1 for i in here)

    def drop_worker(self, worker_id: int, w: int) -> None:
        """Stop counting what is on a worker, whose GPUs are gone already."""
        for b, _ in self._on(worker_id):
            if b.occupies:
                self._count_on_worker(b, w, -1)
        self.occupants[w] = self.spanning[w] = self.ram_assumed[w] = 0

    def add_gpu(self, gpu_id: int, worker_id: int, place: Place) -> None:
        """Count what was known of a GPU before it had a slot."""
        if worker_id not in self._on_worker and worker_id not in self._assumed_on:
            return
        for b, assumed in self._on(worker_id):
            if b.gpu_id == gpu_id:
                if b.occupies:
                    self._count_on_gpu(b, place, 1)
                if assumed:
                    self.vram_assumed[place] += b.vram

    def drop_gpu(self, gpu_id: int, worker_id: int, place: Place) -> None:
        """Stop counting what is on a GPU; its bookings stay known."""
        for b, _ in self._on(worker_id):
            if b.gpu_id == gpu_id and b.occupies:
                self._count_on_gpu(b, place, -1)
        self.gpu_occupants[place] = self.vram_assumed[place] = 0

    # -- leaving an instance out -------------------------------------------------------------------------

    def without(self, instance_id: int) -> Occupancy:
        """The same as if one instance held nothing: a view for one decision, never to be changed."""
        view = copy.copy(self)
        view.changed = []
        for name in ("occupants", "spanning", "ram_assumed", "gpu_occupants", "vram_assumed"):
            setattr(view, name, getattr(self, name).copy())
        view.model_on_worker = defaultdict(dict, {m: dict(c) for m, c in self.model_on_worker.items()})
        view.model_on_gpu = defaultdict(
            dict, {m: {w: dict(s) for w, s in c.items()} for m, c in self.model_on_gpu.items()}
        )
        view.instances_on_worker = defaultdict(
            dict, {w: dict(i) for w, i in self.instances_on_worker.items()}
        )
        view._workers_of = {**self._workers_of, instance_id: dict(self._workers_of.get(instance_id, {}))}
        assumed = self.assumed.get(instance_id)
        if assumed is not None:
            for b in assumed.bookings:
                view._add_assumed(b, -1, b.worker_id in assumed.unified)
                view._count(b, -1)
        for b in self.by_instance.get(instance_id, ()):
            view._count(b, -1)
        return view


def _add(counts: dict[K, int], key: K, by: int) -> None:
    new = counts.get(key, 0) + by
    if new:
        counts[key] = new
    else:
        counts.pop(key, None)
