"""One decision: where an instance goes, or why nowhere. Pure."""

from __future__ import annotations

from dataclasses import replace

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.errors import BadRow
from gpustackd.placement.context.gpu_allocation import Candidate, placement
from gpustackd.placement.diagnostics.refusal import unknown_size, unusable, with_faults
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.scoring.tie_break import tie_break
from gpustackd.placement.search import Search
from gpustackd.placement.search_cache import SearchCache

Searches = SearchCache[Search]


def decide(
    fleet: Fleet, demand: Demand, subject: Subject, policy: Policy, memo: Searches | None = None
) -> Placed | NoFit:
    """Find a place for one instance on the fleet as it is known now.

    The fleet is only read. `memo` keeps what was worked out for the demand, so that the next decision
    looks only at workers that changed. Nothing is raised for a model or a row that cannot be used:
    the answer says so.
    """
    if demand.need.vram is None:
        return unknown_size(demand)
    try:
        search, candidate = _search(fleet, demand, subject, policy, memo)
    except BadRow as problem:
        return unusable(problem)
    if candidate is None:
        cut, failed = search.cut, search.context.failed_stages()  # the refusal looks at the ladder again
        return with_faults(replace(search.refuse(), cut=cut), failed | search.context.failed_stages())
    return _placed(search, candidate)


def find(
    fleet: Fleet, demand: Demand, subject: Subject, policy: Policy, memo: Searches | None = None
) -> Placed | None:
    """The same decision without words where there is no place: for trials, of which there are many.

    Raises BadRow where the model asks for something that cannot be.
    """
    if demand.need.vram is None:
        return None
    search, candidate = _search(fleet, demand, subject, policy, memo)
    return None if candidate is None else _placed(search, candidate)


def _search(
    fleet: Fleet, demand: Demand, subject: Subject, policy: Policy, memo: Searches | None
) -> tuple[Search, Candidate | None]:
    view = fleet.without(subject.id) if subject.leave_out else fleet
    search = _prepare(view, demand, policy, None if subject.leave_out else memo)
    return search, search.best(tie_break(subject.name))


def _placed(search: Search, candidate: Candidate) -> Placed:
    context = search.context
    made = placement(context.fleet, context.rules, candidate, context.policy.commit_check)
    faults = tuple(f.as_reason() for f in context.failed_stages().values())
    if faults:
        made = replace(made, warnings=(*made.warnings, *faults))
    return Placed(made, context.pool, candidate.also, search.cut, faults)


def _prepare(fleet: Fleet, demand: Demand, policy: Policy, memo: Searches | None) -> Search:
    key = (demand.spec.id, demand.spec.version, demand.engine, demand.need, demand.digest, policy.key)
    if memo is not None:
        kept = memo.get(key)
        if kept is not None and kept.context.fleet is fleet:
            kept.context.policy = policy
            return kept
    search = Search(fleet, demand, policy, rules_of(demand))
    if memo is not None and not search.context.missing_filters:
        memo.put(key, search)
    return search
