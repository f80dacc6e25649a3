"""The loops that look after workers and placed instances, made anew for each session."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from time import monotonic
from typing import Any

from gpustackd.daemon.aftercare import Aftercare
from gpustackd.daemon.care_reports import CareReports
from gpustackd.daemon.catalogue import Catalogue
from gpustackd.daemon.health import WorkerHealth
from gpustackd.daemon.judge import Judge
from gpustackd.daemon.path_probe import PathProbe
from gpustackd.daemon.reports import Reports
from gpustackd.daemon.view import View
from gpustackd.domain.windows import Windows
from gpustackd.store.health import Health
from gpustackd.store.lifecycle import Lifecycle
from gpustackd.store.postgres import PostgresStore

Loop = Callable[[], Coroutine[Any, Any, None]]


class Care:
    """One per process: its metrics outlive sessions."""

    def __init__(self, store: PostgresStore, windows: Windows, paths: PathProbe, reports: Reports) -> None:
        self._store = store
        self._lifecycle = Lifecycle(store)
        self._windows = windows
        self._paths = paths
        self._reports = CareReports(reports, windows)

    def loops(self, view: View, catalogue: Catalogue, judge: Judge) -> Sequence[Loop]:
        """What a session runs until it ends."""
        workers = WorkerHealth(
            Health(self._store, self._windows), self._windows, view, self._reports, monotonic
        )
        aftercare = Aftercare(
            health=Health(self._store, self._windows),
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
