"""Every place on GPUs of one worker that a decision chooses among, scored, to hold its choice against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Placement
from gpustackd.placement.context.cards import alone, cards
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation, placement
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.search import Search
from gpustackd.placement.selectors.base.gpu_sets import several
from gpustackd.placement.selectors.generic.single_worker import MultiGpuSelector, SingleGpuSelector


def places(on: Fleet, wanted: Demand, policy: Policy) -> list[Placement]:
    """Places of the first step on one worker that has any: each single GPU, else the GPUs of each worker and
    type, as few as anyone needs. Raises BadRow where the model asks for something that cannot be."""
    search = Search(on, wanted, policy, rules_of(wanted))
    search.refresh()
    for step in search.ladder.selectors:
        seats: list[GpuAllocation] = []
        if isinstance(step, SingleGpuSelector):
            seats = _single(search)
        elif isinstance(step, MultiGpuSelector):
            seats = _together(search)
        if seats:
            totals, parts = search.ranker.rate([(s,) for s in seats])
            return [
                placement(
                    on,
                    search.context.rules,
                    replace(
                        Candidate((seat,), step.kind),
                        score=float(totals[k]),
                        scores={name: float(v[k]) for name, v in parts.items()},
                    ),
                    policy.commit_check,
                )
                for k, seat in enumerate(seats)
            ]
    return []


def _single(search: Search) -> list[GpuAllocation]:
    rows = np.flatnonzero(search.context.bits == 0)
    fits, claim = alone(cards(search.context.fleet, rows, search.context.rules), search.context.rules)
    return [GpuAllocation(int(rows[r]), (s,), (int(claim[r, s]),)) for r, s in np.argwhere(fits).tolist()]


def _together(search: Search) -> list[GpuAllocation]:
    rows = np.flatnonzero(search.context.bits == 0)
    found = cards(search.context.fleet, rows, search.context.rules)
    seats: list[GpuAllocation] = []
    for code in range(len(search.context.fleet.types)):
        offer = several(found, search.context.rules, code)
        for r in offer.count.nonzero()[0].tolist():
            slots = offer.order[r, : offer.count[r]].tolist()
            seats.append(
                GpuAllocation(int(rows[r]), tuple(slots), tuple(int(offer.claim[r, s]) for s in slots))
            )
    if seats and search.context.rules.fewest:
        least = min(len(s.slots) for s in seats)
        seats = [s for s in seats if len(s.slots) == least]
    return seats
