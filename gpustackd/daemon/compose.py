"""Composition: the one place that builds the real parts, of a daemon and of what answers "what if"."""

from __future__ import annotations

import gc
import os
import random
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from uuid import uuid4

import anyio

from gpustackd import __version__
from gpustackd.daemon.configure import (
    policy,
    reader_options,
    replica_policy,
    sample_age,
    timeouts,
    worker_token,
)
from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.queue.ordering import QueueOrder, QueueOrdering, QueueRanks
from gpustackd.daemon.queue.wakeups import Wakeups
from gpustackd.daemon.reconcile.instance_recovery import InstanceRecovery, PlacementKnowledge
from gpustackd.daemon.reconcile.leases import LeaseRenewal, LeaseSweep
from gpustackd.daemon.reconcile.replicas import ReplicaSync, ReplicaWakeups
from gpustackd.daemon.reconcile.worker_health import WorkerHealth
from gpustackd.daemon.scheduling.analysis import Analysis
from gpustackd.daemon.scheduling.claims import Claims
from gpustackd.daemon.scheduling.commit_loop import CommitLoop
from gpustackd.daemon.scheduling.context import ReplicaIdentity, SchedulingContext
from gpustackd.daemon.scheduling.decide_loop import DecidedPlacement, DecideLoop
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.demand_mix import DemandMix
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.gpu_usage import GpuUsage
from gpustackd.daemon.scheduling.intake import Intake
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PROBE_CONNECT, PROBE_TOTAL, PathProbe
from gpustackd.daemon.scheduling.refusals import Refusals
from gpustackd.daemon.scheduling.work_state import WorkState
from gpustackd.daemon.service import BackgroundTasks, Service, running
from gpustackd.daemon.session import DatabaseCheck, Session
from gpustackd.daemon.status import BEAT_LIMIT, DaemonStatus
from gpustackd.daemon.supervisor import Observers, StopSignal, Supervisor
from gpustackd.daemon.surface.reporter import DecisionReporter, RecoveryReporter, Reporter
from gpustackd.daemon.surface.systemd import Systemd, Watchdog
from gpustackd.daemon.whatif.plan import Plan, Planner
from gpustackd.daemon.whatif.snapshot import RemarkCollector, Snapshot
from gpustackd.errors import DatabaseUnavailable
from gpustackd.observe.logging import Log, start_logging
from gpustackd.observe.metrics import Metrics
from gpustackd.ports import DatabaseHealth, Store, Wake
from gpustackd.settings import IGNORED, Settings
from gpustackd.sources.abandonable_threads import AbandonableThreads
from gpustackd.sources.access import ReaderOptions
from gpustackd.sources.reader import Reader
from gpustackd.sources.worker_files import WorkerFiles
from gpustackd.store.documents.reading import Document
from gpustackd.store.memory.copy import copy_of
from gpustackd.store.memory.overlay import Overlay
from gpustackd.store.postgres.instance_recovery import InstanceRecoveryStore
from gpustackd.store.postgres.listen import Listener
from gpustackd.store.postgres.replicas import PostgresReplicaStore
from gpustackd.store.postgres.revision import HEAD, check_revision
from gpustackd.store.postgres.snapshot import snapshot as postgres_snapshot
from gpustackd.store.postgres.store import PostgresStore
from gpustackd.store.postgres.worker_health import WorkerHealthStore

_STARTING = 60.0
"""Seconds that a database in its start or recovery is waited for."""


async def run(settings: Settings, *, embedded: Path | None = None, migrate: bool = False) -> None:
    """The daemon, until SIGTERM or SIGINT. Raises DatabaseUnavailable, WrongRevision or UsageError."""
    # What is known of a fleet lives long and holds no cycles: to look through it often for garbage costs
    # a fifteenth of the processor's time and finds nothing.
    gc.set_threshold(50_000, 20, 100)
    stop = StopSignal()
    async with running([stop]):
        with stop.start_scope:
            async with AsyncExitStack() as stack:
                supervisor = await _build_supervisor(stack, settings, stop, embedded, migrate)
                stop.startup_done()
                await supervisor.run()


# -- the daemon ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelSources:
    """What reads models, and what it asks of the fleet."""

    reader: Reader
    file_locations: FileLocations
    path_probe: PathProbe


@dataclass(frozen=True, slots=True)
class ProcessParts:
    """Parts that outlive sessions."""

    settings: Settings
    identity: ReplicaIdentity
    store: PostgresStore
    fleet_feed: FleetFeed
    models: ModelSources
    wakeups: Wakeups
    replica_wakeups: ReplicaWakeups
    status: DaemonStatus
    reporter: Reporter
    recovery_reporter: RecoveryReporter


