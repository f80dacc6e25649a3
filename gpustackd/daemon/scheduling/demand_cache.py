"""What is worked out once for a demand, for as long as the largest GPU of the fleet stays the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.domain.demand import Demand
from gpustackd.errors import BadRow
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.rules.resource_rules import ResourceRules

T = TypeVar("T")

REMEMBERED = 4096
"""Demands; beyond that all are forgotten."""


class DemandCache(Generic[T]):
    """`compute(rules, bytes of the largest GPU)`; `default` where the demand has no usable rules."""

    def __init__(self, fleet_feed: FleetFeed, compute: Callable[[ResourceRules, int], T], default: T) -> None:
        self._fleet_feed = fleet_feed
        self._compute = compute
        self._default = default
        self._known: dict[Hashable, T] = {}

    def get(self, demand: Demand) -> T:
        """The value for a demand."""
        largest = self._fleet_feed.fleet.largest[0]
        key = (demand.spec.id, demand.spec.version, demand.digest, largest)
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            try:
                self._known[key] = self._compute(rules_of(demand), largest)
            except BadRow:
                self._known[key] = self._default
        return self._known[key]
