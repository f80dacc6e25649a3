"""Connections to PostgreSQL: one bounded pool, one connection apart for commits, errors turned into ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import asyncpg

from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.store.postgres.connect import CONNECT_TIMEOUT, UNREACHABLE, connect, unavailable
from gpustackd.store.postgres.jsonb import set_codec

_CONTENDED = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.UndefinedFunctionError, asyncpg.UndefinedColumnError)

# Time-outs so far below the server's deadlock time-out that a user's statement which waits for us sees us
# gone before it looks for a cycle: it is always the daemon that yields. A commit is one statement, and the
# flush to disk at its end does not count.
COMMIT_LIMITS = (
    "SELECT set_config('lock_timeout', (d * 0.3)::int::text, $1::text::bool),"
    " set_config('statement_timeout', (d * 0.8)::int::text, $1::text::bool)"
    " FROM (SELECT extract(epoch FROM current_setting('deadlock_timeout')::interval) * 1000 AS d) t"
)
COMMAND_TIMEOUT = 40.0
"""Seconds until a statement without an answer counts as a lost server; above every statement time-out."""


class Connections:
    """Two pools on one database; what opens them is `open`."""

    def __init__(self, pool: asyncpg.Pool, committing: asyncpg.Pool, url: str, pooled: bool) -> None:
        self._pool = pool
        self._committing = committing
        self._url = url
        self._pooled = pooled

    @classmethod
    async def open(cls, url: str, size: int = 5, *, pooled: bool = False, replica: str = "") -> Self:
        """Connect; `pooled` = an external pooler stands in between (no prepared statements kept).

        Raises DatabaseUnavailable.
        """
        name = f"gpustackd {replica}".strip()[:63]

        async def make(*_: Any, **more: Any) -> asyncpg.Connection:
            return await connect(url, application_name=name, pooled=pooled, **more)

        async def prepare(connection: Any) -> None:
            await set_codec(connection)
            if not pooled:  # a session of ours alone
                await connection.execute("SET lock_timeout = '5s'; SET statement_timeout = '30s'")

        async def prepare_commits(connection: Any) -> None:
            if not pooled:
                await connection.execute(COMMIT_LIMITS, "false")

        async def keep(_: Any) -> None:
            """Instead of asyncpg's reset at each release: its RESET ALL would undo the time-outs above."""

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

    async def close(self) -> None:
        """Give running statements a moment, then cut the connections."""
        for pool in (self._pool, self._committing):
            with anyio.move_on_after(2, shield=True) as scope:
                await pool.close()
            if scope.cancelled_caught:
                pool.terminate()

    async def drop_connections(self) -> None:
        """Replace every connection at its next use (after the server was gone)."""
        await self._pool.expire_connections()
        await self._committing.expire_connections()

    @asynccontextmanager
    async def connection(self, *, committing: bool = False) -> AsyncIterator[Any]:
        """A connection of the pool, with errors turned into ours."""
        pool = self._committing if committing else self._pool
        try:
            async with pool.acquire(timeout=CONNECT_TIMEOUT) as connection:
                yield connection
        except _CONTENDED as error:
            raise Contended(f"the database made us yield: {error}") from error
        except _NO_SCHEMA as error:
            raise DatabaseUnavailable(
                f"the schema is missing or wrong: {error}", "run `gpustackd migrate`"
            ) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise DatabaseUnavailable(
                f"the database does not let this user do that: {error}",
                "grant it, or connect as another user",
            ) from error
        except UNREACHABLE as error:
            raise unavailable(self._url, error) from error

    async def _fetch(self, sql: str, *arguments: Any) -> list[Any]:
        async with self.connection() as connection:
            found: list[Any] = await connection.fetch(sql, *arguments)
            return found
