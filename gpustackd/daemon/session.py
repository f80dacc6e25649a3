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

from gpustackd.daemon.analyse import Analysis
from gpustackd.daemon.care import Loop
from gpustackd.daemon.catalogue import Catalogue
from gpustackd.daemon.demand_mix import DemandMix
from gpustackd.daemon.desk import Desk
from gpustackd.daemon.gathering import Gathering
from gpustackd.daemon.intake import Intake
from gpustackd.daemon.judge import Judge
from gpustackd.daemon.leases import Leases
from gpustackd.daemon.path_probe import PathProbe
from gpustackd.daemon.replicas import Replicas
from gpustackd.daemon.reports import Reports
from gpustackd.daemon.schedule import Scheduling
from gpustackd.daemon.surroundings import Surroundings
from gpustackd.daemon.unique_queue import UniqueQueue
from gpustackd.daemon.usage import Usage
from gpustackd.daemon.view import View
from gpustackd.daemon.weighing import Order, Weighing
from gpustackd.errors import Contended, DatabaseUnavailable, WrongRevision
from gpustackd.placement.notes import PREFER_DRAFT_WEIGHTS
from gpustackd.placement.policy import Policy
from gpustackd.ports import Health, ModelReader, Store

_HEALTH_EVERY = 2.0
_LAST_WORK = 5.0
"""Seconds that a stop waits for work under way; together with handing back it stays below 10."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this replica is: `owner` is new at every start of the process, the name may be used again."""

    owner: UUID
    name: str


class Session:
    """Build one per stretch; `run` returns after a stop and raises what ended it."""

    def __init__(
        self,
        *,
        identity: Identity,
        store: Store,
        reader: ModelReader,
        policy: Policy,
        lease: float,
        concurrency: int,
        gathering: Gathering,
        reports: Reports,
        beat: Callable[[], None],
        healthy: Callable[[Health], None],
        judge_revision: Callable[[str | None], None],
        around: Surroundings,
        paths: PathProbe,
        usage_fresh: float | None,
        replicas: Callable[[View], Replicas],
        care: Callable[[View, Catalogue, Judge], Sequence[Loop]],
        order: Order = Order.PRIORITY,
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
        self.queue = UniqueQueue(monotonic)
        self.view = View(store, reports.worker_state)
        self.desk = Desk()

    async def run(self, stop: anyio.Event, started: Callable[[], None]) -> None:
        """Work until `stop` is set, then finish or hand back what is under way."""
        owner, name = self._identity.owner, self._identity.name
        await self._check_health()
        await self._store.hand_back(owner)
        await self.view.load()
        self._around.fleet = self.view.fleet
        draft = PREFER_DRAFT_WEIGHTS in self._policy.prefer
        catalogue = Catalogue(self._store, self._reader, self._reports, monotonic, count_draft=draft)
        judge = Judge(self.view, self._policy, self._reports)
        judge.set_paths(self._paths.facts)
        judge.mix = DemandMix(self.view, catalogue, self.desk.rows, monotonic)
        self._paths.changed, self._paths.tell = judge.set_paths, self._gathering.tell
        usage = Usage(
            store=self._store,
            view=self.view,
            fresh=self._usage_fresh,
            tell=self._gathering.tell,
            clock=monotonic,
        )
        self._reports.attach(self.queue, self.view, self.desk)
        async with anyio.create_task_group() as reading, anyio.create_task_group() as tasks:
            weighing = Weighing(
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
