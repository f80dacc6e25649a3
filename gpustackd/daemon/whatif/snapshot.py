"""What a daemon would know at this moment, and the decision that it would make of it; nothing is written.

`plan` and `explain` build on this: the same fleet feed, catalog, decider and policy as in a session, over a
store that is one moment of the database, or a copy of it in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

import anyio

from gpustackd.daemon.queue.ordering import QueueRanks
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.demand_mix import DemandMix
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog, refusal
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Cure, NoFit, Reason
from gpustackd.placement.policy import Policy
from gpustackd.ports import Store, WaitingInstance

AT_ONCE = 16
"""Models read at the same time."""


class RemarkCollector:
    """A `DecisionReporter` that keeps what a daemon would log, for the answer; nothing is counted."""

    def __init__(self) -> None:
        self.remarks: list[tuple[str, str]] = []
        """(event, text) in the order in which they came; each only once."""

    def event(self, level: str, name: str, **fields: Any) -> None:
        text = " ".join(str(fields[k]) for k in ("model", "reason") if k in fields)
        if (name, text) not in self.remarks:
            self.remarks.append((name, text))

    def unexpected(self, what: str, error: BaseException, **fields: Any) -> None:
        self.event("error", "daemon.error", reason=f"{what}: {error!r}"[:2000], **fields)

    def stage_failed(self, fault: Reason, model: str) -> None:
        self.event("error", "decision.stage_failed", model=model, reason=fault.text)

    def search_cut(self, model: str, instance_id: int, milliseconds: float) -> None:
        self.event("warning", "search.cut", model=model, reason="the search ended for its budget")

    def model_unreadable(self, model: str, model_id: int, reason: str, *, repeated: bool) -> None:
        """Nothing: the refusal says it."""


class Snapshot:
    """Fleet, policy and models of one moment. `load` comes first."""

    def __init__(
        self,
        store: Store,
        *,
        fleet_feed: FleetFeed,
        catalog: ModelCatalog,
        file_locations: FileLocations,
        path_probe: PathProbe,
        ranks: QueueRanks,
        policy: Policy,
        reporter: RemarkCollector,
    ) -> None:
        self.catalog = catalog
        self.decider = Decider(fleet_feed, path_probe, policy, reporter)
        self._store = store
        self._fleet_feed = fleet_feed
        self._file_locations = file_locations
        self._path_probe = path_probe
        self._ranks = ranks
        self._reporter = reporter

    @property
    def fleet(self) -> Fleet:
        return self._fleet_feed.fleet

    @property
    def policy(self) -> Policy:
        """What decisions are given now."""
        return self.decider.policy

    @property
    def remarks(self) -> list[str]:
        """What a daemon would have logged so far, each text once."""
        return [text for _, text in self._reporter.remarks if text]

    async def load(self, foreign: Mapping[int, int] | None = None) -> None:
        """Read the fleet, files, pools and backends. `foreign`: bytes that others hold, by GPU id, where that
        counts. Raises DatabaseUnavailable."""
        await self._fleet_feed.start()
        if foreign:
            self.fleet.set_foreign(foreign)
        await self._file_locations.refresh()
        pools, backends = await self._store.pools(), await self._store.backends()
        self.decider.update(self._file_locations.ready_files, pools, backends)

    async def read(self, model_ids: Iterable[int], within: float | None = None) -> None:
        """Read what these models are made of, several at a time, and ask workers about their paths; what is
        not known `within` seconds stays unknown. Never raises for what is wrong with a model."""
        wanted = sorted(set(model_ids))
        await self.catalog.load(wanted)
        queue = iter(wanted)
        with anyio.move_on_after(within):
            async with anyio.create_task_group() as tasks:
                for _ in range(min(AT_ONCE, len(wanted))):
                    tasks.start_soon(self._one_after_another, queue)

    async def _one_after_another(self, queue: Iterable[int]) -> None:
        for model_id in queue:
            await self.catalog.prepare(model_id)

    def in_order(self, queue: Iterable[WaitingInstance]) -> list[WaitingInstance]:
        """Which is tried when, as the daemon's queue has it. Their models have been read."""
        return sorted(queue, key=self._ranks.rank)

    def expect(self, waiting: Mapping[int, int]) -> None:
        """Let decisions know what is still to come (instances by model id), for the strategy that keeps room
        for it."""
        mix = DemandMix(self._fleet_feed, self.catalog, lambda: waiting, monotonic)
        self.decider = Decider(self._fleet_feed, self._path_probe, self.policy, self._reporter, mix)

    def demand(self, model_id: int) -> Demand | NoFit:
        """What an instance of a model asks, or why nobody knows. `read` comes first."""
        demand = self.catalog.demand(model_id)
        if demand is None:
            demand = self.catalog.last_demand(model_id)
        if demand is None:
            text = "the files of the model could not be read in time"
            return refusal("model.late", text, Cure.TIME | Cure.MODEL)
        return demand

    def spec(self, model_id: int) -> ModelSpec | None:
        """The model as its row says it."""
        return self.catalog.spec(model_id)
