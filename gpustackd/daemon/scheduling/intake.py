"""Intake: wake-ups and rescans become work in the queue, parked groups get another try in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

import anyio
import anyio.lowlevel
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.queue.lanes import ParkedGroup, WakeOrigin
from gpustackd.daemon.queue.ordering import QueueOrdering
from gpustackd.daemon.queue.wakeups import WakeupBatch, Wakeups
from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.scheduling.decider import codes, signature
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.errors import Contended
from gpustackd.ports import WaitingInstance

_STRAY_SCAN_EVERY = 1.0
"""Seconds between looks for waiting rows that no notification named (another replica may have died with
them)."""
_TOGETHER = 0.25
"""Seconds that new instances wait for those that replica counts still bring: all stand in order then."""
_NEXT_OF_GROUP = 32
"""How many of a parked group are tried at once when one of it fits."""


class Intake:
    """The only loop that puts instances into the queue when something happened."""

    name = "intake"

    def __init__(
        self,
        context: SchedulingContext,
        *,
        wakeups: Wakeups,
        ordering: QueueOrdering,
        path_probe: PathProbe,
        file_locations: FileLocations,
        replicas_synced: Callable[[float], Awaitable[bool]],
    ) -> None:
        """`replicas_synced(seconds)` waits until models have their numbers, and says whether it waited."""
        self._context = context
        self._wakeups = wakeups
        self._ordering = ordering
        self._path_probe = path_probe
        self._file_locations = file_locations
        self._replicas_synced = replicas_synced
        self._stray_scan_at = 0.0
        self._stray_scan_due = False
        self._first = True

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Begins with a full scan."""
        self._wakeups.rescan()
        task_status.started()
        while True:
            news = WakeupBatch()
            with anyio.move_on_after(self._until_stray_scan()):
                news = await self._wakeups.next()
            await self._ordering.collect_burst(news)
            if news.created and await self._replicas_synced(_TOGETHER):
                news.add(self._wakeups.take())
            try:
                if news.anything:
                    await self._handle(news)
                if self._stray_scan_due:
                    await self._scan_for_strays()
                if self._context.queue.rescan_wanted:
                    self._wakeups.rescan()
            except Contended:
                # Somebody holds a table: what the notifications said is in the rows, a full scan finds it.
                self._context.reporter.contended("intake")
                await anyio.sleep(1)
                self._wakeups.rescan()

    async def _handle(self, news: WakeupBatch) -> None:
        if news.models:
            self._context.catalog.forget(news.models)
        if news.cures & (Cure.FILES | Cure.BACKENDS) or news.full:
            await self._file_locations.refresh()
            pools, backends = await self._context.store.pools(), await self._context.store.backends()
            self._context.decider.update(self._file_locations.ready_files, pools, backends)
        if news.cures & (Cure.FILES | Cure.WORKER):
            self._context.catalog.retry_failures()
        if news.cures & Cure.WORKER or news.full:
            self._path_probe.workers_changed()
        if news.deleted:
            self._context.fleet_feed.reload_next()
        if news.created and (news.cures or news.deleted):
            await self._context.fleet_feed.refresh()  # what is notified together is decided on together
        if news.created:  # before a scan, which would count them as found by it alone
            await self._enter(await self._context.store.waiting(sorted(news.created)))
        if news.full:
            await self._scan()
            return
        cures = news.cures | (Cure.MODEL if news.models else Cure.NONE)
        if cures or news.deleted:
            await self._context.fleet_feed.refresh()
            await self._scan_for_strays()
        if news.cures:
            await self._try_parked(news.cures, None)
        if news.models:
            await self._try_parked(Cure.MODEL, news.models)

    # -- rows that wait -------------------------------------------------------------------------------

    async def _enter(self, rows: Sequence[WaitingInstance]) -> None:
        """Queue new rows; those of several models that nobody read yet a little later, together."""
        unread = await self._ordering.unread({r.model_id for r in rows})
        self._put([r for r in rows if r.model_id not in unread], WakeOrigin.NOTIFY)
        if unread:
            self._context.tasks.start_soon(self._enter_when_read, [r for r in rows if r.model_id in unread])

    async def _enter_when_read(self, rows: Sequence[WaitingInstance]) -> None:
        await self._ordering.read({r.model_id for r in rows})
        self._put(rows, WakeOrigin.NOTIFY)

    def _put(self, rows: Sequence[WaitingInstance], origin: WakeOrigin) -> None:
        before = self._context.queue.dropped
        for row in rows:
            self._context.work.put_row(row)
            lane = self._context.queue.lane_of(row.id)
            if self._context.queue.put(
                row.id,
                row.priority,
                row.created_at.timestamp(),
                model_id=row.model_id,
                origin=origin,
                due_in=row.due_in,
                size=self._ordering.ranks.size(row.model_id),
                batch=self._ordering.ranks.batch(row.model_id),
            ):
                if lane is None:
                    self._context.reporter.enqueued(row, origin)
            else:
                self._context.work.drop_row(row.id)
        if dropped := self._context.queue.dropped - before:
            self._context.reporter.queue_overflow(dropped, len(self._context.queue))

    async def _scan(self) -> None:
        """The truth: every waiting row, the whole fleet, every parked group."""
        origin = WakeOrigin.START if self._first else WakeOrigin.RESCAN
        started = self._context.clock()
        self._context.queue.rescan_started()
        self._context.catalog.forget()
        changed = await self._context.fleet_feed.reconcile()
        rows = await self._context.store.waiting(None)
        models = {r.model_id for r in rows}
        if await self._ordering.unread(models) >= models:  # else one that is known would wait
            await self._ordering.read(models)
        self._put(rows, origin)
        gone = self._context.queue.rescan_finished()
        self._context.work.retain_rows(
            lambda instance_id: self._context.queue.lane_of(instance_id) is not None
        )
        self._context.catalog.prune(self._context.work.waiting_by_model().keys())
        await self._try_parked(Cure.ANY, None, whole_text=True)
        self._first = False
        self._context.reporter.rescanned(len(rows), gone, changed, self._context.clock() - started)

    def _until_stray_scan(self) -> float | None:
        if not self._stray_scan_due:
            return None
        return max(0.0, self._stray_scan_at + _STRAY_SCAN_EVERY - self._context.clock())

    async def _scan_for_strays(self) -> None:
        """Not more often than once in a while, but never not at all: what wakes us now may be what a row
        waits for whose replica is gone."""
        now = self._context.clock()
        self._stray_scan_due = now - self._stray_scan_at < _STRAY_SCAN_EVERY
        if self._stray_scan_due:
            return
        self._stray_scan_at = now
        strays = [
            i for i in await self._context.store.pending_ids() if self._context.queue.lane_of(i) is None
        ]
        if strays:
            self._put(await self._context.store.waiting(strays), WakeOrigin.CURE)

    # -- parked groups --------------------------------------------------------------------------------

    async def _try_parked(
        self, cures: Cure, models: Collection[int] | None, *, whole_text: bool = False
    ) -> None:
        groups = self._context.queue.wake(cures, models)
        await self._context.catalog.load({g.model_id for g in groups})
        for n, group in enumerate(groups, 1):
            self._try(group, whole_text)
            if n % 16 == 0:
                await anyio.lowlevel.checkpoint()

    def _try(self, group: ParkedGroup, whole_text: bool, probed: bool = False) -> None:
        """One decision in memory answers for the whole group. A rescan brings the text up to date too."""
        origin = WakeOrigin.RESCAN if whole_text else WakeOrigin.CURE
        demand = self._context.catalog.demand(group.model_id)
        if demand is None:
            self._context.tasks.start_soon(self._read_anew, group)
            demand = self._context.catalog.last_demand(group.model_id)
            if demand is None:
                return
        if isinstance(demand, Demand) and self._context.decider.group(demand) != group.key:
            self._context.queue.activate(group.key)
            return
        if isinstance(demand, Demand) and not probed and self._path_probe.may_hold_up(demand.spec):
            self._context.tasks.start_soon(self._probe_anew, group, demand.spec, whole_text)
            return
        outcome = demand if isinstance(demand, NoFit) else self._context.decider.probe(demand)
        if not isinstance(outcome, NoFit):
            self._context.work.unblock(group.key)
            self._context.queue.activate(group.key, _NEXT_OF_GROUP, origin)
            return
        self._context.queue.set_cures(group.key, outcome.cures)
        known = {codes(s) for s in group.signatures}
        if whole_text or known != {codes(signature(outcome))}:
            self._context.queue.activate_changed(group.key, signature(outcome), origin)

    async def _probe_anew(self, group: ParkedGroup, spec: ModelSpec, whole_text: bool) -> None:
        """What workers said of the model's path has aged: ask again before it is tried."""
        await self._path_probe.look(spec)
        self._try(group, whole_text, probed=True)

    async def _read_anew(self, group: ParkedGroup) -> None:
        """The facts have aged: read them; the group is tried again only if they are others."""
        demand = await self._context.catalog.read(group.model_id)
        if isinstance(demand, NoFit) or self._context.decider.group(demand) != group.key:
            self._context.queue.activate(group.key)
