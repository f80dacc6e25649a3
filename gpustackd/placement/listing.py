"""All candidates of the first step that has any, in the order of the spec; the same steps, listed out.

Compatibility mode decides on this list. Otherwise it serves tests and people who ask what there was.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpustackd.domain.fleet.fleet import Ints
from gpustackd.placement.as_given import types, walk
from gpustackd.placement.engine_steps import EngineStep
from gpustackd.placement.fit.seat import Choice, Seat
from gpustackd.placement.hand_picked import HandPicked
from gpustackd.placement.over_workers import OverWorkers
from gpustackd.placement.search import Search
from gpustackd.placement.tiers import CpuOnly, ManyGpus, OneGpu


def choices(search: Search) -> list[Choice]:
    """Every candidate of the first step that has one, not scored yet."""
    search.refresh()
    rows = walk(search.fleet, search.bits == 0, search.rules)
    for step in search.ladder:
        if isinstance(step, HandPicked):
            return step.choices(0)
        found = [Choice(seats, step.step) for seats in _seats(search, step, rows)]
        if found and isinstance(step, ManyGpus) and search.rules.fewest:
            least = min(len(c.seats[0].slots) for c in found)
            found = [c for c in found if len(c.seats[0].slots) == least]
        if found:
            return found
    return []


def _seats(search: Search, step: object, rows: Ints) -> Iterator[tuple[Seat, ...]]:
    if isinstance(step, EngineStep):
        yield from step.listing(rows)
        return
    if isinstance(step, CpuOnly):
        yield from ((seat,) for seat in step.listing(rows))
        return
    if isinstance(step, OverWorkers) and not search.rules.compat:
        best = step.choose(0)
        if best is not None:
            yield best.seats
        return
    for code in types(search.fleet, rows):
        if isinstance(step, (OneGpu, ManyGpus)):
            for seat in step.listing(rows, code):
                yield (seat,)
        elif isinstance(step, OverWorkers):
            yield from step.listing(rows, code)
