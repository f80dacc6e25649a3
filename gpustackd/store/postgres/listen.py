"""The listening connection: hears wake-ups, proves to itself that it hears, comes back when it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.ports import Wake
from gpustackd.store.postgres.connect import CONNECT_TIMEOUT, SCHEMA, UNREACHABLE, connect


@dataclass(slots=True)
class Hearing:
    """How the listening goes."""

    listening: bool = False
    deaf: bool = False
    """The connection is up, but what it sends to itself does not come."""
    reconnects: int = 0
    probe_failures: int = 0


def parse(payload: str) -> Wake:
    """`kind [id,id,…]` as the triggers write it; anything else is a reason to look at everything."""
    kind, _, rest = payload.partition(" ")
    try:
        ids = tuple(int(x) for x in rest.split(",")) if rest else ()
    except ValueError:
        return Wake("overflow")
    return Wake(kind, ids)


class Listener:
    """A service of the daemon; `hearing` says how it goes.

    `probe` sends a notification over another connection (channel, payload). One that is not heard within
    `probe_timeout` means that this connection is deaf: half-open, or behind a pooler that swallows LISTEN.
    """

    name = "listener"

    def __init__(
        self,
        url: str,
        *,
        replica: str,
        probe: Callable[[str, str], Awaitable[None]],
        on_wake: Callable[[Wake], None],
        on_change: Callable[[Hearing], None] = lambda _: None,
        probe_interval: float = 10.0,
        probe_timeout: float = 5.0,
        retry: float = 0.5,
        retry_most: float = 5.0,
        setup_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self.hearing = Hearing()
        self._url = url
        self._name = f"gpustackd listen {replica}"[:63]
        self._own = f"gpustackd_probe_{replica}".replace("-", "_")[:63]
        self._probe = probe
        self._on_wake = on_wake
        self._on_change = on_change
        self._interval = probe_interval
        self._timeout = probe_timeout
        self._retry = retry
        self._retry_most = retry_most
        self._setup_timeout = setup_timeout
        self._heard = anyio.Event()
        self._lost = anyio.Event()
        self._reported: tuple[bool, bool] | None = None
        """(listening, deaf) as `on_change` was given them last; that it never connected is worth a call too."""

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. After every (re)connect an `overflow` wake asks for one full scan."""
        task_status.started()
        wait = self._retry
        first = True
        while True:
            try:
                with anyio.fail_after(self._setup_timeout):
                    connection = await connect(self._url, application_name=self._name)
            except (DatabaseUnavailable, TimeoutError):
                self.hearing.deaf = False
                self._set(False)
                await anyio.sleep(wait)
                wait = min(wait * 2, self._retry_most)
                continue
            if not first:
                self.hearing.reconnects += 1
            first = False
            try:
                heard = await self._listen(connection)
            except (*UNREACHABLE, asyncpg.PostgresError):  # also: time-outs that a role carries
                heard = False
            finally:
                connection.terminate()
            self._set(False)  # not where we are cancelled: an orderly end is no loss
            wait = self._retry if heard else min(wait * 2, self._retry_most)
            await anyio.sleep(wait)

    async def _listen(self, connection: Any) -> bool:
        """Returns (whether anything was ever heard) once the connection is lost or deaf."""
        self._lost = anyio.Event()
        connection.add_termination_listener(lambda _: self._lost.set())
        with anyio.fail_after(self._setup_timeout):
            schema = await connection.fetchval(SCHEMA)
            await connection.add_listener(f"gpustackd_{schema}"[:63], self._notified)
            await connection.add_listener(self._own, self._probed)
        heard_once = False
        while True:
            if not await self._hears_itself():
                self.hearing.probe_failures += 1
                self._set(False)
                return heard_once
            if not heard_once:
                heard_once = True
                self._set(True)
                self._on_wake(Wake("overflow"))
            with anyio.move_on_after(self._interval):
                await self._lost.wait()
                return heard_once

    async def _hears_itself(self) -> bool:
        self._heard = anyio.Event()
        sent = False
        try:
            with anyio.fail_after(self._timeout):
                await self._probe(self._own, "probe")
                sent = True
                await self._heard.wait()
        except (TimeoutError, DatabaseUnavailable, Contended):
            self.hearing.deaf = sent and not self._lost.is_set()
            return False
        self.hearing.deaf = False
        return not self._lost.is_set()

    def _notified(self, _: Any, __: int, ___: str, payload: object) -> None:
        self._on_wake(parse(str(payload)))

    def _probed(self, *_: object) -> None:
        self._heard.set()

    def _set(self, listening: bool) -> None:
        self.hearing.listening = listening
        if self._reported != (listening, self.hearing.deaf):
            self._reported = listening, self.hearing.deaf
            self._on_change(self.hearing)
