"""Orders of the queue: by priority and age, or the largest first within a priority (`decreasing`).

For the second one an instance's size must be known when it enters the queue, so what is inserted together is
gathered for a moment. In either, several models of a burst that nobody read yet are read before they enter
the queue, for a little while, so that their instances are decided in the queue's order and not in that of the
reading. Those that take longer come last, and what is known does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from enum import StrEnum

import anyio
from anyio.abc import TaskGroup

from gpustackd.daemon.queue.lanes import QueuedInstance, WakeOrigin
from gpustackd.daemon.queue.wakeups import WakeupBatch, Wakeups
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.errors import BadRow
from gpustackd.placement.rules.registry import rules_of
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
REMEMBERED = 4096


class QueueOrder(StrEnum):
    """Which of the waiting instances is decided first (setting `queue_order`)."""

    PRIORITY = "priority"
    DECREASING = "decreasing"


class QueueRanks:
    """What ranks instances besides their priority and age; `strategy` is that of models that name none. With
    `priority` all sizes are 0."""

    def __init__(
        self, order: QueueOrder, strategy: Strategy, *, catalogue: ModelCatalog, view: FleetFeed
    ) -> None:
        self._strategy = strategy
        self.decreasing = order is QueueOrder.DECREASING
        self._catalogue = catalogue
        self._view = view
        self._sizes: dict[Hashable, int] = {}

    def size(self, model_id: int) -> int:
        """Bytes that an instance of this model would take of the largest cards; 0 = not known, or of no
        matter."""
        if not self.decreasing:
            return 0
        demand = self._catalogue.demand(model_id) or self._catalogue.last(model_id)
        if not isinstance(demand, Demand):
            return 0
        largest = self._view.fleet.largest[0]
        key = (demand.spec.id, demand.spec.version, demand.digest, largest)
        if key not in self._sizes:
            if len(self._sizes) >= REMEMBERED:
                self._sizes.clear()
            try:
                self._sizes[key] = magnitude(rules_of(demand), largest)
            except BadRow:
                self._sizes[key] = 0
        return self._sizes[key]

    def batch(self, model_id: int) -> int:
        """What instances of one age are sorted by before their ids. Under `spread` it matters little who of a
        burst comes first, and equal ones in a row are quick; the other strategies keep the order of ids."""
        record = self._catalogue.record(model_id)
        spec = record.spec if record is not None else None
        strategy = (spec.placement_strategy if spec is not None else None) or self._strategy
        return model_id if strategy is Strategy.SPREAD else 0

    def rank(self, w: WaitingInstance) -> tuple[float, ...]:
        """Where an instance that waits stands in the queue, once its model is known: lowest first."""
        size, batch = self.size(w.model_id), self.batch(w.model_id)
        return QueuedInstance(
            w.id, w.model_id, w.priority, w.created_at.timestamp(), WakeOrigin.NOTIFY, 0, size, batch
        ).rank


class QueueOrdering(QueueRanks):
    """What an order needs to know of instances that come in."""

    def __init__(
        self,
        order: QueueOrder,
        strategy: Strategy,
        *,
        catalogue: ModelCatalog,
        view: FleetFeed,
        gathering: Wakeups,
        paths: PathProbe,
        tasks: TaskGroup,
        clock: Callable[[], float],
        reports: Reporter,
    ) -> None:
        super().__init__(order, strategy, catalogue=catalogue, view=view)
        self._gathering = gathering
        self._paths = paths
        self._tasks = tasks
        self._clock = clock
        self._reports = reports
        self._patient_again = 0.0

    async def burst(self, news: WakeupBatch) -> None:
        """Wait until no further instance comes, and add what came to `news`."""
        if not self.decreasing or not news.created:
            return
        end = self._clock() + LONGEST
        while self._clock() < end:
            await anyio.sleep(QUIET)
            more = self._gathering.take()
            if not news.add(more):
                return

    async def unread(self, model_ids: Collection[int]) -> set[int]:
        """Of these models those whose instances may wait for a moment: several that nobody read yet. One that
        is known waits for nobody, but where sizes decide who comes first."""
        await self._catalogue.load(model_ids)
        unknown = {m for m in model_ids if self._unknown(m)}
        if self.decreasing:
            return set(model_ids) if unknown else unknown
        if len(unknown) < 2 or self._clock() < self._patient_again:
            return set()
        return unknown

    async def read(self, model_ids: Collection[int]) -> None:
        """Read what these models are made of, for a little while; reading goes on behind."""
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
            self._reports.event("info", "model.slow", count=len(left))

    def _unknown(self, model_id: int) -> bool:
        """Whether a decision would have to wait for what this model asks, or for workers to say whether they
        have its path; facts that have aged do, where sizes do not matter."""
        if self._catalogue.demand(model_id) is None:
            return self.decreasing or self._catalogue.last(model_id) is None
        record = self._catalogue.record(model_id)
        return record is not None and record.spec is not None and not self._paths.current(record.spec)

    async def _read(self, model_id: int, left: set[int], done: anyio.Event) -> None:
        try:
            await self._catalogue.read(model_id)
            record = self._catalogue.record(model_id)
            if record is not None and record.spec is not None:
                await self._paths.look(record.spec)
        finally:
            left.discard(model_id)
            if not left:
                done.set()