async def _build_supervisor(
    stack: AsyncExitStack, settings: Settings, stop: StopSignal, embedded: Path | None, migrate: bool
) -> Supervisor:
    name = settings.replica or f"{socket.gethostname()}-{os.getpid()}"
    logging = start_logging(level=settings.log_level, form=settings.log_format, replica=name)
    stack.callback(logging.close)
    if settings.ignored:
        logging.log.warning("settings.ignored", variables=settings.ignored, reason=IGNORED)
    store, listen_url = await _open_store(stack, settings, name, embedded, migrate)
    check_revision((await _first_look(store, logging.log)).revision)
    metrics = Metrics(version=__version__, replica=name)
    metrics.watch_total(
        "gpustackd_log_lines_dropped", "Log lines that could not be written", lambda: logging.writer.dropped
    )
    reporter = Reporter(logging.log, metrics)
    identity = ReplicaIdentity(uuid4(), name)
    wakeups, replica_wakeups = Wakeups(), ReplicaWakeups()
    listener = Listener(
        listen_url,
        replica=identity.owner.hex,
        probe=store.notify,
        on_wake=_wake_both(wakeups, replica_wakeups),
        on_change=reporter.listening,
    )
    metrics.watch_listener(lambda: listener.status.reconnects, lambda: listener.status.probe_failures)
    status = DaemonStatus(listener.status)
    metrics.watch_gauge(
        "gpustackd_loop_beat_age_seconds", "Since the scheduling loop's last turn", status.beat_age
    )
    fleet_feed = FleetFeed(store, reporter.worker_state)
    parts = ProcessParts(
        settings=settings,
        identity=identity,
        store=store,
        fleet_feed=fleet_feed,
        models=await _open_models(
            stack, settings, reader_options(settings), store, fleet_feed, wakeups.notify
        ),
        wakeups=wakeups,
        replica_wakeups=replica_wakeups,
        status=status,
        reporter=reporter,
        recovery_reporter=RecoveryReporter(reporter, timeouts(settings)),
    )
    systemd = Systemd.from_environment()
    return Supervisor(
        new_session=lambda on_failure: build_session(parts, on_failure),
        services=(_http(parts), listener, Watchdog(systemd, lambda: status.alive), _timers(parts)),
        stop=stop,
        observers=Observers(status, reporter, systemd),
        drop_connections=store.connections.replace_all,
        rng=random.Random(identity.owner.int),
    )


def build_session(parts: ProcessParts, on_failure: Callable[[str, Exception], None]) -> Session:
    """All that works on instances until the database is lost. `on_failure` is called with the name and the
    error of a service that fails."""
    settings, store, feed, reporter = parts.settings, parts.store, parts.fleet_feed, parts.reporter
    queue, work, decisions = InstanceQueue(monotonic), WorkState(), policy(settings)
    catalog = _catalog(settings, store, parts.models, reporter)
    mix = DemandMix(feed, catalog, work.waiting_by_model, monotonic)
    context = SchedulingContext(
        identity=parts.identity,
        lease=settings.lease,
        store=store,
        queue=queue,
        work=work,
        fleet_feed=feed,
        catalog=catalog,
        decider=Decider(feed, parts.models.path_probe, decisions, reporter, mix),
        reporter=reporter,
        tasks=BackgroundTasks(reporter.contended),
        clock=monotonic,
        rng=random.Random(parts.identity.owner.int),
    )
    reporter.metrics.watch(
        queue=lambda: {str(lane): n for lane, n in queue.counts().items()},
        fleet=lambda: (len(feed.fleet.position), len(feed.fleet.slot)),
        held=lambda: work.held_count,
    )
    check = DatabaseCheck(store, check_revision, parts.status.set_health)
    services = [*_scheduling(parts, context), *_recovery(parts, context)]
    return Session(context, check, services, on_failure)


