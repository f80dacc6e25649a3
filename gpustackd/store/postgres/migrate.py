"""Bring the schema to a revision: under a lock, each step in its own transaction; many may run at once."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import asyncpg
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection, NullPool
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine

from gpustackd.errors import DatabaseUnavailable, UsageError
from gpustackd.store.postgres.connect import connect, unavailable
from gpustackd.store.postgres.revision import HEAD, REVISIONS, check_revision

T = TypeVar("T")

LOCK_TIMEOUT = "3s"
"""How long a DDL statement waits for a table lock, with live traffic queued behind it, before it gives up."""

_ATTEMPTS = 40
_NOT_AVAILABLE = {"55P03", "40P01"}
_REFUSED = {
    "42501": "grant this user CREATE on the schema, or migrate as its owner",
    "25006": "connect to the primary: a standby cannot be changed",
}


_GONE = (
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    ConnectionError,
)


def _state(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None) or ""


def scripts() -> Path:
    """The folder of migrations: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise UsageError("the migrations of gpustackd are missing", "reinstall the package")


def _config(output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output) if output else Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    return config


async def on_connection(url: str, work: Callable[[Connection], T], *, lock_timeout: str = LOCK_TIMEOUT) -> T:
    """Run synchronous SQLAlchemy work on one connection of its own."""

    async def make() -> asyncpg.Connection:
        return await connect(
            url, application_name="gpustackd migrate", lock_timeout=lock_timeout, statement_timeout="0"
        )

    engine = create_async_engine("postgresql+asyncpg://", async_creator=make, poolclass=NullPool)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(work)
    finally:
        await engine.dispose()


def _current(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


async def current(url: str) -> str | None:
    """The revision of the schema, None where there is none."""
    return await on_connection(url, _current)


def _move(to: str, connection: Connection) -> None:
    config = _config()
    config.attributes["connection"] = connection
    script = ScriptDirectory.from_config(config)
    now = _current(connection)
    connection.rollback()
    if now is not None and now not in REVISIONS:
        check_revision(now)
    try:
        target = script.get_revision(to) if to != "base" else None
    except CommandError as error:
        raise UsageError(f"there is no revision {to!r}: {error}", f"the newest is {HEAD}") from None
    below = {s.revision for s in script.iterate_revisions(now, "base")} if now else set()
    if target is None or (target.revision in below and target.revision != now):
        command.downgrade(config, to)
    else:
        command.upgrade(config, to)
    connection.commit()


async def migrate(
    url: str, to: str = "head", *, say: Callable[[str], None] = lambda _: None
) -> tuple[str | None, str | None]:
    """Move the schema to `to`; others that try at the same time wait. Returns (before, after).

    Raises DatabaseUnavailable, WrongRevision (newer than this build) or UsageError (no such revision or
    schema).
    If it is killed, complete steps remain; the next run continues from there.
    """
    try:
        return await _migrate(url, to, say)
    except DBAPIError as error:
        if _state(error) in _REFUSED:
            raise DatabaseUnavailable(
                f"the database refuses to change: {error.orig}", _REFUSED[_state(error)]
            ) from None
        if error.connection_invalidated:
            raise unavailable(url, error.orig or error) from None
        raise
    except _GONE as error:
        raise unavailable(url, error) from None


async def _migrate(url: str, to: str, say: Callable[[str], None]) -> tuple[str | None, str | None]:
    lock = await connect(url, application_name="gpustackd migrate lock", statement_timeout="0")
    try:
        if await lock.fetchval("SELECT current_schema()") is None:
            path = await lock.fetchval("SHOW search_path")
            raise UsageError(
                f"no schema of the search_path ({path}) exists in this database", "create it, then try again"
            )
        key = "hashtextextended('gpustackd migrate ' || current_schema(), 0)"
        waited = False
        while not await lock.fetchval(f"SELECT pg_try_advisory_lock({key})"):
            if not waited:
                say("another gpustackd migrates this database; waiting for it")
            waited = True
            # Polled, not queued: a queued lock would hold a snapshot and block index builds of the other.
            await anyio.sleep(0.2)
        before = await current(url)
        if to == "head" and before == HEAD:
            return before, before
        for attempt in range(_ATTEMPTS):
            try:
                await on_connection(url, partial(_move, to))
                break
            except DBAPIError as error:
                if _state(error) not in _NOT_AVAILABLE or attempt == _ATTEMPTS - 1:
                    raise
                say("a table is in use; trying again")
                await anyio.sleep(min(0.1 * 2**attempt, 2))
        return before, await current(url)
    finally:
        await lock.close()


def sql(to: str = "head") -> str:
    """The statements that lead from an empty database to `to`."""
    output = io.StringIO()
    command.upgrade(_config(output), to, sql=True)
    return output.getvalue()
