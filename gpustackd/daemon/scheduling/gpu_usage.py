"""Memory that others hold on cards, kept in the view where the settings say that it counts.

Usage samples raise no version and wake nobody: they are read now and then, and before decisions where the
last look is not of this moment. Memory that was given back wakes what waits, as any freed capacity does.
What an instance of ours held counts as others' until a sample shows that its process is gone.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.errors import Contended
from gpustackd.ports import Store, Wake

_EVERY = 5.0
"""Seconds between looks while nothing is decided."""
_FEW = 2000
"""GPUs up to which the samples are read before every batch of decisions."""
_GOOD_FOR = 1 / 80_000
"""Seconds, for each GPU of a larger fleet, for which a look is good enough: half a second at 40,000, where
a look takes a tenth of that."""


class GpuUsage:
    """`fresh`: seconds after which a sample is not trusted any more; None = others' memory does not count."""

    def __init__(
        self,
        *,
        store: Store,
        view: FleetFeed,
        fresh: float | None,
        tell: Callable[[Wake], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._view = view
        self._fresh = fresh
        self._tell = tell
        self._clock = clock
        self._next = 0.0
        self._looking = anyio.Lock()

    async def look(self) -> None:
        """Read the samples, unless the fleet is large and that was done just now."""
        if self._fresh is None:
            return
        async with self._looking:
            began = self._clock()
            if began < self._next:
                return
            try:
                held = await self._store.foreign_memory(self._fresh)
            except Contended:
                return  # what is known serves for the moment
            gpus = len(self._view.fleet.slot)
            self._next = began + gpus * _GOOD_FOR if gpus > _FEW else 0.0
            if self._view.fleet.set_foreign(held):
                self._tell(Wake("capacity"))

    async def watch(self) -> None:
        """Until cancelled; returns at once where others' memory does not count."""
        while self._fresh is not None:
            await self.look()
            await anyio.sleep(_EVERY)
