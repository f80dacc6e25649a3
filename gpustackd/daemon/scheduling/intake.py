"""Intake: wake-ups and rescans become work in the queue, parked groups get another try in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from gpustackd.daemon.queue.instance_queue import InstanceQueue, ParkedGroup, WakeOrigin
from gpustackd.daemon.queue.ordering import QueueOrdering
from gpustackd.daemon.queue.wakeups import WakeupBatch, Wakeups
from gpustackd.daemon.scheduling.decider import Decider, codes, signature
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.scheduling.work_state import WorkState
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.errors import Contended
from gpustackd.ports import Store, WaitingInstance

_LIGHT_SCAN = 1.0
"""Seconds between looks for waiting rows that nobody told us of (another replica may have died with them)."""

_TOGETHER = 0.25
"""Seconds that new instances wait for those that numbers of replicas still bring: all stand in order then."""

_FLOW = 32
"""How many of a parked group are tried at once when one of it fits."""


class Intake:
    """Runs until cancelled."""

    def __init__(
        self,
        *,
        store: Store,
        queue: InstanceQueue,
        desk: WorkState,
        view: FleetFeed,
        catalogue: ModelCatalog,
        judge: Decider,
        gathering: Wakeups,
        reports: Reporter,
        tasks: TaskGroup,
        paths: PathProbe,
        around: FileLocations,
        weighing: QueueOrdering,
        numbers: Callable[[float], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._queue = queue
        self._desk = desk
        self._view = view
        self._catalogue = catalogue
        self._judge = judge
        self._gathering = gathering
        self._reports = reports
        self._tasks = tasks
        self._paths = paths
        self._around = around
        self._weighing = weighing
        self._numbers = numbers
        self._clock = clock
        self._looked = 0.0
        self._look_owed = False
        self._first = True

    async def run(self) -> None:
        while True:
            news = WakeupBatch()
            with anyio.move_on_after(self._until_owed_look()):
                news = await self._gathering.next()
            await self._weighing.burst(news)
            if news.created and await self._numbers(_TOGETHER):
                news.add(self._gathering.take())
            try:
                if news.anything:
                    await self._attend(news)
                if self._look_owed:
                    await self._look_for_strays()
                if self._queue.rescan_wanted:
                    self._gathering.rescan()
            except Contended:
                # Somebody holds a table: what was told is in the rows, a full look finds it.
                self._reports.contended("intake")
                await anyio.sleep(1)
                self._gathering.rescan()

    async def _attend(self, news: WakeupBatch) -> None:
        if news.models:
            self._catalogue.forget(news.models)
        if news.cures & (Cure.FILES | Cure.BACKENDS) or news.full:
            self._judge.files = self._around.files = await self._store.ready_files()
            self._judge.set_pools(await self._store.pools())
            self._judge.set_backends(await self._store.backends())
        if news.cures & (Cure.FILES | Cure.WORKER):
            self._catalogue.doubt()
        if news.cures & Cure.WORKER or news.full:
            self._paths.doubt()
        if news.deleted:
            self._view.reload_next()
        if news.created and (news.cures or news.deleted):
            await self._view.refresh()  # what is told together is decided on together
        if news.created:  # before a scan, which would count them as found by it alone
            await self._enter(await self._store.waiting(sorted(news.created)))
        if news.full:
            await self._scan()
            return
        cures = news.cures | (Cure.MODEL if news.models else Cure.NONE)
        if cures or news.deleted:
            await self._view.refresh()
            await self._look_for_strays()
        if news.cures:
            await self._cure(news.cures, None)
        if news.models:
            await self._cure(Cure.MODEL, news.models)

    async def _enter(self, rows: Sequence[WaitingInstance]) -> None:
        """Queue new rows; those of several models that nobody read yet a little later, together."""
        unread = await self._weighing.unread({r.model_id for r in rows})
        self.put([r for r in rows if r.model_id not in unread], WakeOrigin.NOTIFY)
        if unread:
            self._tasks.start_soon(self._enter_read, [r for r in rows if r.model_id in unread])

    async def _enter_read(self, rows: Sequence[WaitingInstance]) -> None:
        await self._weighing.read({r.model_id for r in rows})
        self.put(rows, WakeOrigin.NOTIFY)

    def put(self, rows: Sequence[WaitingInstance], origin: WakeOrigin) -> None:
        """Queue rows that wait."""
        for row in rows:
            self._desk.rows[row.id] = row
            known = self._queue.lane_of(row.id)
            if self._queue.put(
                row.id,
                row.priority,
                row.created_at.timestamp(),
                model_id=row.model_id,
                origin=origin,
                due_in=row.due_in,
                size=self._weighing.size(row.model_id),
                batch=self._weighing.batch(row.model_id),
            ):
                if known is None:
                    self._reports.enqueued(row, origin)
            else:
                self._desk.rows.pop(row.id, None)

    async def _scan(self) -> None:
        """The truth: every waiting row, the whole fleet, every parked group."""
        origin = WakeOrigin.START if self._first else WakeOrigin.RESCAN
        started = self._clock()
        self._queue.rescan_started()
        self._catalogue.forget()
        changed = await self._view.reconcile()
        rows = await self._store.waiting(None)
        models = {r.model_id for r in rows}
        if await self._weighing.unread(models) >= models:  # else somebody who is known would wait
            await self._weighing.read(models)
        self.put(rows, origin)
        gone = self._queue.rescan_finished()
        for known in [i for i in self._desk.rows if self._queue.lane_of(i) is None]:
            del self._desk.rows[known]
        self._catalogue.prune({r.model_id for r in self._desk.rows.values()})
        await self._cure(Cure.ANY, None, whole_text=True)
        self._first = False
        self._reports.rescanned(len(rows), gone, changed, self._clock() - started)

    def _until_owed_look(self) -> float | None:
        return max(0.0, self._looked + _LIGHT_SCAN - self._clock()) if self._look_owed else None

    async def _look_for_strays(self) -> None:
        """Not more often than once in a while, but never not at all: what wakes us now may be what a row
        waits for whose replica is gone."""
        now = self._clock()
        self._look_owed = now - self._looked < _LIGHT_SCAN
        if self._look_owed:
            return
        self._looked = now
        strays = [i for i in await self._store.pending_ids() if self._queue.lane_of(i) is None]
        if strays:
            self.put(await self._store.waiting(strays), WakeOrigin.CURE)

    async def _cure(self, cures: Cure, models: Collection[int] | None, *, whole_text: bool = False) -> None:
        groups = self._queue.wake(cures, models)
        await self._catalogue.load({g.model_id for g in groups})
        for n, group in enumerate(groups, 1):
            self._try(group, whole_text)
            if n % 16 == 0:
                await anyio.lowlevel.checkpoint()

    def _try(self, group: ParkedGroup, whole_text: bool, asked: bool = False) -> None:
        """One decision in memory answers for the whole group. A rescan brings the text up to date too."""
        origin = WakeOrigin.RESCAN if whole_text else WakeOrigin.CURE
        demand = self._catalogue.demand(group.model_id)
        if demand is None:
            self._tasks.start_soon(self._read_anew, group)
            demand = self._catalogue.last(group.model_id)
            if demand is None:
                return
        if isinstance(demand, Demand) and self._judge.group(demand) != group.key:
            self._queue.activate(group.key)
            return
        if isinstance(demand, Demand) and not asked and self._paths.in_the_way(demand.spec):
            self._tasks.start_soon(self._ask_anew, group, demand.spec, whole_text)
            return
        outcome = demand if isinstance(demand, NoFit) else self._judge.probe(demand)
        if not isinstance(outcome, NoFit):
            self._judge.flowing.add(group.key)
            self._queue.activate(group.key, _FLOW, origin)
            return
        self._queue.set_cures(group.key, outcome.cures)
        told = {codes(s) for s in group.signatures}
        if whole_text or told != {codes(signature(outcome))}:
            self._queue.activate_changed(group.key, signature(outcome), origin)

    async def _ask_anew(self, group: ParkedGroup, spec: ModelSpec, whole_text: bool) -> None:
        """What workers said of the model's path has aged: ask again before it is tried."""
        await self._paths.look(spec)
        self._try(group, whole_text, asked=True)

    async def _read_anew(self, group: ParkedGroup) -> None:
        """The facts have aged: read them; the group is tried again only if they are others."""
        demand = await self._catalogue.read(group.model_id)
        if isinstance(demand, NoFit) or self._judge.group(demand) != group.key:
            self._queue.activate(group.key)
