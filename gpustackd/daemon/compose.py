"""Composition: the one place that builds the real parts of a daemon."""

from __future__ import annotations

import gc
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from uuid import uuid4

import anyio

from gpustackd import __version__
from gpustackd.daemon.configure import reader_options, worker_token
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.path_probe import PROBE_CONNECT, PROBE_TOTAL, PathProbe
from gpustackd.daemon.session import ReplicaIdentity
from gpustackd.daemon.stopping import Stopping
from gpustackd.daemon.supervisor import Supervisor
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.errors import DatabaseUnavailable
from gpustackd.observe.logging import Log, start_logging
from gpustackd.observe.metrics import Metrics
from gpustackd.ports import DatabaseHealth
from gpustackd.settings import IGNORED, Settings
from gpustackd.sources.reader import Reader
from gpustackd.sources.worker_files import WorkerFiles
from gpustackd.store.postgres.revision import judge
from gpustackd.store.postgres.store import PostgresStore

_STARTING = 60.0
"""Seconds that a database in its start or recovery is waited for."""


async def run(settings: Settings, *, embedded: Path | None = None, migrate: bool = False) -> None:
    """The daemon, until SIGTERM or SIGINT. Raises, in a group, DatabaseUnavailable,
    WrongRevision or UsageError."""
    async with anyio.create_task_group() as tasks:
        starting = anyio.CancelScope()
        stopping = Stopping(starting)
        await tasks.start(stopping.watch)
        with starting:
            await _run(settings, embedded, migrate, stopping)
        tasks.cancel_scope.cancel()


async def _run(settings: Settings, embedded: Path | None, migrate: bool, stopping: Stopping) -> None:
    # What is known of a fleet lives long and holds no cycles: to look through it often for garbage costs
    # a fifteenth of the processor's time and finds nothing.
    gc.set_threshold(50_000, 20, 100)
    async with AsyncExitStack() as stack:
        name = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
        logging = start_logging(level=settings.log_level, form=settings.log_format, replica=name)
        stack.callback(logging.close)
        if settings.ignored:
            logging.log.warning("settings.ignored", variables=settings.ignored, reason=IGNORED)
        if embedded is not None:
            url, listen_url = await _embedded(stack, embedded)
            migrate = True
        else:
            url, listen_url = settings.require_database(), settings.require_listen_database()
        if migrate:
            from gpustackd.store.postgres.migrate import migrate as bring_up_to_date

            await bring_up_to_date(listen_url)
        store = await PostgresStore.open(url, settings.pool_size, pooled=url != listen_url, replica=name)
        stack.push_async_callback(store.close)
        judge((await _first_look(store, logging.log)).revision)
        metrics = Metrics(version=__version__, replica=name)
        metrics.watch_total(
            "gpustackd_log_lines_dropped",
            "Log lines that could not be written",
            lambda: logging.writer.dropped,
        )
        reports = Reporter(logging.log, metrics)
        around = FileLocations()
        models = await stack.enter_async_context(
            Reader(reader_options(settings), hosts=around.hosts, known_size=around.known_size)
        )
        files = WorkerFiles(worker_token(settings), total=PROBE_TOTAL, connect=PROBE_CONNECT)
        stack.push_async_callback(files.aclose)
        paths = PathProbe(files, around, monotonic)
        daemon = Supervisor(
            settings,
            ReplicaIdentity(uuid4(), name),
            store,
            models,
            around,
            paths,
            listen_url,
            reports,
            stopping,
        )
        await daemon.run()


async def _first_look(store: PostgresStore, log: Log) -> DatabaseHealth:
    """What the database says of itself. One that is just starting, or recovers from a crash, is waited for:
    hosts and their database often start together. Raise DatabaseUnavailable."""
    until = monotonic() + _STARTING
    told = False
    while True:
        try:
            return await store.health()
        except DatabaseUnavailable as error:
            if not error.passing or monotonic() > until:
                raise
            if not told:
                told = True
                log.warning("database.lost", reason=f"{error.problem}; waiting {_STARTING:g} s for it")
        await anyio.sleep(0.5)


async def _embedded(stack: AsyncExitStack, folder: Path) -> tuple[str, str]:
    from gpustackd.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(folder)
    await stack.enter_async_context(server)
    print(f"PostgreSQL runs in {folder}; look inside with:\n  {server.psql()}", flush=True)
    return server.url(), server.url()
