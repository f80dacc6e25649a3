"""The decision with all that it needs at hand: fleet, policy, kept results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from hashlib import md5
from time import perf_counter

from gpustackd.daemon.reports import Reports
from gpustackd.daemon.view import View
from gpustackd.domain.backends import Backends
from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import Cure, NoFit, Outcome, Reason
from gpustackd.domain.paths import Paths
from gpustackd.domain.pools import Pools
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.memo import Memo
from gpustackd.placement.policy import Policy, Subject


def signature(outcome: NoFit) -> str:
    """The refusal as `Waiting.signature` tells it: its codes, then a digest of the text."""
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


class Judge:
    """One per session. Refusals are kept while the fleet stands still: equal demands share the answer."""

    def __init__(self, view: View, policy: Policy, reports: Reports) -> None:
        self._view = view
        self._reports = reports
        self._policy = policy
        self._memo: Searches = Memo()
        self._refused: dict[Hashable, NoFit] = {}
        self._tick = -1
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

    def decide(self, demand: Demand, instance_id: int, name: str) -> tuple[Outcome, float]:
        """The outcome and how long it took (milliseconds)."""
        key = self.group(demand)
        fleet = self._view.fleet
        if fleet.tick != self._tick:
            self._refused.clear()
            self._tick = fleet.tick
        if (kept := self._refused.get(key)) is not None:
            return kept, 0.0
        started = perf_counter()
        try:
            outcome: Outcome = decide(fleet, demand, Subject(instance_id, name), self._policy, self._memo)
        except Exception as error:  # one demand that trips the search must not stop the others
            self._reports.unexpected("decision", error, model=demand.spec.name)
            outcome = _failed(demand, error)
        took = (perf_counter() - started) * 1000
        if isinstance(outcome, NoFit):
            self._refused[key] = outcome
        return outcome, took

    def probe(self, demand: Demand) -> Outcome:
        """Whether anything of this demand fits now; nothing is assumed."""
        return self.decide(demand, 0, "")[0]
