"""One moment of the database, for commands that ask what would happen: a store on one read-only transaction.

Everything read through it is of the same moment, and nothing can be written.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gpustackd.store.postgres.connect import Connection, connected
from gpustackd.store.postgres.connections import Connections
from gpustackd.store.postgres.store import PostgresStore

IDLE = "10min"
"""Models may be read over the network meanwhile, and advice takes its time; a command that hangs is ended."""


class _SingleConnection:
    """A pool of the one connection there is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def acquire(self, timeout: float | None = None) -> AsyncIterator[Any]:
        yield self._connection


@asynccontextmanager
async def snapshot(url: str, application_name: str) -> AsyncIterator[tuple[PostgresStore, Connection]]:
    """A store and the connection it stands on, in one REPEATABLE READ, READ ONLY transaction.

    Not for concurrent use: statements run one after another. It may lie idle for `IDLE` between them. Raises
    DatabaseUnavailable or WrongRevision.
    """
    async with (
        connected(url, application_name) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE}'")
        only: Any = _SingleConnection(connection)
        yield PostgresStore(Connections(only, only, url, pooled=True)), connection
