"""Who sits where: ledger rows and assumed placements, counted per worker, GPU and model.

Counts are always those of the bookings whose worker (and GPU) is known now, in whatever order rows of
the ledger, of workers and of GPUs arrive or go.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from gpustackd.domain.fleet.columns import Columns
from gpustackd.domain.fleet.rows import Booking
from gpustackd.domain.outcome import Placement

Place = tuple[int, int]
Self = TypeVar("Self", bound="Occupancy")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Assumption:
    """A placement decided and not seen committed, as the ledger rows that it will write."""

    bookings: tuple[Booking, ...]
    worker_rows: frozenset[int]
    """Workers whose own row the commit touches (RAM, unified memory, or a part without a GPU)."""
    unified: frozenset[int]

    @classmethod
    def of(cls, placement: Placement, instance_id: int, model_id: int, backend: str) -> Assumption:
        """The ledger rows of a placement: one per GPU, one for the worker's RAM or a part without GPUs."""
        bookings: list[Booking] = []
        rows: set[int] = set()
        for n, part in enumerate(placement.parts):
            name = "main" if n == 0 else "subordinate"
            for gpu_id, vram in zip(part.gpu_ids, part.vram, strict=True):
                bookings.append(
                    Booking(instance_id, model_id, part.worker_id, gpu_id, vram, 0, name, True, backend)
                )
            if part.ram or not part.gpu_ids:
                alone = not part.gpu_ids
                vram = sum(part.vram) if alone else 0
                bookings.append(
                    Booking(instance_id, model_id, part.worker_id, None, vram, part.ram, name, alone, backend)
                )
            if part.ram or part.unified or not part.gpu_ids:
                rows.add(part.worker_id)
        return cls(
            tuple(bookings),
            frozenset(rows),
            frozenset(p.worker_id for p in placement.parts if p.unified),
        )


