"""Memory that others hold on GPUs, kept in the fleet where the settings say that it counts.

Usage samples raise no version and wake nobody: they are read now and then, and before decisions where the
last read is not of this moment. Memory that was given back wakes what waits, as any freed capacity does.
What an instance of ours held counts as others' until a sample shows that its process is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.errors import Contended
from gpustackd.ports import Store, Wake

_EVERY = 5.0
"""Seconds between reads while nothing is decided."""
_FEW = 2000
"""GPUs up to which the samples are read before every batch of decisions."""
_GOOD_FOR = 1 / 80_000
"""Seconds, for each GPU of a larger fleet, for which a read is good enough: half a second at 40,000, where
a read takes a tenth of that."""


class GpuUsage:
    """`max_age`: seconds after which a sample is no longer trusted; None = others' memory does not count."""

    name = "GPU usage"

    def __init__(
        self,
        *,
        store: Store,
        fleet_feed: FleetFeed,
        max_age: float | None,
        wake: Callable[[Wake], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._fleet_feed = fleet_feed
        self._max_age = max_age
        self._wake = wake
        self._clock = clock
        self._next = 0.0
        self._reading = anyio.Lock()

    async def refresh(self) -> None:
        """Read the samples, unless the fleet is large and that was done just now."""
        if self._max_age is None:
            return
        async with self._reading:
            began = self._clock()
            if began < self._next:
                return
            try:
                held = await self._store.foreign_memory(self._max_age)
            except Contended:
                return  # what is known serves for the moment
            gpus = len(self._fleet_feed.fleet.slot)
            self._next = began + gpus * _GOOD_FOR if gpus > _FEW else 0.0
            if self._fleet_feed.fleet.set_foreign(held):
                self._wake(Wake("capacity"))

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled; returns at once where others' memory does not count."""
        task_status.started()
        while self._max_age is not None:
            await self.refresh()
            await anyio.sleep(_EVERY)
