"""The listening connection: receives notifications, probes itself, and reconnects when it is lost."""

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
class ListenerStatus:
    """Whether notifications arrive, and what went wrong so far."""

    listening: bool = False
    deaf: bool = False
    """The connection is up, but its own probes do not arrive."""
    reconnects: int = 0
    probe_failures: int = 0


def parse_notification(payload: str) -> Wake:
    """`kind [id,id,…]` as the triggers write it; anything else asks for a full scan."""
    kind, _, rest = payload.partition(" ")
    try:
        ids = tuple(int(x) for x in rest.split(",")) if rest else ()
    except ValueError:
        return Wake("overflow")
    return Wake(kind, ids)


class Listener:
    """A service of the daemon; `status` says how it goes.

    `probe` sends a notification over another connection (channel, payload). Where it does not arrive within
    `probe_timeout` seconds, this connection is deaf: half-open, or behind a pooler that swallows LISTEN.
    """

    name = "listener"

    def __init__(
        self,
        url: str,
        *,
        replica: str,
        probe: Callable[[str, str], Awaitable[None]],
        on_wake: Callable[[Wake], None],
        on_change: Callable[[ListenerStatus], None] = lambda _: None,
        probe_interval: float = 10.0,
        probe_timeout: float = 5.0,
        retry: float = 0.5,
        max_retry: float = 5.0,
        setup_timeout: float = CONNECT_TIMEOUT,
    ) -> None:
        self.status = ListenerStatus()
        self._url = url
        self._name = f"gpustackd listen {replica}"[:63]
        self._own = f"gpustackd_probe_{replica}".replace("-", "_")[:63]
        self._probe = probe
        self._on_wake = on_wake
        self._on_change = on_change
        self._interval = probe_interval
        self._timeout = probe_timeout
        self._retry = retry
        self._max_retry = max_retry
        self._setup_timeout = setup_timeout
        self._probe_received = anyio.Event()
        self._lost = anyio.Event()
        self._reported: tuple[bool, bool] | None = None
        """(listening, deaf) of the last call of `on_change`; None = none yet, so that a first failure is
        reported too."""

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. After every (re)connect an `overflow` wake asks for one full scan."""
        task_status.started()
        wait = self._retry
        first = True
        while True:
            try:
                with anyio.fail_after(self._setup_timeout):
                    connection = await connect(self._url, application_name=self._name)
            except (DatabaseUnavailable, TimeoutError):
                self.status.deaf = False
                self._set(False)
                await anyio.sleep(wait)
                wait = min(wait * 2, self._max_retry)
                continue
            if not first:
                self.status.reconnects += 1
            first = False
            try:
                received = await self._listen(connection)
            except (*UNREACHABLE, asyncpg.PostgresError):  # also: timeouts set for this role
                received = False
            finally:
                connection.terminate()
            self._set(False)  # not reached when cancelled: an orderly end is no loss
            wait = self._retry if received else min(wait * 2, self._max_retry)
            await anyio.sleep(wait)

    async def _listen(self, connection: Any) -> bool:
        """Returns once the connection is lost or deaf: whether anything was ever received."""
        self._lost = anyio.Event()
        connection.add_termination_listener(lambda _: self._lost.set())
        with anyio.fail_after(self._setup_timeout):
            schema = await connection.fetchval(SCHEMA)
            await connection.add_listener(f"gpustackd_{schema}"[:63], self._notified)
            await connection.add_listener(self._own, self._probed)
        received_once = False
        while True:
            if not await self._receives_probe():
                self.status.probe_failures += 1
                self._set(False)
                return received_once
            if not received_once:
                received_once = True
                self._set(True)
                self._on_wake(Wake("overflow"))
            with anyio.move_on_after(self._interval):
                await self._lost.wait()
                return received_once

    async def _receives_probe(self) -> bool:
        self._probe_received = anyio.Event()
        sent = False
        try:
            with anyio.fail_after(self._timeout):
                await self._probe(self._own, "probe")
                sent = True
                await self._probe_received.wait()
        except (TimeoutError, DatabaseUnavailable, Contended):
            self.status.deaf = sent and not self._lost.is_set()
            return False
        self.status.deaf = False
        return not self._lost.is_set()

    def _notified(self, _: Any, __: int, ___: str, payload: object) -> None:
        self._on_wake(parse_notification(str(payload)))

    def _probed(self, *_: object) -> None:
        self._probe_received.set()

    def _set(self, listening: bool) -> None:
        self.status.listening = listening
        if self._reported != (listening, self.status.deaf):
            self._reported = listening, self.status.deaf
            self._on_change(self.status)
