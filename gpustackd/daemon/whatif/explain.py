"""Why an instance waits, as of now: the decision made anew, and what would help it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpustackd.daemon.whatif.snapshot import Snapshot
from gpustackd.domain.demand import Demand
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import ModelSpec, filled
from gpustackd.domain.outcome import NoFit, Outcome
from gpustackd.domain.placement_hints import with_claim_raise
from gpustackd.errors import BadRow
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.evaluate import evaluate
from gpustackd.placement.advice.changes import Holder
from gpustackd.placement.advice.suggestions import Advice, advise
from gpustackd.placement.advice.trials import Ahead, Build, TrialCase
from gpustackd.placement.policy import Subject
from gpustackd.placement.preferences import PREFER_DRAFT_WEIGHTS
from gpustackd.ports import WaitingInstance

OTHERS_WITHIN = 1.0
"""Seconds in which the models of instances that come before this one are read; their places then count."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The answer. `outcome` is what a daemon would decide now; `advice` is None where nothing is known of
    what the model asks, or it has a place now."""

    outcome: Outcome
    advice: Advice | None = None
    ahead: int = 0
    """Instances that come before it in the queue."""


async def explain(
    snapshot: Snapshot,
    instance: WaitingInstance,
    queue: Sequence[WaitingInstance],
    holders: Mapping[int, Holder],
) -> Explanation:
    """Decide anew for an instance that waits. `queue`: everything that waits; `holders`: instances with a
    place, by id. Raises DatabaseUnavailable."""
    await snapshot.read([instance.model_id])
    others = [w for w in queue if w.id != instance.id]
    await snapshot.read({w.model_id for w in others} - {instance.model_id}, within=OTHERS_WITHIN)
    order = snapshot.in_order([*others, instance])
    before, after = order[: order.index(instance)], order[order.index(instance) + 1 :]
    demand = snapshot.demand(instance.model_id)
    if isinstance(demand, NoFit):
        return Explanation(demand, None, len(before))
    demand = with_claim_raise(demand, instance.hints.claim_raise)
    outcome, _ = snapshot.decider.decide(demand, instance.id, instance.name, instance.hints.avoid)
    spec = snapshot.spec(instance.model_id)
    if not isinstance(outcome, NoFit) or spec is None:
        return Explanation(outcome, None, len(before))
    demands = {w.model_id: snapshot.demand(w.model_id) for w in others}
    case = TrialCase(
        fleet=snapshot.fleet,
        policy=snapshot.policy,
        subject=Subject(instance.id, instance.name),
        demand=demand,
        spec=spec,
        build=builder(demand.facts, count_draft=PREFER_DRAFT_WEIGHTS in snapshot.policy.prefer),
        ahead=[Ahead(w.id, w.name, w.model_id) for w in before],
        behind=[Ahead(w.id, w.name, w.model_id) for w in after],
        demands={m: d for m, d in demands.items() if isinstance(d, Demand)},
    )
    return Explanation(outcome, advise(case, holders, instance.priority), len(before))


def builder(facts: ModelFacts, *, count_draft: bool) -> Build:
    """From an edited model to its demand, with the same files: as the daemon does it after an edit. The least
    amounts that an instance's failures taught are for the model as it was."""

    def build(spec: ModelSpec) -> Demand | None:
        try:
            writes = evaluate(spec, facts).writes
            spec = filled(spec, writes) if writes else spec
            return build_demand(spec, facts, count_draft=count_draft)
        except BadRow:
            return None

    return build
