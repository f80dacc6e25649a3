"""One demand against the fleet: filters, ladder and scores, kept and brought up to date by need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet import Fleet, Ints
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import PoolStep
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.fit.cards import Cards
from gpustackd.placement.fit.rules import Rules
from gpustackd.placement.fit.seat import Choice
from gpustackd.placement.policy import Policy
from gpustackd.placement.score.locality import Warm, shares, warm
from gpustackd.placement.score.strategy import Scorer, Seats
from gpustackd.placement.tiers import EPSILON, ManyGpus, OneGpu, Tier

Floats = NDArray[np.float64]


class Search:
    """All that is known of one demand on one fleet. Not thread-safe, as the fleet is not."""

    def __init__(self, fleet: Fleet, demand: Demand, policy: Policy, rules: Rules) -> None:
        self.fleet = fleet
        self.demand = demand
        self.policy = policy
        self.rules = rules
        self.model_id = demand.spec.id
        self.filters = chain.chain(demand)
        self._labels = next((f for f in self.filters if isinstance(f, LabelFilter) and f.preferred), None)
        self.scorer = Scorer(
            demand.spec.placement_strategy or policy.strategy,
            policy.placement_max,
            "prefer_mean_over_gpus" in policy.prefer,
            "prefer_dominant_resource" in policy.prefer,
            policy.compat,
        )
        self.first_fit = self.scorer.strategy is Strategy.FIRST_FIT
        self.ladder: tuple[Tier, ...] = self._ladder()
        self._tick = -1
        self._size = 0
        self._pool: tuple[PoolStep, ...] | None = None
        self._warm = Warm()
        self._warm_shares: Floats | None = None
        self._warm_roster = -1

    def _ladder(self) -> tuple[Tier, ...]:
        tiers: list[Tier] = []
        if self.rules.gpu_count <= 1:
            tiers.append(OneGpu(self))
        if self.rules.gpu_count != 1 and self.rules.several:
            tiers.append(ManyGpus(self))
        return tuple(tiers)

    # -- keeping up ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Filter bits and counts of this model, for workers that changed."""
        fleet = self.fleet
        if self._size != len(fleet.alive):
            self._size = len(fleet.alive)
            self.bits = np.full(self._size, chain.GONE, np.uint16)
            self.mine = np.zeros(self._size, np.int32)
            self.gain = np.zeros(self._size) if self._labels else None
            self._tick = -1
        if self._tick == fleet.tick:
            return
        rows = np.flatnonzero(fleet.touched[: fleet.count] > self._tick)
        self._tick = fleet.tick
        if not len(rows):
            return
        bits = chain.failures(self.filters, fleet, rows)
        if self._pool is not None and not np.array_equal(bits, self.bits[rows]):
            self._pool = None
        self.bits[rows] = bits
        counts = fleet.model_on_worker.get(self.model_id)
        self.mine[rows] = [counts.get(w, 0) for w in rows.tolist()] if counts else 0
        if self._labels is not None and self.gain is not None:
            self.gain[rows] = self._labels.preference(fleet, rows)

    @property
    def pool(self) -> tuple[PoolStep, ...]:
        """Workers left after each filter."""
        if self._pool is None:
            self._pool = chain.pool(self.filters, self.bits, self.fleet.alive)
        return self._pool

    # -- the answer ------------------------------------------------------------------------------------

    def best(self, turn: int) -> Choice | None:
        """The best place of the first step that has one."""
        self.refresh()
        if self.first_fit:
            turn = 0
        for tier in self.ladder:
            found = tier.choose(turn)
            if found is not None:
                return found
        return None

    # -- scoring -----------------------------------------------------------------------------------------

    def seats(self, found: Cards, claim: Ints, booked: Ints) -> Seats:
        """The strategy's view of cards; `booked` (R, S) or (R, 1) is what the RAM claim follows."""
        fleet, rules = self.fleet, self.rules
        ram: Any = rules.ram_static or 0
        if not rules.ram_static and rules.ram_ratio:
            ram = (booked * rules.ram_ratio).astype(np.int64)
        need_counts = self.scorer.spread
        return Seats(
            claim,
            found.free,
            fleet.vram_capacity[found.w],
            ram,
            found.ram[:, None],
            self._mine_on_cards(found.w) if need_counts else 0,
            fleet.gpu_occupants[found.w],
        )

    def _mine_on_cards(self, rows: Ints) -> Any:
        counts = self.fleet.model_on_gpu.get(self.model_id)
        if not counts:
            return 0
        mine = np.zeros((len(rows), self.fleet.slots), np.int32)
        if len(rows) * self.fleet.slots < len(counts):
            for r, w in enumerate(rows.tolist()):
                for s in range(self.fleet.slots):
                    mine[r, s] = counts.get((w, s), 0)
            return mine
        row_of = {w: r for r, w in enumerate(rows.tolist())}
        for (w, s), n in counts.items():
            if w in row_of:
                mine[row_of[w], s] = n
        return mine

    def rank(self, idx: Ints, value: Floats) -> tuple[Floats, Mapping[str, Floats]]:
        """Total score and its parts for offers on worker positions `idx` with card values `value`."""
        mine = self.mine[idx]
        parts: dict[str, Floats] = {
            "placement": self.scorer.worker(value, mine, self.fleet.occupants[idx] - mine)
        }
        total = parts["placement"]
        local = self._locality()
        if local is not None:
            parts["locality"] = self.policy.locality_max * local[idx]
            total = total + parts["locality"]
        if self.gain is not None:
            parts["preferred"] = self.gain[idx]
            total = total + parts["preferred"]
        return total, parts

    def _locality(self) -> Floats | None:
        found = warm(self.demand, self.policy)
        if not found.main and not found.draft:
            return None
        if self._warm_shares is None or found != self._warm or self._warm_roster != self.fleet.roster:
            self._warm = Warm(dict(found.main), dict(found.draft))
            self._warm_roster = self.fleet.roster
            self._warm_shares = shares(self.fleet, self._warm, len(self.fleet.alive))
        return self._warm_shares

    def ties(self, idx: Ints, scores: Floats, booked: Ints) -> Ints:
        """Positions in `idx` that share the best score and, of these, book the least memory; the first
        worker alone where the strategy is first fit."""
        ties = np.flatnonzero(scores >= scores.max() - EPSILON)
        if self.first_fit:
            return ties[[int(np.argmin(self.fleet.worker_id[idx[ties]]))]]
        if len(ties) > 1:
            memory = booked[ties]
            least = memory.min()
            if memory.max() != least:
                ties = ties[memory == least]
        return ties