def _scheduling(parts: ProcessParts, context: SchedulingContext) -> Sequence[Service]:
    """The journey of an instance from back to front: what takes work starts before what brings it."""
    settings, models = parts.settings, parts.models
    usage = GpuUsage(
        store=context.store,
        fleet_feed=context.fleet_feed,
        max_age=sample_age(settings),
        wake=parts.wakeups.notify,
        clock=monotonic,
    )
    ranks = _ranks(settings, context.catalog, context.fleet_feed)
    ordering = QueueOrdering(
        ranks,
        catalog=context.catalog,
        wakeups=parts.wakeups,
        tasks=context.tasks,
        clock=monotonic,
        reporter=context.reporter,
    )
    claims = Claims(context)
    refusals = Refusals(context, claims)
    analysis = Analysis(context, claims, usage, max_batches=settings.concurrency, in_order=ranks.decreasing)
    send, receive = anyio.create_memory_object_stream[list[DecidedPlacement]](1)
    replicas = ReplicaSync(
        store=PostgresReplicaStore(parts.store.connections),
        fleet_feed=context.fleet_feed,
        wakeups=parts.replica_wakeups,
        policy=replica_policy(settings),
        reporter=context.reporter,
        clock=monotonic,
        rng=random.Random(parts.identity.owner.int),
    )
    return (
        context.tasks,
        LeaseRenewal(context),
        LeaseSweep(context, parts.wakeups),
        CommitLoop(context, refusals=refusals, batches=receive),
        DecideLoop(
            context,
            claims=claims,
            analysis=analysis,
            refusals=refusals,
            commits=send,
            beat=parts.status.beat,
        ),
        analysis,
        usage,
        replicas,
        Intake(
            context,
            wakeups=parts.wakeups,
            ordering=ordering,
            path_probe=models.path_probe,
            file_locations=models.file_locations,
            replicas_synced=replicas.wait_until_synced,
        ),
    )


def _recovery(parts: ProcessParts, context: SchedulingContext) -> Sequence[Service]:
    waits, connections = timeouts(parts.settings), parts.store.connections
    workers = WorkerHealth(
        WorkerHealthStore(connections, waits), waits, context.fleet_feed, parts.recovery_reporter, monotonic
    )
    recovery = InstanceRecovery(
        health=WorkerHealthStore(connections, waits),
        lifecycle=InstanceRecoveryStore(connections),
        workers=workers,
        timeouts=waits,
        knowledge=PlacementKnowledge(
            context.fleet_feed, context.catalog, parts.models.path_probe, context.decider
        ),
        reporter=parts.recovery_reporter,
        clock=monotonic,
    )
    return workers, recovery


def _http(parts: ProcessParts) -> Service:
    # imported here, as the timers are: `plan` and `explain` start without them
    from gpustackd.daemon.surface.http import HttpPages, HttpServer

    settings, status = parts.settings, parts.status

    def on_listening(address: object) -> None:
        parts.reporter.event(
            "info", "daemon.started", version=__version__, http=str(address), lease=settings.lease,
            rescan_interval=settings.rescan_interval, pool_size=settings.pool_size,
        )  # fmt: skip

    pages = HttpPages(
        registry=parts.reporter.metrics.registry,
        beat_age=status.beat_age,
        beat_limit=BEAT_LIMIT,
        readiness=status.readiness,
        version={"version": __version__, "revision": HEAD},
    )
    return HttpServer(settings.http, pages, on_listening=on_listening, on_error=parts.reporter.page_failed)


def _timers(parts: ProcessParts) -> Service:
    from gpustackd.daemon.timers import Timers

    def rescan() -> None:
        parts.wakeups.rescan()
        parts.replica_wakeups.rescan()

    return Timers(
        rescan=rescan,
        prune=parts.store.prune_decisions,
        rescan_every=parts.settings.rescan_interval,
        status=parts.status,
    )


def _wake_both(wakeups: Wakeups, replica_wakeups: ReplicaWakeups) -> Callable[[Wake], None]:
    def wake(what: Wake) -> None:
        if what.kind in ("replicas", "overflow"):
            replica_wakeups.notify(what)
        if what.kind != "replicas":
            wakeups.notify(what)

    return wake


async def _open_models(
    stack: AsyncExitStack,
    settings: Settings,
    options: ReaderOptions,
    store: Store,
    fleet_feed: FleetFeed,
    wake: Callable[[Wake], None],
) -> ModelSources:
    locations = FileLocations(store, fleet_feed)
    threads = AbandonableThreads()
    reader = await stack.enter_async_context(
        Reader(options, hosts=locations.hosts, known_size=locations.known_size, threads=threads)
    )
    files = WorkerFiles(worker_token(settings), total=PROBE_TOTAL, connect=PROBE_CONNECT)
    stack.push_async_callback(files.aclose)
    return ModelSources(reader, locations, PathProbe(files, locations, threads, monotonic, wake))


