"""One way to open a connection: named, with time-outs, and with errors that say what to do."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import asyncpg

from gpustackd.errors import DatabaseUnavailable
from gpustackd.redaction import mask_url

CONNECT_TIMEOUT = 10.0

SCHEMA = """
SELECT coalesce((SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                  WHERE c.oid = to_regclass('model_instances')), current_schema())"""
"""The schema that unqualified names lead to: that of our tables, else the one where they would be made."""

Connection = asyncpg.Connection
"""One connection of the driver, for those who are handed one."""

UNREACHABLE = (
    OSError,
    ssl.SSLError,
    asyncio.TimeoutError,
    TimeoutError,
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
"""Errors that mean "the server is not there for us now", as opposed to "this statement is wrong"."""

_PASSING = (asyncpg.CannotConnectNowError, asyncpg.AdminShutdownError, asyncpg.CrashShutdownError)
"""… and of these those that a server in its start, its recovery or its stop answers with."""


async def connect(
    url: str,
    *,
    application_name: str = "gpustackd",
    lock_timeout: str | None = None,
    statement_timeout: str | None = None,
    pooled: bool = False,
    **more: Any,
) -> asyncpg.Connection:
    """Open one connection from a libpq-style URL (or the PG* variables where it is empty).

    The server is told to end the session of a client that is silently gone, with the locks it holds.
    `pooled`: an external pooler stands in between, which knows no such settings and shares its sessions.
    Raises DatabaseUnavailable.
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
            dsn=url or None, timeout=CONNECT_TIMEOUT, server_settings=settings, **more
        )
    except (*UNREACHABLE, asyncpg.PostgresError) as error:  # also: rights, options it does not know
        raise unavailable(url, error) from error


def unavailable(url: str, error: BaseException) -> DatabaseUnavailable:
    """What people are told when the server cannot be used."""
    said = str(error).strip() or type(error).__name__
    told = DatabaseUnavailable(
        f"database not reachable at {mask_url(url) if url else 'the PG* variables'}: {said}",
        "check GPUSTACKD_DATABASE_URL and that PostgreSQL runs and lets this user in",
    )
    told.passing = isinstance(error, _PASSING)
    return told
