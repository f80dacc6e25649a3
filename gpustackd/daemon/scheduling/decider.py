"""The decision with all that it needs at hand: fleet, policy, kept results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import md5
from time import perf_counter

from gpustackd.daemon.scheduling.demand_mix import DemandMix
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.backends import Backends
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Cure, NoFit, Outcome, Placed, Reason
from gpustackd.domain.paths import Paths
from gpustackd.domain.placement_hints import AvoidedPlace, without_places
from gpustackd.domain.pools import Pools
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.diagnostics.wording import gib
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache

_REMEMBERED = 4096
"""Demands of which the booking was looked at; then they are told of anew."""


def signature(outcome: NoFit) -> str:
    """The refusal as `WaitingInstance.signature` tells it: its codes, then a digest of the text."""
    digest = md5(outcome.message.encode(), usedforsecurity=False).hexdigest()
    return f"{outcome.signature}#{digest}"


def codes(told: str | None) -> str | None:
    """The codes of a signature: equal for refusals that tell the same story with other byte counts."""
    return None if told is None else told.partition("#")[0]


def _failed(demand: Demand, error: Exception) -> NoFit:
    text = f"the search for a place failed on model {demand.spec.name}: {type(error).__name__}: {error}"[
        :1000
    ]
    reason = Reason("search.failed", "fit", text, {"exception": type(error).__name__}, "error")
    return NoFit((reason,), text, Cure.ANY)


class Decider:
    """One per session. Refusals are kept while the fleet stands still: equal demands share the answer."""

    def __init__(self, view: FleetFeed, policy: Policy, reports: Reporter) -> None:
        self._view = view
        self._reports = reports
        self._policy = policy
        self._memo: Searches = SearchCache()
        self._refused: dict[Hashable, NoFit] = {}
        self._looked_at: set[Hashable] = set()
        self._tick = -1
        self.mix: DemandMix | None = None
        """Demands to come, for the strategy that keeps room for them; None = nothing is known of them."""
        self.flowing: set[Hashable] = set()
        """Parked groups of which the last try found a place: the next ones follow."""

    @property
    def files(self) -> Mapping[str, Mapping[int, int]]:
        return self._policy.ready_files

    @files.setter
    def files(self, files: Mapping[str, Mapping[int, int]]) -> None:
        self._policy = replace(self._policy, ready_files=files)
        self._refused.clear()

    def set_pools(self, pools: Pools) -> None:
        """Instance types and cluster inventories as they are now."""
        self._policy = replace(self._policy, pools=pools)
        self._refused.clear()

    def set_paths(self, paths: Paths) -> None:
        """What workers say of the local paths of models."""
        self._policy = replace(self._policy, paths=paths)
        self._refused.clear()

    def set_backends(self, backends: Backends) -> None:
        """Registered inference backends as they are now."""
        self._policy = replace(self._policy, backends=backends)
        self._refused.clear()

    def group(self, demand: Demand) -> Hashable:
        """What demands with the same answer have in common."""
        return (demand.spec.id, demand.spec.version, demand.digest)

    def patience(self, demand: Demand) -> int:
        """Clashes after which the places that clashed are avoided, which costs a search of its own. Under
        `spread` the next try as a rule looks elsewhere by itself: even places take turns."""
        strategy = demand.spec.placement_strategy or self._policy.strategy
        return 3 if strategy is Strategy.SPREAD else 2

    def decide(
        self, demand: Demand, instance_id: int, name: str, avoid: Sequence[AvoidedPlace] = ()
    ) -> tuple[Outcome, float]:
        """The outcome and how long it took (milliseconds). Any place is preferred to those to `avoid`."""
        key = self.group(demand)
        fleet = self._view.fleet
        if fleet.tick != self._tick:
            self._refused.clear()
            self._tick = fleet.tick
        if (kept := self._refused.get(key)) is not None:
            return kept, 0.0
        started = perf_counter()
        policy = self._policy if self.mix is None else self.mix.apply(self._policy, demand)
        if avoid and (found := self.anew(demand, instance_id, name, avoid, holds=False)) is not None:
            return found, (perf_counter() - started) * 1000
        try:
            outcome: Outcome = decide(fleet, demand, Subject(instance_id, name), policy, self._memo)
        except Exception as error:  # one demand that trips the search must not stop the others
            self._reports.unexpected("decision", error, model=demand.spec.name)
            outcome = _failed(demand, error)
        took = (perf_counter() - started) * 1000
        for fault in outcome.faults:
            self._reports.left_out(fault, demand.spec.name)
        if outcome.cut:
            self._reports.search_cut(demand.spec.name, instance_id, took)
        if self.mix is not None and instance_id:
            self.mix.saw(demand)
        if isinstance(outcome, NoFit):
            if not outcome.faults:
                self._refused[key] = outcome
        elif key not in self._looked_at:
            self._look_at(key, demand, outcome)
        return outcome, took

    def _look_at(self, key: Hashable, demand: Demand, placed: Placed) -> None:
        """Say once of a demand where what is booked holds the model, but not one longest sequence with it
        (estimate spec section 4): the engine may then refuse to start."""
        if len(self._looked_at) >= _REMEMBERED:
            self._looked_at.clear()
        self._looked_at.add(key)
        booked = sum(v for p in placed.placement.parts for v in p.vram)
        need = demand.need
        if not booked or need.sequence is None or need.vram is None or booked - need.vram >= need.sequence:
            return
        text = (
            f"{gib(booked)} are booked, {gib(need.vram)} of it for the model; one sequence of its"
            f" longest length takes {gib(need.sequence)} of cache: set a shorter maximum"
            " length, or give it more memory"
        )
        self._reports.event("warning", "placement.tight", model=demand.spec.name, reason=text)

    def anew(
        self,
        demand: Demand,
        instance_id: int,
        name: str,
        avoid: Sequence[AvoidedPlace],
        *,
        holds: bool = True,
    ) -> Placed | None:
        """A place other than those to avoid, if there is one; what the instance holds now counts as free."""
        fleet = without_places(self._view.fleet, avoid) if avoid else self._view.fleet
        try:
            outcome = decide(fleet, demand, Subject(instance_id, name, leave_out=holds), self._policy)
        except Exception as error:
            self._reports.unexpected("decision", error, model=demand.spec.name)
            return None
        return outcome if isinstance(outcome, Placed) else None

    def probe(self, demand: Demand) -> Outcome:
        """Whether anything of this demand fits now; nothing is assumed."""
        return self.decide(demand, 0, "")[0]
