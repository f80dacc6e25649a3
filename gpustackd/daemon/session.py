"""A session: everything that works on instances between two losses of the database.

When the database is lost the session ends as a whole, whatever it was doing; the next one starts from the
rows. Nothing of a session is worth more than what the rows say.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from uuid import UUID

import anyio

from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.queue.ordering import QueueOrder, QueueOrdering
from gpustackd.daemon.queue.wakeups import Wakeups
from gpustackd.daemon.reconcile.leases import Leases
from gpustackd.daemon.reconcile.loops import Loop
from gpustackd.daemon.reconcile.replicas import ReplicaSync
from gpustackd.daemon.scheduling.analysis import Analysis
from gpustackd.daemon.scheduling.decide_loop import Scheduling
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.demand_mix import DemandMix
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.gpu_usage import GpuUsage
from gpustackd.daemon.scheduling.intake import Intake
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.scheduling.work_state import WorkState
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.errors import Contended, DatabaseUnavailable, WrongRevision
from gpustackd.placement.policy import Policy
from gpustackd.placement.preferences import PREFER_DRAFT_WEIGHTS
from gpustackd.ports import DatabaseHealth, ModelReader, Store

_HEALTH_EVERY = 2.0
_LAST_WORK = 5.0
"""Seconds that a stop waits for work under way; together with handing back it stays below 10."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Who this replica is: `owner` is new at every start of the process, the name may be used again."""

    owner: UUID
    name: str


class Session:
    """Build one per stretch; `run` returns after a stop and raises what ended it."""

    def __init__(
        self,
        *,
        identity: ReplicaIdentity,
        store: Store,
        reader: ModelReader,
        policy: Policy,
        lease: float,
        concurrency: int,
        gathering: Wakeups,
        reports: Reporter,
        beat: Callable[[], None],
        healthy: Callable[[DatabaseHealth], None],
        judge_revision: Callable[[str | None], None],
        around: FileLocations,
        paths: PathProbe,
        usage_fresh: float | None,
        replicas: Callable[[FleetFeed], ReplicaSync],
        care: Callable[[FleetFeed, ModelCatalog, Decider], Sequence[Loop]],
        order: QueueOrder = QueueOrder.PRIORITY,
    ) -> None:
        """`usage_fresh`: seconds for which a usage sample is trusted; None = others' memory never counts."""
        self._identity = identity
        self._store = store
        self._reader = reader
        self._policy = policy
        self._lease = lease
        self._concurrency = concurrency
        self._gathering = gathering
        self._reports = reports
        self._beat = beat
        self._healthy = healthy
        self._judge_revision = judge_revision
        self._around = around
        self._paths = paths
        self._usage_fresh = usage_fresh
        self._replicas = replicas
        self._care = care
        self._order = order
        self.queue = InstanceQueue(monotonic)
        self.view = FleetFeed(store, reports.worker_state)
        self.desk = WorkState()

    async def run(self, stop: anyio.Event, started: Callable[[], None]) -> None:
        """Work until `stop` is set, then finish or hand back what is under way."""
        owner, name = self._identity.owner, self._identity.name
        await self._check_health()
        await self._store.hand_back(owner)
        await self.view.load()
        self._around.fleet = self.view.fleet
        draft = PREFER_DRAFT_WEIGHTS in self._policy.prefer
        catalogue = ModelCatalog(self._store, self._reader, self._reports, monotonic, count_draft=draft)
        judge = Decider(self.view, self._policy, self._reports)
        judge.set_paths(self._paths.facts)
        judge.mix = DemandMix(self.view, catalogue, self.desk.rows, monotonic)
        self._paths.changed, self._paths.tell = judge.set_paths, self._gathering.tell
        usage = GpuUsage(
            store=self._store,
            view=self.view,
            fresh=self._usage_fresh,
            tell=self._gathering.tell,
            clock=monotonic,
        )
        self._reports.attach(self.queue, self.view, self.desk)
        async with anyio.create_task_group() as reading, anyio.create_task_group() as tasks:
            weighing = QueueOrdering(
                self._order, self._policy.strategy, catalogue=catalogue, view=self.view,
                gathering=self._gathering, paths=self._paths, tasks=reading, clock=monotonic,
                reports=self._reports,
            )  # fmt: skip
            analysis = Analysis(
                owner=owner, lease=self._lease, store=self._store, queue=self.queue, desk=self.desk,
                catalogue=catalogue, reports=self._reports, tasks=reading, clock=monotonic,
                batches=self._concurrency, paths=self._paths, usage=usage, in_order=weighing.decreasing,
            )  # fmt: skip
            scheduling = Scheduling(
                owner=owner, replica=name, store=self._store, queue=self.queue, desk=self.desk,
                view=self.view, catalogue=catalogue, judge=judge, analysis=analysis, reports=self._reports,
                beat=self._beat, clock=monotonic, chance=random.Random(owner.int),
            )  # fmt: skip
            replicas = self._replicas(self.view)
            intake = Intake(
                store=self._store, queue=self.queue, desk=self.desk, view=self.view, catalogue=catalogue,
                judge=judge, gathering=self._gathering, reports=self._reports, tasks=reading, clock=monotonic,
                around=self._around, paths=self._paths, weighing=weighing,
                numbers=replicas.settled,
            )  # fmt: skip
            leases = Leases(
                owner=owner,
                lease=self._lease,
                store=self._store,
                desk=self.desk,
                reports=self._reports,
                tell=self._gathering.tell,
            )
            self._gathering.rescan()
            for loop in (intake.run, analysis.run, scheduling.decide, scheduling.commit,
                         leases.renew, leases.sweep, usage.watch, replicas.run, self._watch_health,
                         *self._care(self.view, catalogue, judge)):  # fmt: skip
                tasks.start_soon(loop)
            started()
            await stop.wait()
            self.queue.close()
            with anyio.move_on_after(_LAST_WORK):
                await scheduling.finished()
            reading.cancel_scope.cancel()
            tasks.cancel_scope.cancel()

    async def hand_back(self) -> int:
        """Give back every claim; returns how many. A database that is gone will see the leases end."""
        with suppress(DatabaseUnavailable, Contended), anyio.move_on_after(3, shield=True):
            return len(await self._store.hand_back(self._identity.owner))
        return 0

    async def _check_health(self) -> None:
        health = await self._store.health()
        try:
            self._judge_revision(health.revision)
        except WrongRevision as error:
            raise DatabaseUnavailable(str(error)) from error
        if not health.writable:
            raise DatabaseUnavailable("the database is read-only", "point at the primary server")
        self._healthy(health)

    async def _watch_health(self) -> None:
        while True:
            await anyio.sleep(_HEALTH_EVERY)
            await self._check_health()
