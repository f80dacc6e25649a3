"""The selectors for MindIE: NPUs of one worker, then as many NPUs from each of several workers.

A worker's NPUs are taken freest first, and every worker offers one candidate. Over several workers each
gives the same number L of NPUs; of all L that serve, the one that needs the fewest workers is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.placement.context.cards import Cards, ram_holds, read_cards
from gpustackd.placement.context.distributed_limit import mask
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.scoring.ranker import Floats, Ranker
from gpustackd.placement.selectors.ascend.npus import Npus, levels, linked, npus, sizes, slots_of
from gpustackd.placement.selectors.base.fleet_selector import FleetSelector, SingleWorkerSelector

NONE = -1


class SingleWorkerNpuSelector(SingleWorkerSelector):
    """As few NPUs of one worker as hold the model, or as many as the parallel sizes ask for."""

    kind = "one_worker"

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.reach = np.zeros(size, np.int64)
        """What all NPUs of a worker that have their fraction free offer together."""

    def is_hopeless(self) -> bool:
        return self.rules.vram > self.fleet.largest[1]

    def look(self, rows: Ints) -> None:
        found, offer = self.offer(rows)
        count, booked = self.fewest(found, offer)
        self.count[rows] = count
        self.booked[rows] = booked
        if not count.any():
            return
        claim = np.where(offer.eligible, offer.claim, 0)
        view = self.ranker.view(found, claim, booked[:, None])
        self.value[rows] = self.scorer.taken(view, offer.taken(count))

    def offer(self, rows: Ints) -> tuple[Cards, Npus]:
        cards = read_cards(self.fleet, rows, self.rules)
        return cards, npus(cards, self.rules, self.fleet)

    def fewest(self, cards: Cards, offer: Npus) -> tuple[NDArray[np.int64], Ints]:
        """(R,) how many NPUs hold the model, 0 = none do, and what they book together."""
        rules = self.rules
        count = np.zeros(len(cards.positions), np.int64)
        booked = np.zeros(len(cards.positions), np.int64)
        for n in sizes(rules, self.fleet.slots):
            held = (count == 0) & offer.holding(n, rules.vram)
            held &= ram_holds(cards, rules, offer.sums[:, n - 1], cards.ram, cards.unified)
            count[held] = n
            booked[held] = offer.sums[held, n - 1]
        return count, booked

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        found, offer = self.offer(np.array([w]))
        return allocation(w, 0, int(self.count[w]), found, offer, tie_break)


@dataclass(frozen=True, slots=True)
class NpuWorkers:
    """So many of these workers (positions) hold the model with `each` NPUs."""

    level: int
    each: int
    hosts: int
    booked: int
    members: Ints


class MultiWorkerNpuSelector(FleetSelector):
    """As many NPUs of each of several workers; all of them linked into the network of NPUs."""

    kind = "many_workers"

    def allocate(self, size: int) -> None:
        self.levels = levels(self.rules, self.fleet.slots)
        self.booked = np.full((len(self.levels), size), NONE, np.int64)
        """What a worker books when it gives so many NPUs; -1 = it cannot."""
        self.value: Floats = np.zeros((len(self.levels), size))

    def compute(self, rows: Ints, passing: Ints) -> None:
        self.booked[:, rows] = NONE
        if not len(passing) or not self.levels:
            return
        found, offer = self.offer(passing)
        may: Bools = mask(self.fleet, passing, self.rules.engine)
        claim = np.where(offer.eligible, offer.claim, 0)
        for n, each in enumerate(self.levels):
            sums = offer.sums[:, each - 1]
            ok = may & (offer.have >= each)
            ok &= ram_holds(found, self.rules, sums, found.ram, found.unified)
            if not ok.any():
                continue
            self.booked[n, passing[ok]] = sums[ok]
            view = self.ranker.view(found, claim, sums[:, None])
            taken = offer.taken(np.where(ok, each, 0))
            self.value[n, passing[ok]] = self.scorer.taken(view, taken)[ok]

    def offer(self, rows: Ints) -> tuple[Cards, Npus]:
        cards = read_cards(self.fleet, rows, self.rules)
        every = npus(cards, self.rules, self.fleet)
        return cards, npus(cards, self.rules, self.fleet, linked(self.fleet, rows, every.eligible))

    # -- choosing ----------------------------------------------------------------------------------------

    def select(self, tie_break: int) -> Candidate | None:
        self.refresh()
        options = [o for o in map(self.option, range(len(self.levels))) if o is not None]
        if not options:
            return None
        best = min(options, key=lambda o: (o.hosts, o.booked))
        scores, parts = self.ranker.rank(best.members, self.value[best.level][best.members])
        chosen = self.ranker.hosts(best.members, scores, best.hosts, tie_break)
        allocations = self.allocations(best.members[chosen], best.each, tie_break)
        found = self.ranker.pick([Candidate(allocations, self.kind)], tie_break)
        also = self.ranker.others(best.members, scores, parts, chosen, best.each * best.hosts)
        return replace(found, also=(*found.also, *also))

    def option(self, level: int) -> NpuWorkers | None:
        """The fewest workers that hold the model with this many NPUs each, and who may be among them."""
        rules, each = self.rules, self.levels[level]
        members = np.flatnonzero(self.booked[level] > 0)
        booked = self.booked[level][members]
        order = np.argsort(-booked, kind="stable")
        sums = np.cumsum(booked[order])
        hosts = self._hosts(each, sums)
        if hosts is None:
            return None
        holding = members[booked * hosts >= max(rules.vram, 1)]
        if len(holding) < hosts:
            holding = members[order[:hosts]]
        return NpuWorkers(level, each, hosts, int(sums[hosts - 1]), holding)

    def _hosts(self, each: int, sums: Ints) -> int | None:
        """How many workers, of which the n best offer `sums[n - 1]` together."""
        rules = self.rules
        if rules.gpu_count:
            hosts, rest = divmod(rules.gpu_count, each)
            serves = not rest and 2 <= hosts <= len(sums) and sums[hosts - 1] >= rules.vram
            return hosts if serves else None
        fewest = max(2, int(np.searchsorted(sums, rules.vram)) + 1)
        known = rules.divisors.num_attention_heads or rules.divisors.vocab_size
        most = min(len(sums), known // each) if known else len(sums)
        return next((h for h in range(fewest, most + 1) if rules.divisors.allows(h * each)), None)

    def allocations(self, positions: Ints, each: int, tie_break: int) -> tuple[GpuAllocation, ...]:
        """So many NPUs of each of these workers, main worker first."""
        found, offer = self.offer(positions)
        there = np.count_nonzero(self.fleet.gpu_id[positions] != 0, axis=1)
        return tuple(
            allocation(w, r, each, found, offer, tie_break, of=int(there[r]) if r else None)
            for r, w in enumerate(positions.tolist())
        )


def allocation(
    w: int,
    r: int,
    n: int,
    cards: Cards,
    offer: Npus,
    tie_break: int,
    *,
    of: int | None = None,
) -> GpuAllocation:
    """n NPUs of the worker in row r."""
    slots = slots_of(offer, r, n, cards.free[r].tolist(), tie_break)
    return GpuAllocation(w, tuple(slots), tuple(int(offer.claim[r, s]) for s in slots), of)


def npu_ladder(
    context: PlacementContext, ranker: Ranker
) -> tuple[SingleWorkerNpuSelector | MultiWorkerNpuSelector, ...]:
    """The selectors for one demand, in their order."""
    one = SingleWorkerNpuSelector(context, ranker)
    if context.rules.distributed and context.rules.gpu_count != 1:
        return one, MultiWorkerNpuSelector(context, ranker)
    return (one,)
