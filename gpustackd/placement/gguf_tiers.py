"""Steps for GGUF models that stay on one worker: one GPU, several, some of the layers, none.

Each keeps the best offer of every worker and looks again only at those that changed, as all steps do. GPUs of
one worker are used in the order of their indexes, so that it is the same whatever the runtime makes of a list
of visible devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gpustackd.domain.fleet import Bools, Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.errors import BadRow
from gpustackd.placement import gguf_lacking
from gpustackd.placement.fit.cards import Cards
from gpustackd.placement.fit.gguf import Gguf
from gpustackd.placement.fit.gguf_plan import Choosing, Planner, Room
from gpustackd.placement.fit.seat import Choice, Offload, Seat
from gpustackd.placement.tiers import EPSILON, Floats, OneWorkerTier

if TYPE_CHECKING:
    from gpustackd.placement.search import Search


FEW = 1000
"""Beyond any number of GPUs."""


class LayeredTier(OneWorkerTier):
    """What the steps share: the offer of a worker is kept as a seat."""

    code: ClassVar[str] = ""

    def __init__(self, search: Search, planner: Planner) -> None:
        super().__init__(search)
        asked = search.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.asked: Gguf = asked
        self.planner = planner
        self.offers: dict[int, Seat] = {}
        self.cut = False
        """Whether the last search ended for its budget."""

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.offers.clear()

    def hopeless(self) -> bool:
        return False

    def choose(self, turn: int) -> Choice | None:
        self.planner.begin()
        found = super().choose(turn)
        self.cut = self.planner.exhausted
        if self.cut:  # what was not looked at is, next time; what was is known
            self.tick = -1
        return found

    def compute(self, rows: Ints, passing: Ints) -> None:
        for w in rows.tolist():
            self.offers.pop(w, None)
        super().compute(rows, passing)

    def keep(self, found: Cards, offers: Mapping[int, Seat]) -> None:
        """Write down offers by row of `found`, with what the strategy thinks of their cards."""
        if not offers:
            return
        rows = np.array(list(offers), np.int64)
        claim = np.zeros((len(found.w), self.fleet.slots), np.int64)
        ram = np.zeros((len(found.w), 1), np.int64)
        taken: Bools = np.zeros(claim.shape, np.bool_)
        for r, seat in offers.items():
            slots = list(seat.slots)
            claim[r, slots] = seat.claims
            taken[r, slots] = True
            ram[r] = seat.ram or 0
        view = self.search.seats(found, claim, claim)
        view.ram_claim = ram
        value = self.scorer.together(self.scorer.cards(view), taken)
        at = found.w[rows]
        self.count[at] = [len(s.slots) for s in offers.values()]
        self.value[at] = value[rows]
        self.booked[at] = claim[rows].sum(axis=1)
        self.offers.update(zip(at.tolist(), offers.values(), strict=True))

    def seat(self, w: int, turn: int) -> Seat:
        return self.offers[w]

    def listing(self, rows: Ints) -> Iterator[tuple[Seat, ...]]:
        """The offers that count, in the order of rows."""
        self.planner.begin()
        self.refresh()
        mine = set(self.offering.tolist())
        for w in rows.tolist():
            if w in mine:
                yield (self.seat(w, 0),)

    def lacking(self, rows: Ints) -> tuple[list[Reason], Cure]:
        return gguf_lacking.LACKING[self.code](self, rows) if len(rows) else [], Cure.CAPACITY


class AllOnOneGpu(LayeredTier):
    """One GPU that holds every layer."""

    step = code = "one_gpu"

    def hopeless(self) -> bool:
        share = self.planner.alone(self.asked.total).devices[0]
        return min(share.vram, share.unified) > self.fleet.largest[0]

    def look(self, rows: Ints) -> None:
        found = self.search.cards(rows)
        fits, claim, ram = self.fitting(found)
        if not fits.any():
            return
        view = self.search.seats(found, claim, claim)
        view.ram_claim = ram[:, None]
        values = self.scorer.cards(view)
        np.copyto(values, -np.inf, where=~fits)
        top = values.max(axis=1)
        self.count[rows] = top > -np.inf
        self.value[rows] = top
        self.booked[rows] = claim[:, 0]

    def fitting(self, found: Cards) -> tuple[Bools, Ints, Ints]:
        """(R, S) which cards hold the model, (R, S) what it books there, (R,) its RAM."""
        level = self.planner.alone(self.asked.total)
        claim = np.where(found.unified, level.devices[0].unified, level.devices[0].vram)
        ram = np.where(found.unified, level.ram_unified, level.ram)
        held = np.where(found.unified, ram + claim, ram) <= found.ram
        fits = found.usable & (claim[:, None] <= found.free) & held[:, None]
        return fits, np.broadcast_to(claim[:, None], fits.shape), ram

    def seat(self, w: int, turn: int) -> Seat:
        found = self.search.cards(np.array([w]))
        fits, claim, ram = self.fitting(found)
        view = self.search.seats(found, claim, claim)
        view.ram_claim = ram[:, None]
        values = np.where(fits, self.scorer.cards(view), -np.inf)[0]
        good = np.flatnonzero(values >= values.max() - EPSILON).tolist()
        return self._seat(w, good[turn % len(good)], int(claim[0, 0]), int(ram[0]))

    def _seat(self, w: int, slot: int, claim: int, ram: int) -> Seat:
        return Seat(w, (slot,), (claim,), ram=ram, offload=Offload(self.asked.total, self.asked.total))

    def listing(self, rows: Ints) -> Iterator[tuple[Seat, ...]]:
        """Every GPU that holds the model, in the order of rows and slots."""
        found = self.search.cards(rows)
        fits, claim, ram = self.fitting(found)
        for r, s in np.argwhere(fits).tolist():
            yield (self._seat(int(rows[r]), s, int(claim[r, s]), int(ram[r])),)


class SeveralGpus(LayeredTier):
    """What the steps with several GPUs of one worker share. What a worker offers is known about, by what
    layers add; exact sizes are asked for the workers alone that are the best by that."""

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.about = np.zeros(size, np.int32)
        """How good the offer of a worker is, more is better; 0 = none."""
        self.sure: Bools = np.zeros(size, np.bool_)
        """Whether the offer is worked out."""

    def compute(self, rows: Ints, passing: Ints) -> None:
        self._offering = None
        self.about[rows] = 0
        self.sure[rows] = False
        super().compute(rows, passing)

    def work_out(self, found: Cards, r: int) -> tuple[int, Seat] | None:
        """How good the offer of a worker really is, and what it takes."""
        raise NotImplementedError

    @property
    def offering(self) -> Ints:
        """Positions with the best offers, all of them worked out; of these those with the fewest GPUs."""
        while self._offering is None:
            best = int(self.about.max(initial=0))
            idx = np.flatnonzero(self.about == best) if best else np.zeros(0, np.int64)
            unsure = idx[~self.sure[idx]]
            if len(unsure):
                self._settle(unsure)
            else:
                self._offering = idx[self.count[idx] == self.count[idx].min(initial=2**15 - 1)]
        return self._offering

    def _settle(self, rows: Ints) -> None:
        found = self.search.cards(rows)
        offers: dict[int, Seat] = {}
        self.about[rows] = 0
        self.sure[rows] = True
        for r, w in enumerate(rows.tolist()):
            offer = self.work_out(found, r)
            if offer is not None:
                self.about[w], offers[r] = offer
        self.keep(found, offers)

    def groups(self, found: Cards, r: int) -> Iterator[list[int]]:
        """Usable slots of one worker by GPU type, in the order of their indexes."""
        index = self.fleet.gpu_index[found.w[r]]
        usable = np.flatnonzero(found.usable[r] & (found.free[r] > 0)).tolist()
        for code in sorted({int(found.type[r, s]) for s in usable}):
            yield sorted((s for s in usable if found.type[r, s] == code), key=lambda s: int(index[s]))

    def rooms(self, found: Cards, r: int, slots: Sequence[int]) -> list[Room]:
        unified = bool(found.unified[r])
        return [(int(found.free[r, s]), unified) for s in slots]

    def order(self, found: Cards, r: int, slots: Sequence[int]) -> list[int]:
        """Positions in `slots`: the freest first, of these the one with less on it."""
        load = self.fleet.gpu_occupants[found.w[r]]
        return sorted(range(len(slots)), key=lambda i: (-found.free[r, slots[i]], load[slots[i]], i))

    def seated(self, found: Cards, r: int, slots: Sequence[int], choosing: Choosing | None) -> Seat | None:
        """The seat for a plan; None where the worker's RAM does not do."""
        if choosing is None:
            return None
        plan = choosing.plan
        unified = bool(found.unified[r])
        ram = plan.level.ram_unified if unified else plan.level.ram
        if ram + (sum(plan.claims) if unified else 0) > found.ram[r]:
            return None
        split = plan.counts if len(plan.counts) > 1 else None
        return Seat(
            int(found.w[r]),
            tuple(slots[i] for i in choosing.taken),
            plan.claims,
            ram=ram,
            offload=Offload(plan.layers, self.asked.total, split),
        )


