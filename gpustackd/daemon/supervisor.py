"""One replica as a process: long-lived parts around one session after another."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anyio
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from gpustackd import __version__
from gpustackd.daemon.configure import policy, replica_policy, usage_fresh, windows
from gpustackd.daemon.queue.ordering import QueueOrder
from gpustackd.daemon.queue.wakeups import Wakeups
from gpustackd.daemon.reconcile.loops import RecoveryLoops
from gpustackd.daemon.reconcile.replicas import Numbers, ReplicaSync
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.session import ReplicaIdentity, Session
from gpustackd.daemon.stopping import Stopping
from gpustackd.daemon.surface.http import serve
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.daemon.surface.systemd import Systemd
from gpustackd.errors import Contended, DatabaseUnavailable, GpustackdError
from gpustackd.ports import DatabaseHealth, ModelReader, Wake
from gpustackd.settings import Settings
from gpustackd.store.postgres.listen import Hearing, Listener
from gpustackd.store.postgres.replicas import PostgresReplicas
from gpustackd.store.postgres.revision import HEAD, judge
from gpustackd.store.postgres.store import PostgresStore

_BEAT_LIMIT = 15.0
"""Seconds without a turn of the scheduling loop after which the daemon is not alive."""
_DEAF_RESCAN = 10.0
"""Rescan interval while no notification is heard."""
_PRUNE_EVERY = 1800.0
_RECONNECT = (0.2, 1.0)
"""First and longest wait between tries to reach a database that is gone (the contract allows 5 s in all)."""


_FAILURES_MOST = 10
"""Sessions a minute that may end by a mistake of ours before the process ends, for others to restart it."""


@dataclass(slots=True)
class SupervisorState:
    """What the HTTP surface and systemd are told."""

    beat: float = field(default_factory=monotonic)
    health: DatabaseHealth | None = None
    problem: str = "starting"
    hearing: Hearing = field(default_factory=Hearing)
    stopping: bool = False

    def tick(self) -> None:
        self.beat = monotonic()

    def age(self) -> float:
        return monotonic() - self.beat


class Supervisor:
    """One replica: long-lived parts around one session after another."""

    def __init__(
        self,
        settings: Settings,
        identity: ReplicaIdentity,
        store: PostgresStore,
        models: ModelReader,
        around: FileLocations,
        paths: PathProbe,
        listen_url: str,
        reports: Reporter,
        stopping: Stopping,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._store = store
        self._models = models
        self._around = around
        self._paths = paths
        self._listen_url = listen_url
        self._reports = reports
        self._gathering = Wakeups()
        self._numbers = Numbers()
        self._systemd = Systemd.from_environment()
        self._stopping = stopping
        self._stop = stopping.event
        self._care = RecoveryLoops(store, windows(settings), paths, reports)
        self.state = SupervisorState()
        reports.metrics.watch_gauge(
            "gpustackd_loop_beat_age_seconds", "Since the scheduling loop's last turn", self.state.age
        )

    async def run(self) -> None:
        """Until a signal; then stop in order, within the ten seconds of the contract."""
        async with anyio.create_task_group() as tasks:
            self._stopping.heard = self._signalled
            await tasks.start(self._http)
            tasks.start_soon(self._listener().run)
            tasks.start_soon(self._watchdog)
            scheduler = self._rescans()
            try:
                await self._sessions()
            finally:
                scheduler.shutdown(wait=False)
            tasks.cancel_scope.cancel()
        self._reports.event("info", "daemon.stopped")

    # -- sessions -------------------------------------------------------------------------------------

    async def _sessions(self) -> None:
        chance = random.Random(self._identity.owner.int)
        wait, most = _RECONNECT
        lost_at: float | None = None
        failures: list[float] = []
        while not self._stop.is_set():
            session = self._session()
            began = monotonic()

            def started(lost_at: float | None = lost_at) -> None:
                self.state.problem = ""
                if lost_at is not None:
                    self._reports.metrics.database_up(True)
                    self._reports.event(
                        "info", "database.back", duration_ms=round((monotonic() - lost_at) * 1000)
                    )
                self._systemd.ready("scheduling")

            try:
                await session.run(self._stop, started)
                handed = await session.hand_back()
                if handed:
                    self._reports.event("info", "instance.handed_back", count=handed)
                return
            except* (DatabaseUnavailable, Contended) as group:
                problem = _first(group)
            except* Exception as group:
                problem = _first(group)
                if isinstance(problem, GpustackdError):
                    raise problem from group
                failures.append(monotonic())
                self._reports.unexpected("session", problem)
                if len([f for f in failures if monotonic() - f < 60]) > _FAILURES_MOST:
                    raise GpustackdError(
                        f"the daemon failed {len(failures)} times in a minute: {problem!r}", "see the log"
                    ) from group
            if self.state.problem == "" or lost_at is None:
                lost_at = monotonic()
                self._reports.metrics.database_up(False)
                self._reports.event("error", "database.lost", reason=str(problem))
                self._systemd.status("database lost")
            self.state.problem = str(problem)
            self.state.health = None
            await self._store.drop_connections()
            if monotonic() - began > 30:
                wait = _RECONNECT[0]
            with anyio.move_on_after(wait * chance.uniform(0.5, 1.0)):
                await self._stop.wait()
            wait = min(wait * 2, most)
            self.state.tick()

    def _session(self) -> Session:
        return Session(
            identity=self._identity,
            store=self._store,
            reader=self._models,
            policy=policy(self._settings),
            lease=self._settings.lease,
            concurrency=self._settings.concurrency,
            gathering=self._gathering,
            reports=self._reports,
            beat=self.state.tick,
            healthy=self._healthy,
            judge_revision=judge,
            around=self._around,
            paths=self._paths,
            usage_fresh=usage_fresh(self._settings),
            replicas=self._replicas,
            care=self._care.loops,
            order=QueueOrder(self._settings.queue_order),
        )

    def _replicas(self, view: FleetFeed) -> ReplicaSync:
        return ReplicaSync(
            store=PostgresReplicas(self._store),
            view=view,
            numbers=self._numbers,
            policy=replica_policy(self._settings),
            reports=self._reports,
            clock=monotonic,
            chance=random.Random(self._identity.owner.int),
        )

    def _healthy(self, health: DatabaseHealth) -> None:
        self.state.health = health

    # -- long-lived parts -------------------------------------------------------------------------------

    def _rescans(self) -> AsyncIOScheduler:
        """The full scan: on a timer with jitter, so that replicas do not scan together."""
        scheduler = AsyncIOScheduler()
        every = self._settings.rescan_interval
        scheduler.add_job(
            self._rescan, "interval", seconds=every, jitter=max(1, int(every / 20)),
            coalesce=True, max_instances=1, misfire_grace_time=None,
        )  # fmt: skip
        if every > _DEAF_RESCAN:
            scheduler.add_job(
                self._rescan_when_deaf, "interval", seconds=_DEAF_RESCAN,
                coalesce=True, max_instances=1, misfire_grace_time=None,
            )  # fmt: skip
        scheduler.add_job(
            self._prune, "interval", seconds=_PRUNE_EVERY, jitter=int(_PRUNE_EVERY / 4),
            coalesce=True, max_instances=1, misfire_grace_time=None,
        )  # fmt: skip
        scheduler.start()
        return scheduler

    def _rescan_when_deaf(self) -> None:
        if not self.state.hearing.listening:
            self._rescan()

    def _rescan(self) -> None:
        self._gathering.rescan()
        self._numbers.rescan()

    def _wake(self, wake: Wake) -> None:
        if wake.kind in ("replicas", "overflow"):
            self._numbers.tell(wake)
        if wake.kind != "replicas":
            self._gathering.tell(wake)

    async def _prune(self) -> None:
        """Old decision records go in small bites; what does not work out now is left for the next time."""
        with suppress(DatabaseUnavailable, Contended):
            for _ in range(1000):
                if not await self._store.prune_decisions():
                    return
                await anyio.sleep(0.2)

    def _listener(self) -> Listener:
        return Listener(
            self._listen_url,
            replica=self._identity.owner.hex,
            probe=self._store.notify,
            on_wake=self._wake,
            on_change=self._heard,
        )

    def _heard(self, hearing: Hearing) -> None:
        self.state.hearing = hearing
        self._reports.metrics.listening(hearing.listening, hearing.reconnects, hearing.probe_failures)
        self._reports.event(
            "info" if hearing.listening else "warning",
            "listen.started" if hearing.listening else "listen.lost",
            reconnects=hearing.reconnects,
        )

    async def _http(self, *, task_status: Any) -> None:
        await serve(
            self._settings.http,
            metrics=self._reports.metrics.registry,
            beat_age=self.state.age,
            beat_limit=_BEAT_LIMIT,
            readiness=self.readiness,
            version={"version": __version__, "revision": HEAD},
            on_listening=lambda address: self._started(address, task_status.started),
        )

    def _started(self, address: object, ready: Callable[[], None]) -> None:
        self._reports.event(
            "info", "daemon.started", version=__version__, http=str(address), lease=self._settings.lease,
            rescan_interval=self._settings.rescan_interval, pool_size=self._settings.pool_size,
        )  # fmt: skip
        ready()

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether `/readyz` says yes, and why."""
        health, hearing = self.state.health, self.state.hearing
        ready = health is not None and not self.state.problem and not self.state.stopping
        return ready, {
            "database": "ok" if health is not None else self.state.problem,
            "revision": health.revision if health else None,
            "writable": bool(health and health.writable),
            "listening": hearing.listening,
            "wakes": "notifications" if hearing.listening else f"rescan every {_DEAF_RESCAN:g} s",
            "stopping": self.state.stopping,
        }

    async def _watchdog(self) -> None:
        interval = self._systemd.watchdog_interval
        if interval is None:
            return
        while True:
            if self.state.age() < _BEAT_LIMIT:
                self._systemd.alive()
            await anyio.sleep(interval)

    def _signalled(self, name: str) -> None:
        self.state.stopping = True
        self._reports.event("info", "daemon.stopping", reason=name)
        self._systemd.stopping()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
