"""The smallest changes that would make a waiting instance fit: ideas of every kind, each checked, ranked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.outcome import Placed
from gpustackd.placement.advice import fleet_edits as fleets
from gpustackd.placement.advice.changes import Change, ChangeKind, EditModel, Holder, Together
from gpustackd.placement.advice.model_edits import Editor, shares
from gpustackd.placement.advice.near_miss import NearMiss, nearest, ranked, too_small
from gpustackd.placement.advice.trials import TrialCase, Trials, Within
from gpustackd.placement.search import Search

MOST = 12
"""Suggestions in an answer."""
OF_A_KIND: Mapping[ChangeKind, int] = {
    ChangeKind.OPEN_GPUS: 3,
    ChangeKind.READY_WORKER: 3,
    ChangeKind.STOP_INSTANCES: 3,
    ChangeKind.ADD_GPU: 2,
    ChangeKind.ADD_WORKER: 1,
}
"""Alternatives of one kind; of a family of edits only the smallest is suggested."""
CHEAP = 5.0
"""With a suggestion below this cost nobody looks for two changes at once."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change that was checked by a decision, and where the instance would then go."""

    change: Change
    placed: Placed

    def as_json(self) -> dict[str, Any]:
        parts = [
            {"worker": p.worker_name, "gpu_type": p.gpu_type, "gpu_indexes": list(p.gpu_indexes)}
            for p in self.placed.placement.parts
        ]
        return {"cost": round(self.change.cost, 4), "kind": self.change.kind.value, "text": self.change.text,
                "change": self.change.as_json(), "placement": parts}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Advice:
    """What is known of a waiting instance besides the refusal."""

    suggestions: tuple[Suggestion, ...] = ()
    """The cheapest first."""
    misses: tuple[NearMiss, ...] = ()
    """The nearest first."""
    decisions: int = 0
    """How many were made for it."""


@dataclass(slots=True)
class _Found:
    """Ideas that worked, with as many of a kind as are suggested."""

    trials: Trials
    kept: list[Suggestion] = field(default_factory=list)

    def take(self, ideas: Iterable[Change], most: int) -> int:
        """Verify ideas, in queue order with all that waits, until `most` of them work; returns how many."""
        n = 0
        for change in ideas:
            placed = self.trials.place(change)
            if placed is not None:
                self.kept.append(Suggestion(change, placed))
                n += 1
                if n >= most:
                    break
        return n


def advise(case: TrialCase, holders: Mapping[int, Holder], priority: int = 0) -> Advice:
    """Search for what would help an instance that has no place. `holders`: who may be named as giving way,
    by instance id; `priority` is the waiting instance's. The fleet is as before when this returns.

    Raises nothing for a model that cannot be used: then only edits of it are tried.
    """
    trials = Trials(case)
    search = trials.search(case.demand) if case.demand.need.vram is not None else None
    found = _Found(trials)
    editor = Editor(case.spec, case.demand)
    order: dict[int, int] = {}
    misses: list[NearMiss] = []
    if search is not None:
        order = ranked(search)
        misses = nearest(trials, list(order)) or too_small(search)
    for family in _families(editor, search):
        found.take(_worth(trials, family), 1)
    if search is not None:
        for kind, ideas in _of_the_fleet(trials, search, order, holders, priority):
            found.take(ideas, OF_A_KIND[kind])
        if not any(s.change.cost < CHEAP for s in found.kept):
            found.take(_pairs(trials, editor, holders, priority), 3)
    kept = sorted(found.kept, key=lambda s: (s.change.cost, s.change.text))
    return Advice(tuple(kept[:MOST]), tuple(misses), trials.count)


def _families(editor: Editor, search: Search | None) -> Iterator[list[EditModel]]:
    """Edits of the same thing, the smallest first."""
    ideas = [*editor.parallel(), *editor.length(), *editor.offload(), *editor.selectors()]
    if search is not None:
        ideas += shares(search, editor)
    by_family: dict[str, list[EditModel]] = {}
    for idea in ideas:
        by_family.setdefault(idea.family, []).append(idea)
    for family in by_family.values():
        yield sorted(family, key=lambda e: e.cost)


def _worth(trials: Trials, ideas: Iterable[EditModel]) -> Iterator[EditModel]:
    """Edits with which the instance would fit if it were alone; one that changes neither what is asked nor
    of whom is not tried."""
    for idea in ideas:
        demand = trials.demand(idea)
        if demand is None or (idea.family == "length" and _same(demand, trials.case.demand)):
            continue
        if trials.alone(idea) is not None:
            yield idea


def _same(one: Demand, other: Demand) -> bool:
    return one.engine is other.engine and one.engine is not Engine.GGUF and one.need.vram == other.need.vram


def _of_the_fleet(
    trials: Trials,
    search: Search,
    lacking: Mapping[int, int],
    holders: Mapping[int, Holder],
    priority: int,
) -> Iterator[tuple[ChangeKind, Iterable[Change]]]:
    order = list(lacking)
    yield ChangeKind.OPEN_GPUS, fleets.open_gpus(trials, search, order)
    yield ChangeKind.READY_WORKER, fleets.ready_workers(trials, search)
    yield ChangeKind.STOP_INSTANCES, fleets.stops(trials, search, lacking, holders, priority)
    yield ChangeKind.ADD_GPU, fleets.more_gpus(trials, search, order)
    yield ChangeKind.ADD_WORKER, fleets.more_workers(trials, search, order)


def _pairs(trials: Trials, editor: Editor, holders: Mapping[int, Holder], priority: int) -> Iterator[Change]:
    """Two changes at once: an edit that looks at other workers or asks for less, and one of the fleet."""
    edits = [*editor.selectors(), *editor.parallel(), *editor.offload()]
    found: list[Together] = []
    for edit in edits[:10]:
        demand = trials.demand(edit)
        if demand is None or demand.need.vram is None:
            continue
        search = trials.search(demand)
        if search is None:
            continue
        within = Within(trials, edit)
        lacking = dict(islice(ranked(search).items(), 4))
        order = list(lacking)
        for ideas in (
            fleets.open_gpus(within, search, order),
            fleets.ready_workers(within, search),
            fleets.stops(within, search, lacking, holders, priority),
        ):
            found.extend(Together(edit, second) for second in islice(ideas, 1))
    yield from sorted(found, key=lambda t: t.cost)