async def _open_store(
    stack: AsyncExitStack, settings: Settings, name: str, embedded: Path | None, migrate: bool
) -> tuple[PostgresStore, str]:
    """The store, and the URL to listen on."""
    if embedded is not None:
        url = listen_url = await _start_embedded(stack, embedded)
    else:
        url, listen_url = settings.require_database(), settings.require_listen_database()
    if migrate or embedded is not None:
        from gpustackd.store.postgres.migrate import migrate as bring_up_to_date

        await bring_up_to_date(listen_url)
    store = await PostgresStore.open(url, settings.pool_size, pooled=url != listen_url, replica=name)
    stack.push_async_callback(store.close)
    return store, listen_url


async def _first_look(store: PostgresStore, log: Log) -> DatabaseHealth:
    """What the database says of itself. One that is just starting, or recovers from a crash, is waited for:
    hosts and their database often start together. Raise DatabaseUnavailable."""
    until = monotonic() + _STARTING
    logged = False
    while True:
        try:
            return await store.health()
        except DatabaseUnavailable as error:
            if not error.passing or monotonic() > until:
                raise
            if not logged:
                logged = True
                log.warning("database.lost", reason=f"{error.problem}; waiting {_STARTING:g} s for it")
        await anyio.sleep(0.5)


async def _start_embedded(stack: AsyncExitStack, folder: Path) -> str:
    from gpustackd.store.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(folder)
    await stack.enter_async_context(server)
    print(f"PostgreSQL runs in {folder}; connect with:\n  {server.psql()}", flush=True)
    return server.url()


# -- what if ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def open_snapshot(
    store: Store, settings: Settings, foreign: Mapping[int, int] | None = None
) -> AsyncIterator[Snapshot]:
    """What a daemon with these settings would know of a store; `foreign` is what `foreign_memory` gave.
    Raises DatabaseUnavailable."""
    async with AsyncExitStack() as stack:
        fleet_feed = FleetFeed(store)
        options = replace(reader_options(settings), eager=False)
        models = await _open_models(stack, settings, options, store, fleet_feed, lambda _: None)
        reporter = RemarkCollector()
        catalog = _catalog(settings, store, models, reporter)
        snapshot = Snapshot(
            store,
            fleet_feed=fleet_feed,
            catalog=catalog,
            file_locations=models.file_locations,
            path_probe=models.path_probe,
            ranks=_ranks(settings, catalog, fleet_feed),
            policy=policy(settings),
            reporter=reporter,
        )
        await snapshot.load(foreign)
        yield snapshot


async def foreign_memory(store: Store, settings: Settings) -> Mapping[int, int] | None:
    """Bytes that others hold, by GPU id; None where the settings ignore that. Raises DatabaseUnavailable."""
    max_age = sample_age(settings)
    return None if max_age is None else await store.foreign_memory(max_age)


@asynccontextmanager
async def make_plan(
    url: str, settings: Settings, files: Sequence[Sequence[Document]]
) -> AsyncIterator[tuple[Plan, Mapping[int, tuple[str, str]]]]:
    """What would become of documents, each inner sequence a file of them; and (instance, model) by the id of
    every instance there would be. Raises Refused as `apply` would, DatabaseUnavailable or WrongRevision."""
    async with postgres_snapshot(url, "gpustackd plan") as (source, connection):
        store = await copy_of(source, connection)
        zone = settings.timezone or await connection.fetchval("SHOW timezone")
        hints = {w.id: w.hints for w in await source.waiting(None)}
        foreign = await foreign_memory(source, settings)
    # The database is let go: a hub may take its time, and a large plan does.
    before = list(store.database.model_instances)
    overlay = Overlay(store)
    for documents in files:
        await overlay.write(documents)
    async with open_snapshot(store, settings, foreign) as snapshot:
        plan = await Planner(store, overlay, snapshot, hints).plan(before, zone=zone)
        models = store.database.models
        yield plan, {i.id: (i.name, models[i.model_id].name) for i in store.database.model_instances.values()}


@asynccontextmanager
async def no_garbage_collection() -> AsyncIterator[None]:
    """No garbage is looked for meanwhile: what is known of a large fleet holds no cycles, and to look through
    it again and again while it is read takes longer than to read it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _catalog(
    settings: Settings, store: Store, models: ModelSources, reporter: DecisionReporter
) -> ModelCatalog:
    draft = settings.prefer_draft_weights
    return ModelCatalog(store, models.reader, models.path_probe, reporter, monotonic, count_draft=draft)


def _ranks(settings: Settings, catalog: ModelCatalog, fleet_feed: FleetFeed) -> QueueRanks:
    order = QueueOrder(settings.queue_order)
    return QueueRanks(order, settings.placement_strategy, catalog, fleet_feed)
