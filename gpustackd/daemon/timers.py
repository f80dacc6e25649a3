"""What a replica does by the clock: full scans, and pruning of old decision records."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from gpustackd.daemon.status import DEAF_RESCAN_EVERY, DaemonStatus
from gpustackd.errors import Contended, DatabaseUnavailable

_PRUNE_EVERY = 1800.0
_PRUNES_MAX = 1000


class Timers:
    """Full scans come with jitter, so that replicas do not scan together, and more often while no
    notification is heard."""

    name = "timers"

    def __init__(
        self,
        *,
        rescan: Callable[[], None],
        prune: Callable[[], Awaitable[int]],
        rescan_every: float,
        status: DaemonStatus,
    ) -> None:
        """`prune` removes some old records and returns how many; `rescan_every` in seconds."""
        self._rescan = rescan
        self._prune = prune
        self._rescan_every = rescan_every
        self._status = status

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        scheduler = AsyncIOScheduler(
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None}
        )
        every = self._rescan_every
        scheduler.add_job(self._rescan, "interval", seconds=every, jitter=max(1, int(every / 20)))
        if every > DEAF_RESCAN_EVERY:
            scheduler.add_job(self._rescan_when_deaf, "interval", seconds=DEAF_RESCAN_EVERY)
        scheduler.add_job(self._prune_records, "interval", seconds=_PRUNE_EVERY, jitter=int(_PRUNE_EVERY / 4))
        scheduler.start()
        try:
            task_status.started()
            await anyio.sleep_forever()
        finally:
            scheduler.shutdown(wait=False)

    def _rescan_when_deaf(self) -> None:
        if not self._status.listener.listening:
            self._rescan()

    async def _prune_records(self) -> None:
        """In small bites; what does not work now is left for the next time."""
        with suppress(DatabaseUnavailable, Contended):
            for _ in range(_PRUNES_MAX):
                if not await self._prune():
                    return
                await anyio.sleep(0.2)
