"""One decision: where an instance goes, or why nowhere. Pure."""

from __future__ import annotations

from dataclasses import replace

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.errors import BadRow
from gpustackd.placement.context.gpu_allocation import Candidate, placement
from gpustackd.placement.context.search import PlacementContext
from gpustackd.placement.diagnostics.refusal import refuse, unknown_size, unusable, with_faults
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.scoring.tie_break import tie_break
from gpustackd.placement.search_cache import SearchCache
from gpustackd.placement.selectors.rules import rules_of

Searches = SearchCache[PlacementContext]


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
        search, found = _sought(fleet, demand, subject, policy, memo)
    except BadRow as problem:
        return unusable(problem)
    if found is None:
        cut, told = search.cut, search.told()  # the refusal looks at the steps again
        return with_faults(replace(refuse(search), cut=cut), told | search.told())
    return _placed(search, found)


def find(
    fleet: Fleet, demand: Demand, subject: Subject, policy: Policy, memo: Searches | None = None
) -> Placed | None:
    """The same decision without words where there is no place: for trials, of which there are many.

    Raises BadRow where the model asks for something that cannot be.
    """
    if demand.need.vram is None:
        return None
    search, found = _sought(fleet, demand, subject, policy, memo)
    return None if found is None else _placed(search, found)


def _sought(
    fleet: Fleet, demand: Demand, subject: Subject, policy: Policy, memo: Searches | None
) -> tuple[PlacementContext, Candidate | None]:
    view = fleet.without(subject.id) if subject.leave_out else fleet
    search = _search(view, demand, policy, None if subject.leave_out else memo)
    return search, search.best(tie_break(subject.name))


def _placed(search: PlacementContext, found: Candidate) -> Placed:
    made = placement(search.fleet, search.rules, found, search.policy.commit_check)
    faults = tuple(f.as_reason() for f in search.told().values())
    if faults:
        made = replace(made, warnings=(*made.warnings, *faults))
    return Placed(made, search.pool, found.also, search.cut, faults)


def _search(fleet: Fleet, demand: Demand, policy: Policy, memo: Searches | None) -> PlacementContext:
    key = (demand.spec.id, demand.spec.version, demand.engine, demand.need, demand.digest, policy.key)
    if memo is not None:
        kept = memo.get(key)
        if kept is not None and kept.fleet is fleet:
            kept.policy = policy
            return kept
    search = PlacementContext(fleet, demand, policy, rules_of(demand))
    if memo is not None and not search.without:
        memo.put(key, search)
    return search
