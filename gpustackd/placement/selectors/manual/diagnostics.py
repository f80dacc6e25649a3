"""Why the GPUs that the user picked do not serve."""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.context.distributed_limit import busy
from gpustackd.placement.diagnostics.wording import have, plural
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.selectors.base import blocked_workers
from gpustackd.placement.selectors.base.needs import needs
from gpustackd.placement.selectors.base.picked_gpus import PickedGpu, PickedGpus
from gpustackd.placement.selectors.base.selector import Diagnosis
from gpustackd.placement.selectors.base.unreachable_gpus import picked_reason, unreachable
from gpustackd.placement.selectors.manual.search import ManualSelector, over_commit_reason

ROOM = {f"gpu_selector.{c}" for c in ("in_use", "overcommit", "heterogeneous", "ram", "too_few")}
"""Refusals of picked GPUs where it matters how much the model needs, …"""
OUT = "gpu_selector.worker_out"
"""… but not where a worker that takes nothing is in the way: nobody is to buy memory for it."""


def diagnose(selector: ManualSelector) -> Diagnosis:
    """Why the selection does not serve; workers that were never meant are no news."""
    reasons = _reasons(selector)
    codes = {r.code for r in reasons}
    if codes & ROOM and OUT not in codes:
        reasons.insert(0, needs(selector.context.demand, selector.rules))
    return Diagnosis(reasons, Cure.CAPACITY | Cure.WORKER | Cure.MODEL, replaces_filters=True)


def _reasons(selector: ManualSelector) -> list[Reason]:
    """Why the selection does not serve, most telling first."""
    selection, found = selector.look(0)
    reasons = unreachable(selector.context, selection)
    if selector.heterogeneous():
        kinds = ", ".join(sorted({g.type for g in selector.spec.gpu_ids}))
        text = (
            f"the selected GPUs are of several types ({kinds}), and one instance needs one type: "
            "select one type, or fewer GPUs per replica"
        )
        return [*reasons, picked_reason("heterogeneous", text, types=kinds)]
    cards = selection.cards
    if found:
        reasons.extend(_over_commit_refused(selector, found, cards))
    elif cards:
        reasons.append(_too_few(selector, cards))
    return reasons


def _too_few(selector: ManualSelector, cards: Sequence[PickedGpu]) -> Reason:
    """No candidate at all: the cards lie too scattered, or RAM is short."""
    fleet = selector.context.fleet
    count = max(selector.rules.gpu_count, 1)
    by_worker: dict[int, int] = {}
    for c in cards:
        by_worker[c.w] = by_worker.get(c.w, 0) + 1
    most = max(by_worker, key=lambda w: by_worker[w])
    name = fleet.row(most).name
    n = by_worker[most]
    params = {"usable": len(cards), "needed": count, "worker": name, "on_worker": n}
    if len(cards) < count:
        text = (
            f"only {len(cards)} of the {len(selector.spec.gpu_ids)} selected GPUs can be used; {count} needed"
        )
        return picked_reason("too_few", text, **params)
    if n >= count or (len(by_worker) > 1 and selector.rules.spans):
        booked = {w: sum(c.claim for c in cards if c.w == w) // by_worker[w] * min(k, count)
                  for w, k in by_worker.items()}  # fmt: skip
        full = [] if n >= count else busy(fleet, by_worker, selector.rules.engine)
        cause = blocked_workers.picked(fleet, selector.rules, booked, full)
        if cause is not None:
            return cause
    if not selector.rules.spans and len(by_worker) > 1:
        text = (
            f"this engine cannot span workers: {count} of the selected GPUs must be on one worker, "
            f"and {name} has the most ({n})"
        )
        return picked_reason("scattered", text, **params)
    text = f"worker {name} has {n} of the selected GPUs; {count} needed on one worker"
    return picked_reason("too_few", text, **params)


def _over_commit_refused(
    selector: ManualSelector, found: Sequence[PickedGpus], cards: Sequence[PickedGpu]
) -> list[Reason]:
    rules = selector.rules
    count = max(rules.gpu_count, 1)
    reasons: list[Reason] = []
    could = sum(_fits_when_empty(c, rules) for c in cards)
    satisfied = sum(c.satisfied for c in cards)
    booked = max(sum(c.claim for c in f.used) for f in found)
    if could >= count and booked >= rules.vram:
        text = (
            f"the selected GPUs are in use: {satisfied} of {len(cards)} {have(satisfied)} enough memory "
            f"free; {count} needed"
        )
        reasons.append(picked_reason("in_use", text, satisfied=satisfied, selected=len(cards), needed=count))
    best = max(found, key=lambda f: f.effective)
    reasons.append(over_commit_reason(selector.context.fleet, rules, best, cards, "reject"))
    if rules.replicas > 1:
        text = (
            "models with several replicas are never over-committed "
            f"({plural(len(found), 'candidate')} otherwise possible)"
        )
        reasons.append(picked_reason("replicas", text, candidates=len(found), replicas=rules.replicas))
    else:
        reasons.append(
            picked_reason("overcommit_off", "allow_overcommit is not set in the model's gpu_selector")
        )
    return reasons


def _fits_when_empty(card: PickedGpu, rules: ResourceRules) -> bool:
    if rules.claim_policy is ClaimPolicy.SHARE and card.capacity / card.total < rules.memory_fraction(
        card.type
    ):
        return False
    return card.claim <= card.capacity
