"""Orders of the queue: by priority and age, or the largest first within a priority (`decreasing`).

For the second one an instance's size must be known when it enters the queue, so instances that are inserted
together are collected for a moment. In either, several models of a burst that nobody read yet are read before
they enter the queue, for a little while, so that their instances are decided in the queue's order and not in
that of the reads. Those that take longer come last, and what is known does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum

import anyio

from gpustackd.daemon.queue.lanes import QueuedInstance, WakeOrigin
from gpustackd.daemon.queue.wakeups import WakeupBatch, Wakeups
from gpustackd.daemon.scheduling.demand_cache import DemandCache
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.service import BackgroundTasks
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.scoring.demand_mix import magnitude
from gpustackd.ports import WaitingInstance

QUIET = 0.04
"""Seconds without a further instance that end a burst."""
LONGEST = 0.2
"""Seconds after which a burst is taken as it is."""
PATIENCE = 0.5
"""Seconds that models are read for before their instances enter the queue."""
IMPATIENT = 10.0
"""Seconds for which nobody waits again, after files took longer than that."""
AT_ONCE = 64


class QueueOrder(StrEnum):
    """Which of the waiting instances is decided first (setting `queue_order`)."""

    PRIORITY = "priority"
    DECREASING = "decreasing"


class QueueRanks:
    """What ranks instances besides their priority and age. With `priority` all sizes are 0."""

    def __init__(
        self, order: QueueOrder, strategy: Strategy, catalog: ModelCatalog, fleet_feed: FleetFeed
    ) -> None:
        """`strategy` is that of models that name none."""
        self.decreasing = order is QueueOrder.DECREASING
        self._strategy = strategy
        self._catalog = catalog
        self._sizes = DemandCache(fleet_feed, magnitude, 0)

    def size(self, model_id: int) -> int:
        """Bytes that an instance of this model would take of the largest GPUs; 0 = not known, or of no
        matter."""
        if not self.decreasing:
            return 0
        demand = self._catalog.demand(model_id) or self._catalog.last_demand(model_id)
        if not isinstance(demand, Demand):
            return 0
        return self._sizes.get(demand)

    def batch(self, model_id: int) -> int:
        """What instances of one age are sorted by before their ids. Under `spread` it matters little which of
        a burst comes first, and equal ones in a row are quick; the other strategies keep the order of ids."""
        spec = self._catalog.spec(model_id)
        strategy = (spec.placement_strategy if spec is not None else None) or self._strategy
        return model_id if strategy is Strategy.SPREAD else 0

    def rank(self, row: WaitingInstance) -> tuple[float, ...]:
        """Where an instance that waits stands in the queue, once its model is known: lowest first."""
        size, batch = self.size(row.model_id), self.batch(row.model_id)
        created = row.created_at.timestamp()
        return QueuedInstance(
            row.id, row.model_id, row.priority, created, WakeOrigin.NOTIFY, 0, size, batch
        ).rank


class QueueOrdering:
    """Holds new instances back for the moment that their order takes to become known."""

    def __init__(
        self,
        ranks: QueueRanks,
        *,
        catalog: ModelCatalog,
        wakeups: Wakeups,
        tasks: BackgroundTasks,
        clock: Callable[[], float],
        reporter: Reporter,
    ) -> None:
        self.ranks = ranks
        self._catalog = catalog
        self._wakeups = wakeups
        self._tasks = tasks
        self._clock = clock
        self._reporter = reporter
        self._patient_again = 0.0

    async def collect_burst(self, news: WakeupBatch) -> None:
        """Wait until no further instance comes, and add what came to `news`."""
        if not self.ranks.decreasing or not news.created:
            return
        end = self._clock() + LONGEST
        while self._clock() < end:
            await anyio.sleep(QUIET)
            if not news.add(self._wakeups.take()):
                return

    async def unread(self, model_ids: Collection[int]) -> set[int]:
        """Of these models those whose instances may wait for a moment: several that nobody read yet. One that
        is known waits for nobody, but where sizes decide which comes first."""
        await self._catalog.load(model_ids)
        unknown = {m for m in model_ids if self._unknown(m)}
        if self.ranks.decreasing:
            return set(model_ids) if unknown else unknown
        if len(unknown) < 2 or self._clock() < self._patient_again:
            return set()
        return unknown

    async def read(self, model_ids: Collection[int]) -> None:
        """Read what these models are made of, for a little while; reading goes on in the background."""
        left = {m for m in sorted(model_ids)[:AT_ONCE] if self._unknown(m)}
        if not left:
            return
        done = anyio.Event()
        for model_id in sorted(left):
            self._tasks.start_soon(self._read, model_id, left, done)
        with anyio.move_on_after(PATIENCE):
            await done.wait()
        if left:
            self._patient_again = self._clock() + IMPATIENT
            self._reporter.event("info", "model.slow", count=len(left))

    def _unknown(self, model_id: int) -> bool:
        """Whether a decision would have to wait for what this model asks, or for workers to say whether they
        have its path; facts that have aged will do, where sizes do not matter."""
        return not self._catalog.is_ready(model_id, aged=not self.ranks.decreasing)

    async def _read(self, model_id: int, left: set[int], done: anyio.Event) -> None:
        try:
            await self._catalog.prepare(model_id)
        finally:
            left.discard(model_id)
            if not left:
                done.set()
