"""Worker health: silent workers are NOT_READY, what was on lost ones is placed elsewhere.

Every replica sweeps for itself, by the database's clock; each statement says what it expects, so that one of
them moves an instance and the others find it moved.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.surface.reporter import RecoveryReporter
from gpustackd.domain.timeouts import ObservationPeriod, Timeouts
from gpustackd.store.postgres.worker_health import BATCH, WorkerHealthStore


class WorkerHealth:
    """A new one begins with every session: what was not watched does not count."""

    name = "worker health"

    def __init__(
        self,
        store: WorkerHealthStore,
        timeouts: Timeouts,
        fleet_feed: FleetFeed,
        reporter: RecoveryReporter,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._timeouts = timeouts
        self._fleet_feed = fleet_feed
        self._reporter = reporter
        self._clock = clock
        self._watch = ObservationPeriod(timeouts.max_gap)
        self.draining = 0
        """Workers that are to be emptied, as of the last sweep."""

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            # One that does not succeed is not a sweep: if it goes on like this, the watch begins anew.
            with self._reporter.contained(self.name):
                await self._sweep()
            await anyio.sleep(self._timeouts.sweep_interval)

    async def _sweep(self) -> None:
        """One sweep, and as many moves as follow from it."""
        watched = self._watch.begin(self._clock(), await self._store.clock())
        census = await self._store.sweep(watched)
        self.draining = census.draining
        if census.silent:
            await self._fleet_feed.refresh()
        self._reporter.census(census, watched)
        while census.down:
            moved = await self._store.evict_from_lost_workers(watched)
            self._reporter.moved(moved)
            if len(moved) < BATCH:
                break
        self._watch.complete()