class Occupancy(Columns):
    """Bookings and assumptions over the columns."""

    def __init__(self, workers: int, slots: int) -> None:
        super().__init__(workers, slots)
        self.position: dict[int, int] = {}
        """worker id -> position."""
        self.slot: dict[int, Place] = {}
        """gpu id -> (worker position, slot)."""
        self.bookings: dict[int, dict[int, Booking]] = {}
        """worker id -> {n: Booking} of the ledger, as far as known."""
        self.by_instance: dict[int, list[Booking]] = {}
        self.assumed: dict[int, Assumption] = {}
        """instance id -> what it will hold once committed."""
        self._assumed_on: dict[int, dict[int, list[Booking]]] = defaultdict(dict)
        """worker id -> {instance id: assumed bookings}."""
        self._crossed: dict[int, set[int]] = defaultdict(set)
        """instance id -> workers that the feed overwrote while its placement was assumed."""
        self.model_on_worker: dict[int, dict[int, int]] = defaultdict(dict)
        """model id -> {worker position: GPU slots (or CPU placements) it holds there}."""
        self.model_on_gpu: dict[int, dict[int, dict[int, int]]] = defaultdict(dict)
        """model id -> {worker position: {slot: instances of it there}}."""
        self.instances_on_worker: dict[int, dict[int, int]] = defaultdict(dict)
        """worker id -> {instance id: ledger rows, real or assumed, it has there}."""
        self._reach: dict[int, dict[int, int]] = {}
        """instance id -> {worker id: rows}: more than one key = a distributed instance."""

    # -- the ledger --------------------------------------------------------------------------------------

    def set_bookings(self, worker_id: int, bookings: Iterable[Booking]) -> None:
        """Replace all that is known of the ledger on one worker (assumptions stay)."""
        for old in list(self.bookings.get(worker_id, {}).values()):
            self._drop_booking(old)
        self.bookings.pop(worker_id, None)
        for b in bookings:
            self.add_booking(b)

    def add_booking(self, b: Booking) -> None:
        """Count one ledger row among the occupants (memory is `vram_allocated`, not touched here)."""
        self._enter(b)
        self._sit(b, 1)

    def _enter(self, b: Booking) -> None:
        self.bookings.setdefault(b.worker_id, {})[id(b)] = b
        self.by_instance.setdefault(b.instance_id, []).append(b)

    def remove_instance(self, instance_id: int) -> None:
        """Forget every ledger row of one instance."""
        for b in list(self.by_instance.get(instance_id, ())):
            self._drop_booking(b)

    def reach(self, instance_id: int) -> tuple[int, ...]:
        """Ids of the workers on which an instance has a part."""
        return tuple(self._reach.get(instance_id, ()))

    def rows_of(self, instance_id: int) -> list[Booking]:
        """Ledger rows of an instance, real or assumed, as far as known."""
        assumed = self.assumed.get(instance_id)
        return [*self.by_instance.get(instance_id, ()), *(assumed.bookings if assumed else ())]

    def _drop_booking(self, b: Booking) -> None:
        rows = self.bookings.get(b.worker_id)
        if rows is None or rows.pop(id(b), None) is None:
            return
        mine = self.by_instance[b.instance_id]
        # by identity: two rows of one instance may be equal
        del mine[next(i for i, x in enumerate(mine) if x is b)]
        if not mine:
            del self.by_instance[b.instance_id]
        self._sit(b, -1)

    # -- assumed placements ------------------------------------------------------------------------------

    def _assume(self, a: Assumption) -> None:
        for b in a.bookings:
            self.assumed[b.instance_id] = a
            self._assumed_on[b.worker_id].setdefault(b.instance_id, []).append(b)
            self._weigh(b, 1, b.worker_id in a.unified)
            self._sit(b, 1)

    def _cross(self, worker_id: int) -> None:
        """Note that the feed brought a new version of a row on which placements are assumed."""
        for instance_id in self._assumed_on.get(worker_id, ()):
            self._crossed[instance_id].add(worker_id)

    def _forget_assumption(self, instance_id: int) -> None:
        a = self._lift(instance_id)
        for b in a.bookings if a is not None else ():
            self._sit(b, -1)

    def _lift(self, instance_id: int) -> Assumption | None:
        """Take the weight of an assumption away; who sits where stays as it is."""
        a = self.assumed.pop(instance_id, None)
        if a is None:
            return None
        for b in a.bookings:
            on = self._assumed_on[b.worker_id]
            on.pop(instance_id, None)
            if not on:
                del self._assumed_on[b.worker_id]
            self._weigh(b, -1, b.worker_id in a.unified)
        return a

    def _weigh(self, b: Booking, by: int, unified: bool) -> None:
        w = self.position.get(b.worker_id)
        if w is None:
            return
        self.ram_assumed[w] += by * (b.ram + (b.vram if unified else 0))
        place = self.slot.get(b.gpu_id) if b.gpu_id is not None else None
        if place is not None:
            self.vram_assumed[place] += by * b.vram

    # -- counting ----------------------------------------------------------------------------------------

    def _sit(self, b: Booking, by: int) -> None:
        here = self.instances_on_worker[b.worker_id]
        _add(here, b.instance_id, by)
        if not here:
            del self.instances_on_worker[b.worker_id]
        self._span(b, by)
        w = self.position.get(b.worker_id)
        if w is None:
            return
        self.touch(w)
        if b.occupies:
            self._count_on_worker(b, w, by)
            place = self.slot.get(b.gpu_id) if b.gpu_id is not None else None
            if place is not None:
                self._count_on_gpu(b, place, by)

    def _span(self, b: Booking, by: int) -> None:
        reach = self._reach.setdefault(b.instance_id, {})
        before = set(reach)
        _add(reach, b.worker_id, by)
        after = set(reach)
        if not reach:
            del self._reach[b.instance_id]
        if before == after:
            return
        for worker_id in before | after:
            change = (len(after) > 1 and worker_id in after) - (len(before) > 1 and worker_id in before)
            w = self.position.get(worker_id)
            if change and w is not None:
                self.spanning[w] += change
                self.touch(w)

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
        found = [(b, False) for b in self.bookings.get(worker_id, {}).values()]
        for bookings in self._assumed_on.get(worker_id, {}).values():
            found.extend((b, True) for b in bookings)
        return found

    # -- a worker or GPU whose bookings are known before it, or stay after it ------------------------------

    def _seat_worker(self, worker_id: int, w: int) -> None:
        for b, assumed in self._on(worker_id):
            if b.occupies:
                self._count_on_worker(b, w, 1)
            if assumed:
                unified = worker_id in self.assumed[b.instance_id].unified
                self.ram_assumed[w] += b.ram + (b.vram if unified else 0)
        self.spanning[w] = sum(len(self._reach[i]) > 1 for i in self.instances_on_worker.get(worker_id, ()))

    def _unseat_worker(self, worker_id: int, w: int) -> None:
        for b, _ in self._on(worker_id):
            if b.occupies:
                self._count_on_worker(b, w, -1)

    def _seat_gpu(self, gpu_id: int, worker_id: int, place: Place) -> None:
        if worker_id not in self.bookings and worker_id not in self._assumed_on:
            return
        for b, assumed in self._on(worker_id):
            if b.gpu_id == gpu_id:
                if b.occupies:
                    self._count_on_gpu(b, place, 1)
                if assumed:
                    self.vram_assumed[place] += b.vram

    def _unseat_gpu(self, gpu_id: int, worker_id: int, place: Place) -> None:
        for b, _ in self._on(worker_id):
            if b.gpu_id == gpu_id and b.occupies:
                self._count_on_gpu(b, place, -1)

    # -- leaving an instance out ---------------------------------------------------------------------------

    def without(self: Self, instance_id: int) -> Self:
        """The same fleet as if one instance held nothing: a view for deciding, never to be changed."""
        view = copy.copy(self)
        for name in (
            "vram_allocated", "vram_assumed", "ram_allocated", "ram_assumed", "occupants", "gpu_occupants",
            "spanning", "touched", "usable", "free", "ratio", "ram_free",
        ):  # fmt: skip
            setattr(view, name, getattr(self, name).copy())
        view.model_on_worker = defaultdict(dict, {m: dict(c) for m, c in self.model_on_worker.items()})
        view.model_on_gpu = defaultdict(
            dict, {m: {w: dict(s) for w, s in c.items()} for m, c in self.model_on_gpu.items()}
        )
        view.instances_on_worker = defaultdict(
            dict, {w: dict(i) for w, i in self.instances_on_worker.items()}
        )
        view._reach = {**self._reach, instance_id: dict(self._reach.get(instance_id, {}))}
        assumed = self.assumed.get(instance_id)
        if assumed is not None:
            for b in assumed.bookings:
                view._weigh(b, -1, b.worker_id in assumed.unified)
                view._sit(b, -1)
        for b in self.by_instance.get(instance_id, ()):
            view._sit(b, -1)
            w = view.position.get(b.worker_id)
            if w is None:
                continue
            place = view.slot.get(b.gpu_id) if b.gpu_id is not None else None
            if place is not None:
                view.vram_allocated[place] = max(0, view.vram_allocated[place] - b.vram)
            taken = b.ram + (b.vram if view.unified[w] else 0)
            view.ram_allocated[w] = max(0, view.ram_allocated[w] - taken)
        return view


def _add(counts: dict[K, int], key: K, by: int) -> None:
    new = counts.get(key, 0) + by
    if new:
        counts[key] = new
    else:
        counts.pop(key, None)
