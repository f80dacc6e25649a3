"""Composition: the one place that builds the real parts of a daemon and says in what order they live."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any
from uuid import uuid4

import anyio
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from pydantic import SecretStr

from gpustackd import __version__
from gpustackd.daemon.gathering import Gathering
from gpustackd.daemon.http import serve
from gpustackd.daemon.reports import Reports
from gpustackd.daemon.session import Identity, Session
from gpustackd.daemon.surroundings import Surroundings
from gpustackd.daemon.systemd import Systemd
from gpustackd.errors import Contended, DatabaseUnavailable, GpustackdError
from gpustackd.observe.logging import start_logging
from gpustackd.observe.metrics import Metrics
from gpustackd.placement.policy import Policy
from gpustackd.ports import Health, ModelReader
from gpustackd.settings import Settings
from gpustackd.sources.library import ReaderOptions
from gpustackd.sources.reader import Reader
from gpustackd.store.listen import Hearing, Listener
from gpustackd.store.postgres import PostgresStore
from gpustackd.store.revision import HEAD, judge

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
class State:
    """What the HTTP surface and systemd are told."""

    beat: float = field(default_factory=monotonic)
    health: Health | None = None
    problem: str = "starting"
    hearing: Hearing = field(default_factory=Hearing)
    stopping: bool = False

    def tick(self) -> None:
        self.beat = monotonic()

    def age(self) -> float:
        return monotonic() - self.beat


def policy(settings: Settings) -> Policy:
    """What the settings say to decisions."""
    knobs = settings.knobs
    return Policy(
        strategy=settings.placement_strategy,
        placement_max=knobs.scheduler_scale_up_placement_max_score,
        locality_max=knobs.scheduler_scale_up_locality_max_score,
        commit_check=settings.commit_check,
        prefer=settings.prefer,
    )


def reader(settings: Settings, around: Surroundings) -> Reader:
    """The reader of models that the settings describe."""
    return Reader(
        ReaderOptions(
            huggingface_endpoint=settings.hf_endpoint,
            huggingface_token=_secret(settings.huggingface_token),
            modelscope_endpoint=settings.modelscope_endpoint,
            worker_token=_secret(settings.worker_token),
            cache_dir=_cache_folder(),
        ),
        hosts=around.hosts,
        known_size=around.known_size,
    )


def _secret(value: SecretStr | None) -> str | None:
    return value.get_secret_value() if value else None


def _cache_folder() -> Path:
    """Where systemd says (`CacheDirectory=`), else where the desktop standard does."""
    if given := os.environ.get("CACHE_DIRECTORY"):
        return Path(given.split(":")[0])
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(home) / "gpustackd"


async def run(settings: Settings, *, embedded: Path | None = None, migrate: bool = False) -> None:
    """The daemon, until SIGTERM or SIGINT. Raises DatabaseUnavailable, WrongRevision, UsageError."""
    async with AsyncExitStack() as stack:
        name = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
        logging = start_logging(level=settings.log_level, form=settings.log_format, replica=name)
        stack.callback(logging.close)
        if embedded is not None:
            url, listen_url = await _embedded(stack, embedded)
            migrate = True
        else:
            url, listen_url = settings.require_database(), settings.require_listen_database()
        if migrate:
            from gpustackd.store.migrate import migrate as bring_up_to_date

            await bring_up_to_date(listen_url)
        store = await PostgresStore.open(url, settings.pool_size, pooled=url != listen_url, replica=name)
        stack.push_async_callback(store.close)
        judge((await store.health()).revision)
        metrics = Metrics(version=__version__, replica=name)
        metrics.watch_total(
            "gpustackd_log_lines_dropped",
            "Log lines that could not be written",
            lambda: logging.writer.dropped,
        )
        reports = Reports(logging.log, metrics)
        around = Surroundings()
        models = await stack.enter_async_context(reader(settings, around))
        daemon = Daemon(settings, Identity(uuid4(), name), store, models, around, listen_url, reports)
        await daemon.run()


async def _embedded(stack: AsyncExitStack, folder: Path) -> tuple[str, str]:
    from gpustackd.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(folder)
    await stack.enter_async_context(server)
    print(f"PostgreSQL runs in {folder}; look inside with:\n  {server.psql()}", flush=True)
    return server.url(), server.url()


class Daemon:
    """One replica: long-lived parts around one session after another."""

    def __init__(
        self,
        settings: Settings,
        identity: Identity,
        store: PostgresStore,
        models: ModelReader,
        around: Surroundings,
        listen_url: str,
        reports: Reports,
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._store = store
        self._models = models
        self._around = around
        self._listen_url = listen_url
        self._reports = reports
        self._gathering = Gathering()
        self._systemd = Systemd.from_environment()
        self._stop = anyio.Event()
        self.state = State()
        reports.metrics.watch_gauge(
            "gpustackd_loop_beat_age_seconds", "Since the scheduling loop's last turn", self.state.age
        )

    async def run(self) -> None:
        """Until a signal; then stop in order, within the ten seconds of the contract."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._signals)
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
        )

    def _healthy(self, health: Health) -> None:
        self.state.health = health

    # -- long-lived parts -------------------------------------------------------------------------------

    def _rescans(self) -> AsyncIOScheduler:
        """The full scan: on a timer with jitter, so that replicas do not scan together."""
        scheduler = AsyncIOScheduler()
        every = self._settings.rescan_interval
        scheduler.add_job(
            self._gathering.rescan, "interval", seconds=every, jitter=max(1, int(every / 20)),
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
            self._gathering.rescan()

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
            on_wake=self._gathering.tell,
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

    async def _signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for received in signals:
                if self._stop.is_set():
                    continue
                self.state.stopping = True
                self._reports.event("info", "daemon.stopping", reason=signal.Signals(received).name)
                self._systemd.stopping()
                self._stop.set()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
