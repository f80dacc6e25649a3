"""The daemon's connections: one bounded pool, and one connection apart for commits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import asyncpg

from gpustackd.store.postgres.connect import CONNECT_TIMEOUT, UNREACHABLE, connect, translated, unavailable
from gpustackd.store.postgres.jsonb import set_codec

# Timeouts so far below the server's deadlock_timeout that a user's statement which waits for us sees us gone
# before the server looks for a cycle: it is always the daemon that gives way. A commit is one statement, and
# the flush to disk at its end does not count.
COMMIT_LIMITS = (
    "SELECT set_config('lock_timeout', (d * 0.3)::int::text, $1::text::bool),"
    " set_config('statement_timeout', (d * 0.8)::int::text, $1::text::bool)"
    " FROM (SELECT extract(epoch FROM current_setting('deadlock_timeout')::interval) * 1000 AS d) t"
)
COMMAND_TIMEOUT = 40.0
"""Seconds until a statement without an answer counts as a lost server; above every statement timeout."""


class Connections:
    """Two pools on one database. Open with `Connections.open`, end with `close`."""

    def __init__(self, pool: asyncpg.Pool, committing: asyncpg.Pool, url: str, pooled: bool) -> None:
        self._pool = pool
        self._committing = committing
        self._url = url
        self.pooled = pooled
        """Whether an external pooler is in between."""

    @classmethod
    async def open(cls, url: str, size: int = 5, *, pooled: bool = False, replica: str = "") -> Self:
        """Pools of `size` connections in all; none is opened before its first use.

        `pooled`: an external pooler is in between, so no prepared statements are kept. Raises
        DatabaseUnavailable.
        """
        name = f"gpustackd {replica}".strip()[:63]

        async def make(*_: Any, **options: Any) -> asyncpg.Connection:
            return await connect(url, application_name=name, pooled=pooled, **options)

        async def prepare(connection: Any) -> None:
            await set_codec(connection)
            if not pooled:  # a session of ours alone
                await connection.execute("SET lock_timeout = '5s'; SET statement_timeout = '30s'")

        async def prepare_commits(connection: Any) -> None:
            if not pooled:
                await connection.execute(COMMIT_LIMITS, "false")

        async def keep(_: Any) -> None:
            """Instead of asyncpg's reset at each release: its RESET ALL would undo the timeouts above."""

        async def pool(connections: int, init: Any) -> asyncpg.Pool:
            return await asyncpg.create_pool(
                min_size=0,
                max_size=connections,
                connect=make,
                init=init,
                reset=keep,
                command_timeout=COMMAND_TIMEOUT,
                max_inactive_connection_lifetime=300,
                **({"statement_cache_size": 0} if pooled else {}),
            )

        try:
            return cls(await pool(max(size - 1, 1), prepare), await pool(1, prepare_commits), url, pooled)
        except UNREACHABLE as error:
            raise unavailable(url, error) from error

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Any]:
        """A connection with jsonb as Python values. Raises Contended or DatabaseUnavailable."""
        with translated(self._url):
            async with self._pool.acquire(timeout=CONNECT_TIMEOUT) as connection:
                yield connection

    @asynccontextmanager
    async def acquire_for_commit(self) -> AsyncIterator[Any]:
        """The connection for commits, with jsonb as text. Raises Contended or DatabaseUnavailable."""
        with translated(self._url):
            async with self._committing.acquire(timeout=CONNECT_TIMEOUT) as connection:
                yield connection

    async def fetch(self, sql: str, *arguments: Any) -> list[Any]:
        """Rows of one statement. Raises Contended or DatabaseUnavailable."""
        async with self.acquire() as connection:
            rows: list[Any] = await connection.fetch(sql, *arguments)
            return rows

    async def fetchval(self, sql: str, *arguments: Any) -> Any:
        """First value of the first row; None where there is no row. Raises as `fetch`."""
        async with self.acquire() as connection:
            return await connection.fetchval(sql, *arguments)

    async def replace_all(self) -> None:
        """Replace every connection at its next use, after the server was gone."""
        await self._pool.expire_connections()
        await self._committing.expire_connections()

    async def close(self) -> None:
        """Give running statements 2 seconds, then cut the connections."""
        for pool in (self._pool, self._committing):
            with anyio.move_on_after(2, shield=True) as scope:
                await pool.close()
            if scope.cancelled_caught:
                pool.terminate()