class AllOnOneWorker(SeveralGpus):
    """As few GPUs of one worker as hold every layer."""

    step = code = "one_worker"

    def hopeless(self) -> bool:
        return self.planner.needed(self.asked.total) > self.fleet.largest[1]

    def look(self, rows: Ints) -> None:
        found = self.search.cards(rows)
        total = self.asked.total
        enough = np.where(found.usable, found.free, 0).sum(axis=1) >= self.planner.needed(total)
        for r in np.flatnonzero(enough).tolist():
            counts = [
                self.planner.likely_fewest(self.rooms(found, r, g), self.order(found, r, g), total)
                for g in self.groups(found, r)
            ]
            fewest = min((n for n in counts if n), default=0)
            self.about[rows[r]] = FEW - fewest if fewest else 0

    def work_out(self, found: Cards, r: int) -> tuple[int, Seat] | None:
        best: Seat | None = None
        for slots in self.groups(found, r):
            seat = self.seated(found, r, slots, self.fewest(found, r, slots))
            if seat is not None and (best is None or len(seat.slots) < len(best.slots)):
                best = seat
        return (FEW - len(best.slots), best) if best is not None else None

    def fewest(self, found: Cards, r: int, slots: Sequence[int]) -> Choosing | None:
        """As few of these cards as hold every layer."""
        rooms, order = self.rooms(found, r, slots), self.order(found, r, slots)
        return self.planner.fewest(rooms, order, self.asked.total)

    def seat(self, w: int, turn: int) -> Seat:
        """Of cards that are as free as the last one taken others serve too: they take turns."""
        kept = self.offers[w]
        if not turn or self.asked.split:
            return kept
        found = self.search.cards(np.array([w]))
        slots = next(g for g in self.groups(found, 0) if kept.slots[0] in g)
        free = {s: int(found.free[0, s]) for s in slots}
        least = min(free[s] for s in kept.slots)
        same = [s for s in slots if free[s] == least]
        missing = sum(free[s] == least for s in kept.slots)
        start = missing * (turn % max(len(same) // missing, 1))
        taken = {s for s in kept.slots if free[s] != least} | set(same[start : start + missing])
        mine = [s for s in slots if s in taken]
        plan = self.planner.divided(self.rooms(found, 0, mine), self.asked.total)
        choosing = Choosing(tuple(range(len(mine))), plan) if plan else None
        return self.seated(found, 0, mine, choosing) or kept


class SomeOnOneWorker(SeveralGpus):
    """The most layers that one worker holds on its GPUs, as few as hold so many; the rest in its RAM."""

    step = code = "partial"

    def look(self, rows: Ints) -> None:
        found = self.search.cards(rows)
        asked = self.asked.layers
        if asked is not None:
            self.about[rows] = np.where(found.usable.any(axis=1), asked, 0)
            return
        best = np.zeros(len(rows), np.int64)
        if not self.asked.split:
            pooled = np.broadcast_to(found.unified[:, None], found.free.shape)
            alone = np.where(found.usable, self.planner.about_alone(found.free, pooled), 0)
            best = alone.max(axis=1)
            left = np.array([self.planner.left(n) for n in range(self.asked.total)], np.int64)
            best[found.ram < left[best]] = 0
        for r in np.flatnonzero(np.count_nonzero(found.usable, axis=1) > 1).tolist():
            for slots in self.groups(found, r):
                offered = int(found.free[r, slots].sum())
                if len(slots) > 1 and self.planner.at_most(offered) > best[r]:
                    rooms, order = self.rooms(found, r, slots), self.order(found, r, slots)
                    level = self.planner.likely_deepest(rooms, order)
                    if level > best[r] and found.ram[r] >= self.planner.left(level):
                        best[r] = level
        self.about[rows] = best

    def levels_alone(self, found: Cards, r: int) -> Ints:
        """(S,) the most layers that each card of a worker holds by itself; 0 = none."""
        usable, unified = found.usable[r], bool(found.unified[r])
        best = np.zeros(usable.shape, np.int64)
        if self.asked.split:
            return best
        if self.asked.layers is None:
            free = found.free[r, usable]
            best[usable] = self.planner.deepest_alone(free, np.full(free.shape, unified))
        else:
            best[usable] = self.asked.layers
        for n in set(best[best > 0].tolist()):
            level = self.planner.alone(n)
            claim = level.devices[0].unified if unified else level.devices[0].vram
            ram = level.ram_unified + claim if unified else level.ram
            best[(best == n) & ((claim > found.free[r]) | (ram > found.ram[r]))] = 0
        return best

    def work_out(self, found: Cards, r: int) -> tuple[int, Seat] | None:
        alone = self.levels_alone(found, r)
        level = int(alone.max())
        best = self._alone(found, r, int(alone.argmax()), level) if level else None
        if level and level == self.asked.layers:
            return (level, best) if best is not None else None
        for slots in self.groups(found, r):
            offered = int(found.free[r, slots].sum())
            if len(slots) < 2 or self.planner.at_most(offered) <= level:
                continue
            rooms, order = self.rooms(found, r, slots), self.order(found, r, slots)
            if self.asked.layers is None:
                choosing = self.planner.deepest(rooms, order)
            else:
                choosing = self.planner.fewest(rooms, order, self.asked.layers)
            seat = self.seated(found, r, slots, choosing)
            if seat is not None and choosing is not None and choosing.plan.layers > level:
                best, level = seat, choosing.plan.layers
        return (level, best) if best is not None else None

    def _alone(self, found: Cards, r: int, slot: int, level: int) -> Seat:
        sized, pooled = self.planner.alone(level), bool(found.unified[r])
        share = sized.devices[0]
        return Seat(
            int(found.w[r]),
            (slot,),
            (share.unified if pooled else share.vram,),
            ram=sized.ram_unified if pooled else sized.ram,
            offload=Offload(level, self.asked.total),
        )

    def seat(self, w: int, turn: int) -> Seat:
        """Where one card is taken, others that hold as many layers take turns."""
        kept = self.offers[w]
        if not turn or len(kept.slots) != 1 or kept.offload is None:
            return kept
        found = self.search.cards(np.array([w]))
        good = np.flatnonzero(self.levels_alone(found, 0) == kept.offload.layers).tolist()
        return replace(kept, slots=(good[turn % len(good)],)) if good else kept

    def choose(self, turn: int) -> Choice | None:
        found = super().choose(turn)
        return None if found is None else gguf_lacking.limited(self, found)


class NoneOnGpus(LayeredTier):
    """No GPU: a worker with RAM for everything, of equal ones one that has no GPUs."""

    step = code = "cpu"

    def look(self, rows: Ints) -> None:
        self.fleet.renew()
        ram = self.need(rows)
        serves = ram <= self.fleet.ram_free[rows]
        if self.rules.by_cpu is not None:
            serves &= self.rules.by_cpu(self.fleet, rows)
        self.count[rows] = serves
        self.booked[rows] = np.count_nonzero(self.fleet.gpu_id[rows] != 0, axis=1)

    def need(self, rows: Ints) -> Ints:
        """(R,) RAM of a model without GPUs."""
        level = self.planner.alone(0)
        need: Ints = np.where(self.fleet.unified[rows], level.ram_unified, level.ram)
        return need

    def rank(self, idx: Ints) -> tuple[Floats, Mapping[str, Floats]]:
        return self.search.rank(idx, self.value[idx], bare=True, ram_claim=self.planner.alone(0).ram)

    def seat(self, w: int, turn: int) -> Seat:
        return Seat(w, ram=int(self.need(np.array([w]))[0]), offload=Offload(0, self.asked.total))
