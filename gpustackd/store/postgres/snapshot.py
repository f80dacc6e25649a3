"""One moment of the database, for commands that ask what would happen: a store on one read-only transaction.

All that is read through it is of the same moment, and nothing can be written: the transaction is READ ONLY.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gpustackd.store.postgres.inventory import Connection, connected
from gpustackd.store.postgres.store import PostgresStore

IDLE = "10min"
"""Models may be read over the network meanwhile, and advice takes its time; a command that hangs ends."""


class _OneConnection:
    """Stands where the store expects a pool; whoever acquires gets the one connection there is."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @asynccontextmanager
    async def acquire(self, timeout: float | None = None) -> AsyncIterator[Any]:
        yield self._connection


@asynccontextmanager
async def snapshot(url: str, application_name: str) -> AsyncIterator[tuple[PostgresStore, Connection]]:
    """A store and the connection it stands on, in one REPEATABLE READ, READ ONLY transaction.

    Statements go one after another: not for concurrent use. It may lie idle for `IDLE` between them.
    Raise DatabaseUnavailable or WrongRevision.
    """
    async with (
        connected(url, application_name) as connection,
        connection.transaction(isolation="repeatable_read", readonly=True),
    ):
        await connection.execute(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE}'")
        only: Any = _OneConnection(connection)
        yield PostgresStore(only, only, url, pooled=True), connection
