"""The mix of demands as this replica knows it: what waits in its queue, what it decided on, what is placed.

Only the strategy `fragmentation` asks for it. A mix has all its costs worked out anew, so one is kept until
it differs enough from what is there now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from gpustackd.daemon.scheduling.demand_cache import DemandCache
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.mix import DemandShape, Mix
from gpustackd.placement.policy import Policy
from gpustackd.placement.scoring.demand_mix import distance, mix, shape

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
        fleet_feed: FleetFeed,
        catalog: ModelCatalog,
        waiting: Callable[[], Mapping[int, int]],
        clock: Callable[[], float],
    ) -> None:
        """`waiting` gives the number of instances that wait by model id."""
        self._fleet_feed = fleet_feed
        self._catalog = catalog
        self._waiting_by_model = waiting
        self._clock = clock
        self._seen: Counter[DemandShape] = Counter()
        self._count = 0
        self._shapes: DemandCache[DemandShape | None] = DemandCache(fleet_feed, shape, None)
        self._mix: Mix | None = None
        self._next = 0.0
        self._applied: tuple[Policy, Mix, Policy] | None = None

    def apply(self, policy: Policy, demand: Demand) -> Policy:
        """The policy with the mix in it, where the demand's strategy asks for one."""
        if (demand.spec.placement_strategy or policy.strategy) is not Strategy.FRAGMENTATION:
            return policy
        current = self._current()
        applied = self._applied
        if applied is not None and applied[0] is policy and applied[1] is current:
            return applied[2]
        with_mix = replace(policy, mix=current)
        self._applied = (policy, current, with_mix)
        return with_mix

    def saw(self, demand: Demand) -> None:
        """An instance of this demand was decided on."""
        decided = self._shapes.get(demand)
        if decided is None:
            return
        self._seen[decided] += 1
        self._count += 1
        if self._count > REMEMBERED:
            self._seen = Counter({s: n // 2 for s, n in self._seen.items() if n > 1})
            self._count = self._seen.total()

    def _current(self) -> Mix:
        now = self._clock()
        if self._mix is not None and now < self._next:
            return self._mix
        self._next = now + LOOK
        if self._mix is None:
            self._seen.update(placed_shapes(self._fleet_feed))
        now_mix = mix(self._waiting(), self._seen)
        if self._mix is None or distance(now_mix, self._mix) > DIFFERENT:
            self._mix = now_mix
        return self._mix

    def _waiting(self) -> dict[DemandShape, float]:
        shapes: dict[DemandShape, float] = {}
        for model_id, n in self._waiting_by_model().items():
            demand = self._catalog.last_demand(model_id)
            wanted = self._shapes.get(demand) if demand is not None else None
            if wanted is not None:
                shapes[wanted] = shapes.get(wanted, 0.0) + n
        return shapes


def placed_shapes(fleet_feed: FleetFeed) -> Counter[DemandShape]:
    """What is placed on the fleet already: the part with the most GPUs of every instance."""
    shapes: Counter[DemandShape] = Counter()
    for bookings in fleet_feed.fleet.occupancy.by_instance.values():
        by_worker: dict[int, list[int]] = {}
        for b in bookings:
            if b.gpu_id is not None:
                by_worker.setdefault(b.worker_id, []).append(b.vram)
        if by_worker:
            largest = max(by_worker.values(), key=len)
            shapes[DemandShape(len(largest), -(-sum(largest) // len(largest)))] += 1
    return shapes
