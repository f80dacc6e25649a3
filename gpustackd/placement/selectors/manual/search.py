"""GPUs that the user picked: chooses among the selected cards, on one worker or on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Reason
from gpustackd.placement.context.distributed_limit import busy
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.diagnostics.wording import gib, gib_number, have, some
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.selectors.base.needs import needs
from gpustackd.placement.selectors.base.picked_gpus import (
    PickedGpu,
    PickedGpus,
    Selection,
    candidates,
    resolve,
)
from gpustackd.placement.selectors.base.selector import Uncached
from gpustackd.placement.selectors.base.unreachable_gpus import SHOWN


class ManualSelector(Uncached):
    """Looks at the selected cards only; nothing of it is kept between decisions, they are few."""

    kind = "manual"

    def __init__(self, context: PlacementContext, ranker: Ranker) -> None:
        self.context = context
        self.ranker = ranker
        self.rules = context.rules
        self.spec = context.demand.spec

    def select(self, tie_break: int) -> Candidate | None:
        """The best use of the selection; over-committed only where that is asked for and allowed."""
        found = self.choices(tie_break)
        return self.ranker.pick(found, tie_break) if found else None

    def choices(self, tie_break: int) -> list[Candidate]:
        """Every use of the selection that may be made, not scored yet."""
        selection, found = self.look(tie_break)
        allowed, over = self.allowed(found)
        warnings: tuple[Reason, ...] = ()
        if over:
            warning = over_commit_reason(
                self.context.fleet, self.rules, allowed[0], selection.cards, "warning"
            )
            warnings = (warning, needs(self.context.demand, self.rules))
        return [Candidate(c.allocations, self.kind, over_commit=over, warnings=warnings) for c in allowed]

    def look(self, tie_break: int) -> tuple[Selection, list[PickedGpus]]:
        """The selection as it is now, and every way to use it."""
        context, rules = self.context, self.rules
        selection = resolve(context.fleet, self.spec.gpu_ids, rules, context.bits)
        if self.heterogeneous():
            return selection, []
        full = (
            [] if rules.gpu_count < 2 else busy(context.fleet, [c.w for c in selection.cards], rules.engine)
        )
        return selection, candidates(selection.cards, rules, context.fleet, full, tie_break)

    def heterogeneous(self) -> bool:
        """All of the selection is needed at once, and it is of several types."""
        ids = self.spec.gpu_ids
        return len({g.type for g in ids}) > 1 and self.rules.gpu_count == len(ids) and len(ids) > 1

    def allowed(self, found: Sequence[PickedGpus]) -> tuple[list[PickedGpus], bool]:
        """Candidates that may be taken, and whether they over-commit."""
        clean = [c for c in found if not c.over]
        if clean:
            return clean, False
        if not found or not self._may_over_commit():
            return [], False
        best = found[0]
        for c in found[1:]:
            if c.effective >= best.effective:
                best = c
        return [best], True

    def _may_over_commit(self) -> bool:
        selector = self.spec.gpu_selector
        asked = selector is not None and selector.allow_overcommit
        return asked and self.rules.replicas <= 1


def over_commit_reason(
    fleet: Fleet, rules: ResourceRules, candidate: PickedGpus, cards: Sequence[PickedGpu], level: str
) -> Reason:
    """The facts of an over-committing choice."""
    used = candidate.used
    partly = len(used) != len(cards)
    counted = used if partly else cards
    ok = sum(c.satisfied for c in counted)
    free = sum(c.free for c in counted)
    text = f"the selected GPUs would be over-committed: {gib(rules.vram)} needed"
    params: dict[str, Any] = {
        "need_bytes": rules.vram,
        "effective_bytes": candidate.effective,
        "effective_gib": gib_number(candidate.effective),
        "free_bytes": free,
        "allocatable_gib": gib_number(free),
        "gpus_ok": ok,
        "gpus": len(counted),
        "selected": len(cards),
    }
    if partly:
        names = [f"{fleet.row(c.w).name}:{c.index}" for c in used]
        text += f"; {len(used)} of {len(cards)} selected GPUs would be used ({some(names, SHOWN)})"
        params["used"] = names[:SHOWN]
    if rules.claim_policy is ClaimPolicy.SHARE:
        text += f"; {gib(free)} free, and {ok} of {len(counted)} GPUs {have(ok)} the full share free"
    text += f"; {gib(candidate.effective)} usable"
    return Reason("gpu_selector.overcommit", "gpu_selector", text, params, level)
