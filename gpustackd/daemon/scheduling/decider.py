"""The decision with all that it needs at hand: fleet, policy, results kept from the last ones."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import md5
from time import perf_counter

from gpustackd.daemon.scheduling.demand_mix import DemandMix
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.reporter import DecisionReporter
from gpustackd.domain.backends import Backends
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Cure, NoFit, Outcome, Placed, Reason
from gpustackd.domain.placement_hints import AvoidedPlace, without_places
from gpustackd.domain.pools import Pools
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.diagnostics.wording import gib
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache

_REMEMBERED = 4096
"""Demands whose booking was checked; beyond that they are checked, and logged, anew."""


def signature(outcome: NoFit) -> str:
    """The refusal as `WaitingInstance.signature` has it: its codes, then a digest of the text."""
    digest = md5(outcome.message.encode(), usedforsecurity=False).hexdigest()
    return f"{outcome.signature}#{digest}"


def codes(signature: str | None) -> str | None:
    """The codes of a signature: equal for refusals that differ in byte counts alone."""
    return None if signature is None else signature.partition("#")[0]


def _failed(demand: Demand, error: Exception) -> NoFit:
    text = f"the search for a place failed on model {demand.spec.name}: {type(error).__name__}: {error}"[
        :1000
    ]
    reason = Reason("search.failed", "fit", text, {"exception": type(error).__name__}, "error")
    return NoFit((reason,), text, Cure.ANY)


class Decider:
    """One per session. Refusals are kept while nothing changes: equal demands share the answer."""

    def __init__(
        self,
        fleet_feed: FleetFeed,
        path_probe: PathProbe,
        policy: Policy,
        reporter: DecisionReporter,
        mix: DemandMix | None = None,
    ) -> None:
        """`mix`: demands to come, for the strategy that keeps room for them; None = nothing is known."""
        self._fleet_feed = fleet_feed
        self._path_probe = path_probe
        self._policy = replace(policy, paths=path_probe.paths)
        self._reporter = reporter
        self._mix = mix
        self._memo: Searches = SearchCache()
        self._refused: dict[Hashable, NoFit] = {}
        self._checked: set[Hashable] = set()
        self._tick = -1

    @property
    def policy(self) -> Policy:
        """What decisions are given now."""
        if self._policy.paths is not self._path_probe.paths:
            self._policy = replace(self._policy, paths=self._path_probe.paths)
            self._refused.clear()
        return self._policy

    def update(self, ready_files: Mapping[str, Mapping[int, int]], pools: Pools, backends: Backends) -> None:
        """Model files, instance types and inference backends as they are now."""
        self._policy = replace(self._policy, ready_files=ready_files, pools=pools, backends=backends)
        self._refused.clear()

    def group(self, demand: Demand) -> Hashable:
        """What demands with the same answer have in common."""
        return (demand.spec.id, demand.spec.version, demand.digest)

    def conflicts_before_avoiding(self, demand: Demand) -> int:
        """Conflicts after which the places that conflicted are avoided, which costs a search of its own.
        Under `spread` the next try as a rule looks elsewhere by itself: even places take turns."""
        strategy = demand.spec.placement_strategy or self._policy.strategy
        return 3 if strategy is Strategy.SPREAD else 2

    def decide(
        self, demand: Demand, instance_id: int, name: str, avoid: Sequence[AvoidedPlace] = ()
    ) -> tuple[Outcome, float]:
        """The outcome and how long it took (milliseconds). Any place is preferred to those to `avoid`."""
        key = self.group(demand)
        fleet, policy = self._fleet_feed.fleet, self.policy
        if fleet.tick != self._tick:
            self._refused.clear()
            self._tick = fleet.tick
        if (kept := self._refused.get(key)) is not None:
            return kept, 0.0
        started = perf_counter()
        if self._mix is not None:
            policy = self._mix.apply(policy, demand)
        if avoid:
            other = self.find_other_place(demand, instance_id, name, avoid, holds=False)
            if other is not None:
                return other, (perf_counter() - started) * 1000
        try:
            outcome: Outcome = decide(fleet, demand, Subject(instance_id, name), policy, self._memo)
        except Exception as error:  # one demand that trips the search must not stop the others
            self._reporter.unexpected("decision", error, model=demand.spec.name)
            outcome = _failed(demand, error)
        took = (perf_counter() - started) * 1000
        for fault in outcome.faults:
            self._reporter.stage_failed(fault, demand.spec.name)
        if outcome.cut:
            self._reporter.search_cut(demand.spec.name, instance_id, took)
        if self._mix is not None and instance_id:
            self._mix.saw(demand)
        if isinstance(outcome, NoFit):
            if not outcome.faults:
                self._refused[key] = outcome
        elif key not in self._checked:
            self._check_sequence(key, demand, outcome)
        return outcome, took

    def find_other_place(
        self,
        demand: Demand,
        instance_id: int,
        name: str,
        avoid: Sequence[AvoidedPlace],
        *,
        holds: bool = True,
    ) -> Placed | None:
        """A place other than those to avoid, if there is one. `holds`: what the instance has now counts as
        free."""
        fleet = without_places(self._fleet_feed.fleet, avoid) if avoid else self._fleet_feed.fleet
        try:
            outcome = decide(fleet, demand, Subject(instance_id, name, leave_out=holds), self.policy)
        except Exception as error:
            self._reporter.unexpected("decision", error, model=demand.spec.name)
            return None
        return outcome if isinstance(outcome, Placed) else None

    def probe(self, demand: Demand) -> Outcome:
        """Whether anything of this demand fits now; nothing is assumed."""
        return self.decide(demand, 0, "")[0]

    def _check_sequence(self, key: Hashable, demand: Demand, placed: Placed) -> None:
        """Log once of a demand where what is booked holds the model, but not one longest sequence with it:
        the engine may then refuse to start."""
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked.add(key)
        booked = sum(v for p in placed.placement.parts for v in p.vram)
        need = demand.need
        if not booked or need.sequence is None or need.vram is None or booked - need.vram >= need.sequence:
            return
        text = (
            f"{gib(booked)} are booked, {gib(need.vram)} of it for the model; one sequence of its maximum"
            f" length takes {gib(need.sequence)} of KV cache: set a shorter maximum length, or give it more"
            " memory"
        )
        self._reporter.event("warning", "placement.tight", model=demand.spec.name, reason=text)
