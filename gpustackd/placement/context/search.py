"""One demand against the fleet: filters, ladder and scores, kept and brought up to date by need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import PoolStep
from gpustackd.engines.sglang_static_fraction import Fraction
from gpustackd.placement.context.cards import Cards, cards
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.context.resource_rules import ResourceRules
from gpustackd.placement.diagnostics.faults import StageFault, StageFaults
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.framework import FrameworkFilter
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.filters.local_path import LocalPathFilter
from gpustackd.placement.policy import Policy
from gpustackd.placement.preferences import PREFER_DOMINANT_RESOURCE, PREFER_MEAN_OVER_GPUS
from gpustackd.placement.scoring.fault_tolerant import FaultTolerantScorer
from gpustackd.placement.scoring.ranker import EPSILON, Floats, Ranker
from gpustackd.placement.scoring.ranking_cache import KeptRanking
from gpustackd.placement.scoring.soft_scores import Part, SoftScores
from gpustackd.placement.selectors.generic.multi_worker import MultiWorkerSelector
from gpustackd.placement.selectors.generic.sglang_fractions import follows_cards, fractions, with_fractions
from gpustackd.placement.selectors.generic.single_worker import (
    CpuSelector,
    MultiGpuSelector,
    SingleGpuSelector,
)
from gpustackd.placement.selectors.manual.search import ManualSelector
from gpustackd.placement.selectors.registry import engine_selectors

SHARED_ROWS = 512
"""More rows than this are not kept for the next step: memory stays flat."""


class Step(Protocol):
    """One step of the ladder."""

    @property
    def step(self) -> str:
        """Its name in answers."""

    def choose(self, turn: int) -> Candidate | None:
        """The best place that this step finds."""


class PlacementContext(Ranker):
    """All that is known of one demand on one fleet. Not thread-safe, as the fleet is not."""

    def __init__(self, fleet: Fleet, demand: Demand, policy: Policy, rules: ResourceRules) -> None:
        self.fleet = fleet
        self.demand = demand
        self.policy = policy
        self.rules = rules
        self.model_id = demand.spec.id
        self.faults = StageFaults()
        self.filters = chain.chain(demand, policy, self.faults)
        self.without = self.faults.told()
        """Filters that could not be made at all."""
        framework = next((f for f in self.filters if isinstance(f, FrameworkFilter)), None)
        if framework is not None:
            self.rules = replace(rules, **chain.guarded(framework, self.faults))
        labels = next((f for f in self.filters if isinstance(f, LabelFilter) and f.preferred), None)
        self.besides = SoftScores(fleet, demand, labels, self.faults)
        self._path = next((f for f in self.filters if isinstance(f, LocalPathFilter)), None)
        self.scorer = FaultTolerantScorer(
            demand.spec.placement_strategy or policy.strategy,
            max(policy.placement_max, 0.0),
            PREFER_MEAN_OVER_GPUS in policy.prefer,
            PREFER_DOMINANT_RESOURCE in policy.prefer,
            policy.mix,
            self.faults,
        )
        self.first_fit = self.scorer.strategy is Strategy.FIRST_FIT
        self.fractions: Mapping[str, Fraction] = {}
        """GPU type -> static fraction, where the share of a card follows from the cards."""
        self._follows_cards = follows_cards(demand, rules)
        self._followed: tuple[int, int] | None = None
        self.ladder: tuple[Step, ...] = self._ladder()
        self._cards: tuple[int, Cards] | None = None
        self._tick = -1
        self._size = 0
        self.filtered = 0
        """Rises whenever the filters let other workers through."""
        self.cut = False
        """Whether a step of the last search ended for its budget."""
        self.standing: KeptRanking | None = None
        """The last ranking, where the next instance may go on from it."""
        self.news = 0
        """Workers that changed between the last two decisions."""
        self._pool: tuple[PoolStep, ...] | None = None

    def _ladder(self) -> tuple[Step, ...]:
        if self.demand.spec.gpu_ids and self.rules.gguf is None:
            return (ManualSelector(self),)
        if own := engine_selectors(self):
            return own
        if self.rules.cpu_only:
            return (CpuSelector(self),)
        tiers: list[Step] = []
        more = self.rules.gpu_count != 1
        if self.rules.gpu_count <= 1:
            tiers.append(SingleGpuSelector(self))
        if more:
            tiers.append(MultiGpuSelector(self))
        if more and self.rules.distributed:
            tiers.append(MultiWorkerSelector(self))
        if self.rules.cpu:
            tiers.append(CpuSelector(self))
        return tuple(tiers)

    # -- keeping up ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Filter bits and counts of this model, for workers that changed."""
        fleet = self.fleet
        if self.faults or (self.scorer.mixed and self.scorer.mix is not self.policy.mix):
            self._anew()
        self.besides.begin(self.policy)
        if self._size != len(fleet.alive):
            self._size = len(fleet.alive)
            self.bits = np.full(self._size, chain.GONE, np.uint16)
            self.mine = np.zeros(self._size, np.int32)
            self.besides.allocate(self._size)
            self._tick = -1
        path = self._path
        if path is not None and self.faults.tried(
            "filter.local_path", lambda: path.renew(self.policy), False
        ):
            self._tick, self._cards, self.ladder = -1, None, self._ladder()
        self.news = 0
        if self._tick == fleet.tick:
            return
        before = self._tick
        self._tick = fleet.tick
        rows = (fleet.touched[: fleet.count] > before).nonzero()[0]
        self.news = len(rows)
        if not len(rows):
            return
        counts = fleet.occupancy.model_on_worker.get(self.model_id)
        self.mine[rows] = [counts.get(w, 0) for w in rows.tolist()] if counts else 0
        rows = rows[fleet.described[rows] > before]
        if len(rows):
            self._filter(rows)
        if self._follows_cards:
            self._follow_cards()

    def _anew(self) -> None:
        """Keep nothing that was worked out while a filter or scorer failed, or for another mix of demands."""
        if self.faults:
            self.faults.clear()
            self._size, self.standing = 0, None
        self._cards = None
        self.scorer = replace(self.scorer, mix=self.policy.mix)
        self.ladder = self._ladder()

    def _filter(self, rows: Ints) -> None:
        """Look anew at workers whose own rows changed."""
        bits = chain.failures(self.filters, self.fleet, rows, self.faults)
        if not np.array_equal(bits, self.bits[rows]):
            self._pool = None
            self.filtered += 1
        self.bits[rows] = bits
        self.besides.describe(rows)

    def _follow_cards(self) -> None:
        """Work out the share of a card anew where workers or cards are others than before."""
        now = (self.fleet.inventory, self.filtered)
        if self._followed == now:
            return
        self._followed = now
        found = fractions(self.fleet, (self.bits == 0).nonzero()[0], self.demand, self.rules)
        if found != self.fractions:
            self.fractions = found
            self.rules = with_fractions(self.rules, found)
            self._cards = None
            self.ladder = self._ladder()

    def told(self) -> dict[str, StageFault]:
        """What failed since the last decision began, by stage."""
        return {f.stage: f for f in (*self.without, *self.faults.told())}

    @property
    def pool(self) -> tuple[PoolStep, ...]:
        """Workers left after each filter."""
        if self._pool is None:
            self._pool = chain.pool(self.filters, self.bits, self.fleet.alive)
        return self._pool

    def cards(self, rows: Ints) -> Cards:
        """Cards of these positions; steps that look at the same workers at the same time share them."""
        kept = self._cards
        if kept is not None and kept[0] == self.fleet.tick and np.array_equal(kept[1].w, rows):
            return kept[1]
        found = cards(self.fleet, rows, self.rules)
        self._cards = (self.fleet.tick, found) if len(rows) <= SHARED_ROWS else None
        return found

    # -- the answer ------------------------------------------------------------------------------------

    def best(self, turn: int) -> Candidate | None:
        """The best place of the first step that has one."""
        self.cut = False
        stands, self.standing = self.standing, None
        if stands is not None and stands.holds(self):
            self.standing = stands
            return stands.tier.next_of(stands, turn)
        self.refresh()
        if self.first_fit:
            turn = 0
        for n, tier in enumerate(self.ladder):
            found = tier.choose(turn)
            self.cut |= getattr(tier, "cut", False)
            if found is not None:
                if n and not all(getattr(t, "hopeless", bool)() for t in self.ladder[:n]):
                    self.standing = None  # room on one worker may bring an earlier step back
                if self.faults:
                    self.standing = None
                return found
        return None

    # -- scoring -----------------------------------------------------------------------------------------

    def rank(
        self, idx: Ints, value: Floats, bare: bool = False, ram_claim: int | None = None
    ) -> tuple[Floats, Mapping[str, Part]]:
        """Total score and its parts for offers on worker positions `idx` with card values `value`
        (`bare`: without GPUs, by the RAM they take)."""
        mine = self.mine[idx]
        others = self.fleet.occupancy.occupants[idx] - mine
        if bare:
            ram = self.fleet.ram_free[idx]
            claim = self.rules.ram_claim(0) if ram_claim is None else ram_claim
            placed = self.scorer.without_cards(claim, ram, mine, others)
        else:
            placed = self.scorer.worker(value, mine, others)
        parts: dict[str, Part] = {"placement": placed}
        total = placed
        more = self.besides.of_workers(idx)
        if more is not None:
            total = total + more[0]
            parts |= more[1]
        return total, parts

    def ties(self, idx: Ints, scores: Floats, booked: NDArray[Any]) -> Ints:
        """Positions in `idx` that share the best score, of these book the least memory, and of these have the
        fewest bytes to download; the first worker alone where the strategy is first fit."""
        ties: Ints = (scores >= scores.max() - EPSILON).nonzero()[0]
        if self.first_fit:
            return ties[[int(np.argmin(self.fleet.worker_id[idx[ties]]))]]
        if len(ties) > 1:
            memory = booked[ties]
            least = memory.min()
            if memory.max() != least:
                ties = ties[memory == least]
        if len(ties) > 1 and (lacking := self.besides.to_download(idx[ties])) is not None:
            ties = ties[lacking == lacking.min()]
        if len(ties) > 1 and (order := self.fleet.order) is not None:
            ties = ties[np.argsort(order[idx[ties]], kind="stable")]
        return ties
