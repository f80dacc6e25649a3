"""The decide loop: ready work is decided in memory, batch by batch, and handed to the commit loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio.lowlevel
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectSendStream

from gpustackd.daemon.scheduling.analysis import Analysis
from gpustackd.daemon.scheduling.claims import Claims
from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.scheduling.refusals import Refusals, RefusedItem
from gpustackd.daemon.scheduling.work_state import WorkItem
from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.domain.placement_hints import with_claim_raise
from gpustackd.errors import Contended
from gpustackd.ports import Proposal

_BATCH = 64


@dataclass(slots=True)
class DecidedPlacement:
    """A placement on its way to the commit; it is assumed on the fleet until that is done."""

    item: WorkItem
    proposal: Proposal
    generation: int
    """Of the fleet, when the decision began."""


class DecideLoop:
    """Its turns are the sign of life of the daemon (`beat`). `commits` takes one batch at a time: while one
    is committed, the next one is decided."""

    name = "decide loop"

    def __init__(
        self,
        context: SchedulingContext,
        *,
        claims: Claims,
        analysis: Analysis,
        refusals: Refusals,
        commits: MemoryObjectSendStream[list[DecidedPlacement]],
        beat: Callable[[], None],
    ) -> None:
        self._context = context
        self._claims = claims
        self._analysis = analysis
        self._refusals = refusals
        self._commits = commits
        self._beat = beat

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        async with self._commits:
            while True:
                self._beat()
                items = await self._context.work.take(_BATCH, wait=1.0)
                if items:
                    try:
                        await self._refresh_after_idling()
                        await self._decide(items)
                    finally:
                        self._context.work.end()

    async def _refresh_after_idling(self) -> None:
        """See what other replicas did while this one was idle: commits notify nobody, and what fits still may
        not be the best place any more."""
        if self._context.work.batches_in_progress == 1:
            try:
                await self._context.fleet_feed.refresh()
            except Contended:
                self._context.reporter.contended("feed")

    async def _decide(self, items: list[WorkItem]) -> None:
        placed: list[tuple[WorkItem, Placed, float, int]] = []
        refused: list[RefusedItem] = []
        unread: list[WorkItem] = []
        catalog, decider = self._context.catalog, self._context.decider
        fleet, generation = self._context.fleet_feed.fleet, self._context.fleet_feed.generation
        started = self._context.clock()
        for n, item in enumerate(items, 1):
            demand = catalog.demand(item.model_id)
            if demand is None and item.claim is None:
                demand = catalog.last_demand(item.model_id)
            if demand is None:
                unread.append(item)  # edited meanwhile, or the facts fell out of the cache: read again
                continue
            if isinstance(demand, Demand):
                demand = with_claim_raise(demand, item.hints.claim_raise)
                item.group = decider.group(demand)
            else:
                item.group = ("model", item.model_id)
                refused.append(RefusedItem(item, demand, 0.0))
                continue
            # After a conflict equal places are ranked anew: the one that failed may be held by somebody's
            # open transaction, of which no figure tells.
            name = f"{item.name} {item.conflicts}" if item.conflicts else item.name
            avoid = item.hints.avoid
            if item.conflicts and item.conflicts >= decider.conflicts_before_avoiding(demand):
                avoid = (*avoid, *item.avoid)
            outcome, took = decider.decide(demand, item.id, name, avoid)
            if isinstance(outcome, NoFit):
                refused.append(RefusedItem(item, outcome, took))
            else:
                fleet.assume(outcome.placement, item.id, item.model_id, demand.spec.effective_backend)
                placed.append((item, outcome, took, demand.spec.version))
            if n % 16 == 0:
                self._beat()
                await anyio.lowlevel.checkpoint()
        self._context.reporter.phase("decide", self._context.clock() - started)
        for item in unread:
            self._analysis.read_model(item)
        if refused:
            await self._refusals.refuse(refused)
        if placed:
            await self._hand_over(placed, generation)

    async def _hand_over(self, placed: list[tuple[WorkItem, Placed, float, int]], generation: int) -> None:
        """Claim what was only tried in memory, then give the batch to the commit loop."""
        tried = [item for item, *_ in placed if item.claim is None]
        if tried:
            await self._claims.claim(tried)
        batch: list[DecidedPlacement] = []
        for item, outcome, took, version in placed:
            if item.claim is None:
                self._context.fleet_feed.fleet.forget(item.id)
                continue
            batch.append(DecidedPlacement(item, Proposal(item.claim, version, outcome, took), generation))
        if batch:
            self._context.work.begin()
            await self._commits.send(batch)
