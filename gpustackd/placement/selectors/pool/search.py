"""The selector for pools of cards: slices, partitions or whole cards that `gpu_type_selector` asks for.

A matching card is picked, by the ledger and by what the cluster reports of its nodes, and booked. A whole
card must be untouched, and all of it is booked, so that nothing else comes to sit on it. A worker gives one
part of a card, or all the whole cards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gpustackd.domain.fleet.columns import UNKNOWN, Bools, Ints
from gpustackd.domain.outcome import Reason
from gpustackd.domain.pools import GpuPool, Pools
from gpustackd.errors import BadRow
from gpustackd.placement.context.cards import Cards, ram_holds, read_cards
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.rules.pool import belongs
from gpustackd.placement.rules.resource_rules import PoolRequest
from gpustackd.placement.scoring.ranker import EPSILON, Ranker
from gpustackd.placement.scoring.tie_break import block
from gpustackd.placement.selectors.base.fleet_selector import SingleWorkerSelector
from gpustackd.placement.selectors.pool.inventory import NodeReport, problem

FURTHER = 4096
"""Numbers of parts that are tried beyond the fewest: no fleet has as many workers to give one each."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The pool as it is known now; `problem` where nothing can be taken from it."""

    type: GpuPool | None
    size: int = 0
    """Bytes of one part."""
    problem: Reason | None = None


