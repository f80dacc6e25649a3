"""What a daemon would know at this moment, and the decision that it would make of it; nothing is written.

`plan` and `explain` stand on this: the same view, catalogue, judge and policy as in a session, over a store
that is one moment of the database, or a copy of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from time import monotonic

import anyio

from gpustackd.daemon.queue.ordering import QueueOrder, QueueRanks
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.demand_mix import DemandMix
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog, refusal
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.whatif.silent_reporter import SilentReporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.placement.policy import Policy
from gpustackd.placement.preferences import PREFER_DRAFT_WEIGHTS
from gpustackd.ports import ModelReader, ModelRecord, Store, WaitingInstance

AT_ONCE = 16
"""Models read at the same time."""
_LATE = "model.late"


class Snapshot:
    """Fleet, policy and models of one moment. Build it with `await Standing.of(…)`."""

    def __init__(
        self,
        store: Store,
        reader: ModelReader,
        policy: Policy,
        around: FileLocations,
        paths: PathProbe,
        order: QueueOrder = QueueOrder.PRIORITY,
    ) -> None:
        self.store = store
        self.policy = policy
        self.reports = SilentReporter()
        self._around = around
        self._paths = paths
        self.view = FleetFeed(store)
        draft = PREFER_DRAFT_WEIGHTS in policy.prefer
        self.catalogue = ModelCatalog(store, reader, self.reports, monotonic, count_draft=draft)
        self.judge = Decider(self.view, policy, self.reports)
        self._ranks = QueueRanks(order, policy.strategy, catalogue=self.catalogue, view=self.view)

    @classmethod
    async def of(
        cls,
        store: Store,
        reader: ModelReader,
        policy: Policy,
        around: FileLocations,
        paths: PathProbe,
        *,
        order: QueueOrder = QueueOrder.PRIORITY,
        foreign: Mapping[int, int] | None = None,
    ) -> Snapshot:
        """Read the fleet, files, pools and backends. `foreign`: bytes that others hold, by GPU id, where that
        counts. Raises DatabaseUnavailable."""
        made = cls(store, reader, policy, around, paths, order)
        await made.view.load()
        if foreign:
            made.fleet.set_foreign(foreign)
        around.fleet, around.files = made.fleet, await store.ready_files()
        made.policy = replace(
            policy, ready_files=around.files, pools=await store.pools(), backends=await store.backends()
        )
        made._judge_anew()
        return made

    @property
    def fleet(self) -> Fleet:
        return self.view.fleet

    async def read(self, model_ids: Iterable[int], within: float | None = None) -> None:
        """Read what these models are made of, several at a time, and ask workers about their paths; what is
        not known `within` seconds stays unknown. Never raises for what is wrong with a model."""
        wanted = sorted(set(model_ids))
        await self.catalogue.load(wanted)
        queue = iter(wanted)
        with anyio.move_on_after(within):
            async with anyio.create_task_group() as tasks:
                for _ in range(min(AT_ONCE, len(wanted))):
                    tasks.start_soon(self._one_after_another, queue)
        self.policy = replace(self.policy, paths=self._paths.facts)
        self._judge_anew()

    async def _one_after_another(self, queue: Iterable[int]) -> None:
        for model_id in queue:
            await self.catalogue.read(model_id)
            record = self.catalogue.record(model_id)
            if record is not None and record.spec is not None:
                await self._paths.look(record.spec)

    def _judge_anew(self) -> None:
        self.judge = Decider(self.view, self.policy, self.reports)

    def in_order(self, queue: Iterable[WaitingInstance]) -> list[WaitingInstance]:
        """Who is tried when, as the daemon's queue has it. Their models have been read."""
        return sorted(queue, key=self._ranks.rank)

    def expect(self, queue: Iterable[WaitingInstance]) -> None:
        """Let decisions know what is still to come, for the strategy that keeps room for it."""
        rows = {w.id: w for w in queue}
        self.judge.mix = DemandMix(self.view, self.catalogue, rows, monotonic)

    def record(self, model_id: int) -> ModelRecord | None:
        """The row of a model that was read."""
        return self.catalogue.record(model_id)

    def demand(self, model_id: int) -> Demand | NoFit:
        """What an instance of a model asks, or why nobody knows. `read` comes first."""
        found = self.catalogue.demand(model_id)
        if found is None:
            found = self.catalogue.last(model_id)
        if found is None:
            text = "the files of the model could not be read in the time there was"
            return refusal(_LATE, text, Cure.TIME | Cure.MODEL)
        return found

    def spec(self, model_id: int) -> ModelSpec | None:
        """The model as its row says it."""
        record = self.record(model_id)
        return record.spec if record is not None else None
