"""Open one connection, and turn the driver's errors into ours with what to do about them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeAlias

import asyncpg

from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.redaction import mask_url
from gpustackd.store.postgres.jsonb import set_codec
from gpustackd.store.postgres.revision import check_revision, read_revision

CONNECT_TIMEOUT = 10.0

SCHEMA = """
SELECT coalesce((SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                  WHERE c.oid = to_regclass('model_instances')), current_schema())"""
"""The schema that unqualified names lead to: that of our tables, else the one where they would be created."""

Connection: TypeAlias = asyncpg.Connection
"""One connection of the driver; only this package calls more than passes it on."""

CONTENDED = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
"""Errors that mean "another transaction was in the way": nothing was written, and a retry may succeed."""

_CLOSED = (
    ssl.SSLError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # the driver lost track of a connection, such as one cut amid a cancellation
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.ReadOnlySQLTransactionError,
)
UNREACHABLE = (OSError, asyncio.TimeoutError, TimeoutError, *_CLOSED)
"""Errors that mean "the server is not there for us now", as opposed to "this statement is wrong"."""

_PASSING = (asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError)
"""What a server answers that is starting, recovering or stopping."""

_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.UndefinedFunctionError, asyncpg.UndefinedColumnError)


async def connect(
    url: str,
    *,
    application_name: str = "gpustackd",
    lock_timeout: str | None = None,
    statement_timeout: str | None = None,
    pooled: bool = False,
    **options: Any,
) -> Connection:
    """Open one connection from a libpq-style URL (or the PG* variables where it is empty).

    The server ends the session of a client that disappeared without a word, and so frees its locks.
    `pooled`: an external pooler is in between; it rejects such settings and shares its sessions. `options` go
    to asyncpg. Raises DatabaseUnavailable.
    """
    settings = {"application_name": application_name}
    if not pooled:
        settings |= {
            "idle_in_transaction_session_timeout": "15s",
            "tcp_keepalives_idle": "10",
            "tcp_keepalives_interval": "5",
            "tcp_keepalives_count": "3",
        }
    if lock_timeout:
        settings["lock_timeout"] = lock_timeout
    if statement_timeout:
        settings["statement_timeout"] = statement_timeout
    try:
        return await asyncpg.connect(
            dsn=url or None, timeout=CONNECT_TIMEOUT, server_settings=settings, **options
        )
    except (*UNREACHABLE, asyncpg.PostgresError) as error:  # also: rights, options it does not know
        raise unavailable(url, error) from error


@asynccontextmanager
async def connected(
    url: str, application_name: str, *, any_revision: bool = False, **options: Any
) -> AsyncIterator[Connection]:
    """One connection for a command, with jsonb as Python values; closed at the end.

    Raises DatabaseUnavailable, also where the server goes away within the block, and WrongRevision unless
    `any_revision`.
    """
    connection = await connect(url, application_name=application_name, **options)
    try:
        await set_codec(connection)
        if not any_revision:
            check_revision(await read_revision(connection))
        yield connection
    except asyncpg.InsufficientPrivilegeError as error:
        raise forbidden(error) from error
    except (*_CLOSED, ConnectionError) as error:  # other OSErrors in the block are about other things
        raise unavailable(url, error) from error
    finally:
        connection.terminate() if connection.is_closed() else await connection.close(timeout=5)


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Errors of the driver within the block as Contended or DatabaseUnavailable."""
    try:
        yield
    except CONTENDED as error:
        raise contended(error) from error
    except _NO_SCHEMA as error:
        raise DatabaseUnavailable(
            f"the schema is missing or wrong: {error}", "run `gpustackd migrate`"
        ) from error
    except asyncpg.InsufficientPrivilegeError as error:
        raise forbidden(error) from error
    except UNREACHABLE as error:
        raise unavailable(url, error) from error


def contended(error: BaseException) -> Contended:
    """For an error in `CONTENDED`."""
    return Contended(f"another transaction was in the way: {error}")


def forbidden(error: BaseException) -> DatabaseUnavailable:
    """For a right that this user lacks."""
    return DatabaseUnavailable(
        f"the database does not let this user do that: {error}", "grant it, or connect as another user"
    )


def unavailable(url: str, error: BaseException) -> DatabaseUnavailable:
    """For a server that cannot be used. The URL is masked in the message."""
    said = str(error).strip() or type(error).__name__
    translated_error = DatabaseUnavailable(
        f"database not reachable at {mask_url(url) if url else 'the PG* variables'}: {said}",
        "check GPUSTACKD_DATABASE_URL and that PostgreSQL runs and lets this user in",
    )
    translated_error.passing = isinstance(error, _PASSING)
    return translated_error
