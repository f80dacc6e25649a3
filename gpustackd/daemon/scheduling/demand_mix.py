"""The mix of demands as this replica knows it: what waits in its queue, what it decided on, what stood there.

Only the strategy `fragmentation` asks for it. A mix has all its costs worked out anew, so one is kept until
it differs enough from what is there now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.errors import BadRow
from gpustackd.placement.mix import DemandShape, Mix
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.scoring.demand_mix import distance, mix, shape
from gpustackd.ports import WaitingInstance

LOOK = 0.25
"""Seconds between two looks at what waits."""
DIFFERENT = 0.1
"""Distance (0..1) from which on another mix is taken over."""
REMEMBERED = 1024
"""Decisions after which those made before count half."""


class DemandMix:
    """`apply` before a decision, `saw` after it."""

    def __init__(
        self,
        view: FleetFeed,
        catalogue: ModelCatalog,
        rows: Mapping[int, WaitingInstance],
        clock: Callable[[], float],
    ) -> None:
        self._view = view
        self._catalogue = catalogue
        self._rows = rows
        self._clock = clock
        self._seen: Counter[DemandShape] = Counter()
        self._count = 0
        self._shapes: dict[Hashable, DemandShape | None] = {}
        self._mix: Mix | None = None
        self._next = 0.0
        self._applied: tuple[Policy, Mix, Policy] | None = None

    def apply(self, policy: Policy, demand: Demand) -> Policy:
        """The policy with the mix in it, where the demand's strategy asks for one."""
        if (demand.spec.placement_strategy or policy.strategy) is not Strategy.FRAGMENTATION:
            return policy
        found = self._current()
        kept = self._applied
        if kept is not None and kept[0] is policy and kept[1] is found:
            return kept[2]
        with_mix = replace(policy, mix=found)
        self._applied = (policy, found, with_mix)
        return with_mix

    def saw(self, demand: Demand) -> None:
        """An instance of this demand was decided on."""
        kind = self._shape(demand)
        if kind is None:
            return
        self._seen[kind] += 1
        self._count += 1
        if self._count > REMEMBERED:
            self._seen = Counter({k: n // 2 for k, n in self._seen.items() if n > 1})
            self._count = self._seen.total()

    def _current(self) -> Mix:
        now = self._clock()
        if self._mix is not None and now < self._next:
            return self._mix
        self._next = now + LOOK
        if self._mix is None:
            self._seen.update(placed(self._view))
        found = mix(self._waiting(), self._seen)
        if self._mix is None or distance(found, self._mix) > DIFFERENT:
            self._mix = found
        return self._mix

    def _waiting(self) -> dict[DemandShape, float]:
        counts = Counter(row.model_id for row in self._rows.values())
        found: dict[DemandShape, float] = {}
        for model_id, n in counts.items():
            demand = self._catalogue.last(model_id)
            kind = self._shape(demand) if demand is not None else None
            if kind is not None:
                found[kind] = found.get(kind, 0.0) + n
        return found

    def _shape(self, demand: Demand) -> DemandShape | None:
        largest = self._view.fleet.largest[0]
        key = (demand.spec.id, demand.spec.version, demand.digest, largest)
        if key not in self._shapes:
            if len(self._shapes) >= REMEMBERED:
                self._shapes.clear()
            try:
                self._shapes[key] = shape(rules_of(demand), largest)
            except BadRow:
                self._shapes[key] = None
        return self._shapes[key]


def placed(view: FleetFeed) -> Counter[DemandShape]:
    """What stands on the fleet already: the part with the most GPUs of every instance."""
    found: Counter[DemandShape] = Counter()
    for bookings in view.fleet.occupancy.by_instance.values():
        on: dict[int, list[int]] = {}
        for b in bookings:
            if b.gpu_id is not None:
                on.setdefault(b.worker_id, []).append(b.vram)
        if on:
            most = max(on.values(), key=len)
            found[DemandShape(len(most), -(-sum(most) // len(most)))] += 1
    return found
