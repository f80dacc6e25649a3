"""Worker health: silent workers are NOT_READY, what was on lost ones is placed elsewhere.

Every daemon sweeps for itself, by the database's clock; each statement states what it expects, so that one of
them moves an instance and the others find it moved.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.surface.recovery_reporter import RecoveryReporter
from gpustackd.domain.timeouts import Timeouts, Watch
from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.store.postgres.health import LIMIT, WorkerHealthStore


class WorkerHealth:
    """Runs until cancelled. A new one begins with every session: what was not watched does not count."""

    def __init__(
        self,
        health: WorkerHealthStore,
        windows: Timeouts,
        view: FleetFeed,
        reports: RecoveryReporter,
        clock: Callable[[], float],
    ) -> None:
        self._health = health
        self._windows = windows
        self._view = view
        self._reports = reports
        self._clock = clock
        self._watch = Watch(windows.gap)
        self.draining = 0
        """Workers that are to be emptied, as of the last sweep."""

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except Contended:
                # Not a look: if it goes on like this, the watch begins anew.
                self._reports.contended("worker health")
            except DatabaseUnavailable:
                raise
            except Exception as error:  # a row that trips this must not stop what places instances
                self._reports.unexpected("worker health", error)
            await anyio.sleep(self._windows.sweep)

    async def look(self) -> None:
        """One sweep, and as many moves as follow from it."""
        watched = self._watch.look(self._clock(), await self._health.clock())
        census = await self._health.sweep(watched)
        self.draining = census.draining
        if census.silent:
            await self._view.refresh()
        self._reports.census(census, watched)
        while census.down:
            moved = await self._health.leave_workers(watched)
            self._reports.moved(moved)
            if len(moved) < LIMIT:
                break
        self._watch.done()
