"""Trials: the decision made again on the fleet as it would be, by the code that daemons decide with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Placed
from gpustackd.errors import BadRow
from gpustackd.placement.advice.changes import Change, EditModel, Together, edit_of
from gpustackd.placement.decide import Searches, find
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search import Search
from gpustackd.placement.search_cache import SearchCache

Build = Callable[[ModelSpec], Demand | None]
"""From an edited model to what it then asks; None where the edit makes it unusable."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """An instance that waits too and comes first in the queue."""

    id: int
    name: str
    model_id: int


@dataclass(slots=True)
class TrialCase:
    """A waiting instance, and all that a trial needs. The fleet is changed during a trial and is as before
    after it; whoever owns it must not use it meanwhile."""

    fleet: Fleet
    policy: Policy
    subject: Subject
    demand: Demand
    spec: ModelSpec
    """The model as its row says it (the demand's may have columns filled in)."""
    build: Build
    ahead: Sequence[Ahead] = ()
    """In the order of the queue."""
    behind: Sequence[Ahead] = ()
    """Who comes after it. While an edited model is read anew they may find what else was freed first."""
    demands: Mapping[int, Demand] = field(default_factory=dict)
    """By model id, of those others; who is not in here asks for nothing that anyone knows."""


class Trials:
    """Decides again and again, with results kept for demands that are asked for more than once."""

    def __init__(self, case: TrialCase) -> None:
        self.case = case
        self.count = 0
        """Decisions made."""
        self._memo: Searches = SearchCache(512)
        self._built: dict[int, Demand | None] = {}

    def find(self, demand: Demand) -> Placed | None:
        """A place for the instance on the fleet as it is at this moment."""
        self.count += 1
        try:
            return find(self.case.fleet, demand, self.case.subject, self.case.policy, self._memo)
        except BadRow:
            return None

    def demand(self, change: Change) -> Demand | None:
        """What the instance asks once the change is made; None where its model cannot be used then."""
        edit = edit_of(change)
        if edit is None:
            return self.case.demand
        version = edit.spec.version
        if version not in self._built:
            self._built[version] = self.case.build(edit.spec)
        return self._built[version]

    def alone(self, change: Change) -> Placed | None:
        """Where the instance would go if it were the only one that waits."""
        demand = self.demand(change)
        if demand is None or demand.need.vram is None:
            return None
        with made(change, self.case.fleet):
            found = self.find(demand)
        edit = edit_of(change)
        less_memory = edit is not None and edit.less_memory
        return None if found is None or (less_memory and _tight(demand, found)) else found

    def place(self, change: Change) -> Placed | None:
        """Where the instance would go, after those that come before it took what they can."""
        demand = self.demand(change)
        if demand is None or demand.need.vram is None:
            return None
        case, fleet = self.case, self.case.fleet
        hopeless: set[int] = set()
        taken: list[int] = []
        with made(change, fleet):
            try:
                for other in self._first(change):
                    theirs = demand if other.model_id == demand.spec.id else case.demands.get(other.model_id)
                    if theirs is None or other.model_id in hopeless or other.id in fleet.occupancy.assumed:
                        continue
                    self.count += 1
                    try:
                        found = find(fleet, theirs, Subject(other.id, other.name), case.policy, self._memo)
                    except BadRow:
                        found = None
                    if found is None:
                        hopeless.add(other.model_id)  # less is free for each one after it
                        continue
                    backend = theirs.spec.effective_backend
                    fleet.assume(found.placement, other.id, other.model_id, backend)
                    taken.append(other.id)
                return self.find(demand)
            finally:
                for instance_id in taken:
                    fleet.forget(instance_id)

    def _first(self, change: Change) -> Sequence[Ahead]:
        """Who is tried before the instance once a change is made."""
        case = self.case
        if not isinstance(change, Together):
            return case.ahead
        mine = case.demand.spec.id
        others = [a for a in (*case.ahead, *case.behind) if a.model_id != mine]
        return [*others, *(a for a in case.ahead if a.model_id == mine)]

    @property
    def least_ram(self) -> int:
        """RAM that a worker must have free before it is looked at."""
        return self.case.demand.need.ram

    def search(self, demand: Demand) -> Search | None:
        """The search for a demand, brought up to date; None where the model cannot be used."""
        self.find(demand)
        return next((s for s in self._memo.values() if s.context.demand is demand), None)


class Within(Trials):
    """Trials of a second change where an edit of the model is made already."""

    def __init__(self, trials: Trials, edit: EditModel) -> None:
        super().__init__(trials.case)
        self._memo = trials._memo
        self._built = trials._built
        self._edit = edit

    def alone(self, change: Change) -> Placed | None:
        return super().alone(Together(self._edit, change))


@contextmanager
def made(change: Change, fleet: Fleet) -> Iterator[None]:
    """The fleet with the change, and as before afterwards."""
    undo = change.make(fleet)
    try:
        yield
    finally:
        undo()


def _tight(demand: Demand, found: Placed) -> bool:
    """Whether what is booked holds the model but not one of its longest sequences beside it: the engine may
    then refuse to start, so that such a place is none to be suggested."""
    need = demand.need
    booked = sum(v for p in found.placement.parts for v in p.vram)
    if need.sequence is None or need.vram is None or not booked:
        return False
    return booked - need.vram < need.sequence
