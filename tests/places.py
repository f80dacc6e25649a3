"""Every place on GPUs of one worker that a decision chooses among, scored, to hold its choice against."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Placement
from gpustackd.placement.context.cards import read_cards, single_card_fits
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation, placement
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.search import Search
from gpustackd.placement.selectors.base.gpu_sets import several
from gpustackd.placement.selectors.generic.single_worker import MultiGpuSelector, SingleGpuSelector


def places(on: Fleet, wanted: Demand, policy: Policy) -> list[Placement]:
    """Places of the first selector on one worker that has any: each single GPU, else the GPUs of each
    worker and type, as few as anyone needs. Raises BadRow where the model asks for
    what cannot be."""
    search = Search(on, wanted, policy, rules_of(wanted))
    search.refresh()
    for selector in search.ladder.selectors:
        allocations: list[GpuAllocation] = []
        if isinstance(selector, SingleGpuSelector):
            allocations = _single(search)
        elif isinstance(selector, MultiGpuSelector):
            allocations = _together(search)
        if allocations:
            totals, parts = search.ranker.rate([(s,) for s in allocations])
            return [
                placement(
                    on,
                    search.context.rules,
                    replace(
                        Candidate((allocation,), selector.kind),
                        score=float(totals[k]),
                        scores={name: float(v[k]) for name, v in parts.items()},
                    ),
                    policy.commit_check,
                )
                for k, allocation in enumerate(allocations)
            ]
    return []


def _single(search: Search) -> list[GpuAllocation]:
    rows = np.flatnonzero(search.context.bits == 0)
    fits, claim = single_card_fits(
        read_cards(search.context.fleet, rows, search.context.rules), search.context.rules
    )
    return [GpuAllocation(int(rows[r]), (s,), (int(claim[r, s]),)) for r, s in np.argwhere(fits).tolist()]


def _together(search: Search) -> list[GpuAllocation]:
    rows = np.flatnonzero(search.context.bits == 0)
    cards = read_cards(search.context.fleet, rows, search.context.rules)
    allocations: list[GpuAllocation] = []
    for code in range(len(search.context.fleet.types)):
        offer = several(cards, search.context.rules, code)
        for r in offer.count.nonzero()[0].tolist():
            slots = offer.order[r, : offer.count[r]].tolist()
            allocations.append(
                GpuAllocation(int(rows[r]), tuple(slots), tuple(int(offer.claim[r, s]) for s in slots))
            )
    if allocations and search.context.rules.fewest:
        least = min(len(s.slots) for s in allocations)
        allocations = [s for s in allocations if len(s.slots) == least]
    return allocations
