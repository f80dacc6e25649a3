"""The loops that look after workers and placed instances, made anew for each session."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from gpustackd.daemon.reconcile.instance_recovery import InstanceRecovery
from gpustackd.daemon.reconcile.worker_health import WorkerHealth
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.recovery_reporter import RecoveryReporter
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.timeouts import Timeouts
from gpustackd.store.postgres.health import WorkerHealthStore
from gpustackd.store.postgres.lifecycle import InstanceLifecycleStore
from gpustackd.store.postgres.store import PostgresStore

Loop = Callable[[], Coroutine[Any, Any, None]]


class RecoveryLoops:
    """One per process: its metrics outlive sessions."""

    def __init__(self, store: PostgresStore, windows: Timeouts, paths: PathProbe, reports: Reporter) -> None:
        self._store = store
        self._lifecycle = InstanceLifecycleStore(store)
        self._windows = windows
        self._paths = paths
        self._reports = RecoveryReporter(reports, windows)

    def loops(self, view: FleetFeed, catalogue: ModelCatalog, judge: Decider) -> Sequence[Loop]:
        """What a session runs until it ends."""
        workers = WorkerHealth(
            WorkerHealthStore(self._store, self._windows), self._windows, view, self._reports, monotonic
        )
        aftercare = InstanceRecovery(
            health=WorkerHealthStore(self._store, self._windows),
            lifecycle=self._lifecycle,
            workers=workers,
            windows=self._windows,
            view=view,
            catalogue=catalogue,
            judge=judge,
            paths=self._paths,
            reports=self._reports,
            clock=monotonic,
        )
        return workers.run, aftercare.run