class PoolSelector(SingleWorkerSelector):
    """One part of a card of a worker, or whole cards of it; over several workers one part of each."""

    kind = "pool"

    def __init__(self, context: PlacementContext, ranker: Ranker) -> None:
        super().__init__(context, ranker)
        ask = context.rules.pool
        if ask is None:
            raise BadRow("gpu_type_selector", "is not set")
        self.ask: PoolRequest = ask
        self.pools: Pools | None = None
        self.pool = Pool(None)
        self.report = NodeReport(ask, None, None)
        self._known: dict[tuple[str | None, str | None], bool] = {}

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.code = np.full(size, -1, np.int32)
        """Type of the cards offered."""

    # -- keeping up --------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """A pool changes seldom: then everything is looked at anew. What a cluster reports of its nodes
        changes often: then only those nodes are."""
        before, pools = self.pools, self.context.policy.pools
        if pools is before:
            super().refresh()
            return
        self.pools = pools
        pool = self._look_up(pools)
        since, self.report = self.report, self._reported(pool, pools)
        if before is None or pool != self.pool:
            self.pool = pool
            self._known.clear()
            self.tick = -1
            super().refresh()
            return
        super().refresh()
        rows = self.report.changed(since, self.fleet)
        if len(rows):
            self.compute(rows, rows[self.context.bits[rows] == 0])

    def _reported(self, pool: Pool, pools: Pools) -> NodeReport:
        return NodeReport(self.ask, pool.type, pools.nodes(self.context.demand.spec.cluster_id))

    def _look_up(self, pools: Pools) -> Pool:
        found = pools.named(self.ask.type, self.context.demand.spec.cluster_id)
        size = self.ask.size(found) if found else 0
        trouble = problem(self.ask, found, size, pools, self.context.demand.spec)
        return Pool(found, size, trouble)

    # -- what a worker offers ----------------------------------------------------------------------------

    def look(self, rows: Ints) -> None:
        if self.pool.problem is not None or self.parts is None:
            return
        cards = read_cards(self.fleet, rows, self.rules)
        open_ = self.eligible(cards, rows)
        claim = self.claim(rows)
        for code in np.unique(cards.type[open_]).tolist():
            mine = open_ & (cards.type == code)
            booked, taken = self._take(claim, mine)
            ok = (booked > 0) & (self.count[rows] == 0)
            ok &= booked >= (self.rules.vram if self.ask.whole else 1)
            ok &= ram_holds(cards, self.rules, booked, cards.ram, cards.unified)
            if not ok.any():
                continue
            view = self.ranker.view(cards, claim, booked[:, None])
            if self.ask.whole:
                value = self.scorer.taken(view, taken)
            else:
                value = np.where(mine, self.scorer.cards(view), -np.inf).max(axis=1)
            self.count[rows[ok]] = self.ask.cards
            self.code[rows[ok]] = code
            self.booked[rows[ok]] = booked[ok]
            self.value[rows[ok]] = value[ok]

    def claim(self, rows: Ints) -> Ints:
        """(R, S) what is booked on a card: a part, or all of the card that can be booked."""
        if self.ask.whole:
            return np.maximum(self.fleet.vram_capacity[rows], 0)
        return np.full((len(rows), self.fleet.slots), self.pool.size, np.int64)

    def _take(self, claim: Ints, mine: Bools) -> tuple[Ints, Bools]:
        """What a worker books together, 0 where it has too few cards, and the cards: the largest ones."""
        own = np.where(mine, claim, -1)
        order = np.argsort(-own, axis=1, kind="stable")[:, : self.ask.cards]
        enough = np.count_nonzero(mine, axis=1) >= self.ask.cards
        taken = np.zeros(mine.shape, np.bool_)
        np.put_along_axis(taken, order, enough[:, None], axis=1)
        return np.where(taken, own, 0).sum(axis=1), taken

    def matching(self, rows: Ints) -> Bools:
        """(R, S) cards of the pool, usable or not."""
        pool = self.pool.type
        ids = self.fleet.gpu_id[rows]
        found = np.zeros(ids.shape, np.bool_)
        if pool is None:
            return found
        for r, s in np.argwhere(ids != 0).tolist():
            row = self.fleet.gpu_rows.get(int(ids[r, s]))
            if row is None:
                continue
            kind = (row.vendor, row.name)
            known = self._known.get(kind)
            if known is None:
                known = self._known[kind] = belongs(*kind, pool)
            found[r, s] = known
        return found

    def eligible(self, cards: Cards, rows: Ints) -> Bools:
        """(R, S) cards of the pool that have room, by the ledger and by the cluster's inventory."""
        open_ = self.matching(rows) & cards.usable
        if self.ask.whole:
            capacity = self.fleet.vram_capacity[rows]
            open_ &= (
                (self.fleet.occupancy.gpu_occupants[rows] == 0)
                & (cards.free >= capacity)
                & (capacity != UNKNOWN)
            )
        else:
            open_ &= cards.free >= self.pool.size
        return open_ & self.report.open(self.fleet, rows)

    # -- how many workers --------------------------------------------------------------------------------

    @property
    def parts(self) -> int | None:
        """Workers that a placement takes, one part of a card of each; None where no number can do."""
        ask, rules, size = self.ask, self.rules, self.pool.size
        if ask.whole or size <= 0:
            return 1
        fewest = max(1, -(-rules.vram // size))
        if ask.world:
            return ask.world if ask.world >= fewest else None
        if fewest == 1:
            return 1
        known = rules.divisors.num_attention_heads or rules.divisors.vocab_size or fewest
        most = min(known, fewest + FURTHER)  # a configuration may state any number of heads
        return next((n for n in range(fewest, most + 1) if rules.divisors.allows(n)), None)

    # -- choosing ----------------------------------------------------------------------------------------

    def select(self, tie_break: int) -> Candidate | None:
        self.refresh()
        parts = self.parts
        if parts is None or self.pool.problem is not None:
            return None
        if parts == 1:
            return super().select(tie_break)
        members = self.offering
        if not self.rules.distributed or len(members) < parts:
            return None
        scores, points = self.ranker.rank(members, self.value[members])
        chosen = self.ranker.hosts(members, scores, parts, tie_break)
        allocations = tuple(
            self.allocation(w, tie_break, self.all_of(w) if n else None)
            for n, w in enumerate(members[chosen].tolist())
        )
        choice = self.ranker.pick([Candidate(allocations, self.kind)], tie_break)
        also = self.ranker.others(members, scores, points, chosen, parts)
        return replace(choice, also=(*choice.also, *also))

    def all_of(self, w: int) -> int:
        """GPUs of a worker, of whatever kind."""
        return int(np.count_nonzero(self.fleet.gpu_id[w]))

    def allocation(self, w: int, tie_break: int, of: int | None = None) -> GpuAllocation:
        rows = np.array([w])
        cards = read_cards(self.fleet, rows, self.rules)
        claim = self.claim(rows)
        mine = self.eligible(cards, rows) & (cards.type == self.code[w])
        booked, taken = self._take(claim, mine)
        if self.ask.whole:
            slots = self._whole(claim[0], mine[0], taken[0], tie_break)
        else:
            values = self.scorer.cards(self.ranker.view(cards, claim, booked[:, None]))[0]
            best = np.where(mine[0], values, -np.inf)
            good = np.flatnonzero(best >= best.max() - EPSILON).tolist()
            slots = [good[tie_break % len(good)]]
        return GpuAllocation(w, tuple(slots), tuple(int(claim[0, s]) for s in slots), of)

    def _whole(self, claim: Ints, mine: Bools, taken: Bools, tie_break: int) -> list[int]:
        """The cards taken; of cards of one size whole blocks take turns."""
        least = int(claim[taken].min())
        same = np.flatnonzero(mine & (claim == least)).tolist()
        others = np.flatnonzero(taken & (claim != least)).tolist()
        return sorted(others + block(same, self.ask.cards - len(others), tie_break))
