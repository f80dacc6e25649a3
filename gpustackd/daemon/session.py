"""A session: everything that works on instances between two losses of the database.

When the database is lost the session ends as a whole, whatever it was doing; the next one starts from the
rows. Nothing of a session is worth more than what the rows say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.service import Service, running
from gpustackd.errors import Contended, DatabaseUnavailable, WrongRevision
from gpustackd.ports import DatabaseHealth, Store

_CHECK_EVERY = 2.0
_LAST_WORK = 5.0
"""Seconds that a stop waits for work in progress; together with handing back it stays below 10."""
_HAND_BACK = 3.0


class DatabaseCheck:
    """Whether the database answers, is writable and has our revision; a session ends when it does not."""

    name = "database check"

    def __init__(
        self,
        store: Store,
        check_revision: Callable[[str | None], None],
        on_health: Callable[[DatabaseHealth], None],
    ) -> None:
        """`check_revision` raises WrongRevision."""
        self._store = store
        self._check_revision = check_revision
        self._on_health = on_health

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Raise DatabaseUnavailable; ready after the first check."""
        await self._check()
        task_status.started()
        while True:
            await anyio.sleep(_CHECK_EVERY)
            await self._check()

    async def _check(self) -> None:
        health = await self._store.health()
        try:
            self._check_revision(health.revision)
        except WrongRevision as error:
            raise DatabaseUnavailable(str(error)) from error
        if not health.writable:
            raise DatabaseUnavailable("the database is read-only", "point at the primary server")
        self._on_health(health)


class Session:
    """Build one per stretch; `run` returns after a stop and raises what ended it."""

    def __init__(
        self,
        context: SchedulingContext,
        database_check: DatabaseCheck,
        services: Sequence[Service],
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        """`services` start in this order, after the database was checked and the fleet was read."""
        self._owner = context.identity.owner
        self._store = context.store
        self._queue = context.queue
        self._work = context.work
        self._fleet_feed = context.fleet_feed
        self._database_check = database_check
        self._services = services
        self._on_failure = on_failure

    async def run(self, stop: anyio.Event, started: Callable[[], None]) -> None:
        """Work until `stop` is set, then finish or hand back what is in progress. Raise DatabaseUnavailable,
        or what a service raised that could not go on."""
        async with running([self._database_check], self._on_failure):
            await self._store.hand_back(self._owner)
            await self._fleet_feed.start()
            async with running(self._services, self._on_failure):
                started()
                await stop.wait()
                self._queue.close()
                with anyio.move_on_after(_LAST_WORK):
                    await self._work.finished()

    async def hand_back(self) -> int:
        """Give back every claim; returns how many. A database that is gone will see the leases end."""
        with suppress(DatabaseUnavailable, Contended), anyio.move_on_after(_HAND_BACK, shield=True):
            return len(await self._store.hand_back(self._owner))
        return 0
