"""The search for one demand: its context, its ranker and its ladder of selectors, kept between decisions."""

from __future__ import annotations

import numpy as np

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.diagnostics.refusal import answer
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.foreign import held_by_others
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.resource_rules import ResourceRules
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.selectors.base.selector import Selector
from gpustackd.placement.selectors.registry import ladder


class Search:
    """Finds places for one demand on one fleet. Not thread-safe, as the fleet is not."""

    def __init__(self, fleet: Fleet, demand: Demand, policy: Policy, rules: ResourceRules) -> None:
        self.context = PlacementContext(fleet, demand, policy, rules)
        self.ranker = Ranker(self.context)
        self.ladder = ladder(self.context, self.ranker)
        self._revision = self.context.revision
        self._continuing: Selector | None = None
        """Whose last ranking the next instance may go on from."""
        self.cut = False
        """Whether a selector of the last search ended for its budget."""

    def refresh(self) -> None:
        """Bring everything up to date with the fleet and the policy."""
        context, ranker = self.context, self.ranker
        if context.faults or ranker.mix_changed():
            context.start_over()
            ranker.renew_scorer()
        ranker.soft_scores.begin(context.policy)
        context.refresh()
        ranker.refresh()
        if self._revision != context.revision:
            self._revision = context.revision
            self.ladder = ladder(context, ranker)

    def best(self, tie_break: int) -> Candidate | None:
        """The best place of the first selector that has one."""
        self.cut = False
        last, self._continuing = self._continuing, None
        if last is not None:
            candidate = last.continue_ranking(tie_break)
            if candidate is not None:
                self._continuing = last
                return candidate
        self.refresh()
        if self.ranker.first_fit:
            tie_break = 0
        selectors = self.ladder.selectors
        for n, selector in enumerate(selectors):
            candidate = selector.select(tie_break)
            self.cut |= selector.cut
            if candidate is not None:
                # room on one worker may bring an earlier selector back, and a fault taints the ranking
                if all(s.is_hopeless() for s in selectors[:n]) and not self.context.faults:
                    self._continuing = selector
                return candidate
        return None

    def refuse(self) -> NoFit:
        """Why no selector found a place; looks at all of them again."""
        self.refresh()
        context = self.context
        fleet, rules = context.fleet, context.rules
        reasons, cures = chain.refusals(context.filters, fleet, context.bits, fleet.alive, context.faults)
        if rules.devices is not None:  # of a worker that stays, some cards may be out of the question
            cures |= Cure.BACKENDS
        rows = np.flatnonzero(context.bits == 0)
        others = held_by_others(fleet, rows)
        if others is not None:
            cures |= Cure.CAPACITY
        diagnosis = self.ladder.diagnose(rows)
        if diagnosis.replaces_filters:
            reasons = []
        reasons = [*reasons, *diagnosis.reasons, *([others] if others is not None else [])]
        return answer(reasons, cures | diagnosis.cures | Cure.WORKER | Cure.MODEL, context.pool)
