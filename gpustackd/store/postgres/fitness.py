"""Is a database fit for a daemon: version, rights, notifications?"""

from __future__ import annotations

import time
from uuid import uuid4

import anyio
import asyncpg

from gpustackd.store.postgres.connect import connect

OLDEST = 14
NEWEST = 18
LISTEN_PATIENCE = 5.0

_WRITTEN = ("workers", "gpu_devices", "models", "model_instances", "instance_claims", "scheduling_decisions")


async def version(connection: asyncpg.Connection) -> str:
    """The server's version, as in `18.6`, without what a distribution writes behind it."""
    return str(await connection.fetchval("SELECT current_setting('server_version')")).split()[0]


async def takes_writes(connection: asyncpg.Connection) -> bool:
    """False on a standby, or where this user's transactions are read-only."""
    return bool(
        await connection.fetchval(
            "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'"
        )
    )


async def denied(connection: asyncpg.Connection) -> list[str]:
    """Tables that are there and that this user may not read and write."""
    rows = await connection.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
        " AND relkind = 'r' AND relname = ANY ($1)"
        " AND NOT (has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')"
        " AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE'))",
        list(_WRITTEN),
    )
    return [r["relname"] for r in rows]


async def hears(listen_url: str, sender: asyncpg.Connection) -> float | None:
    """Seconds until a notification sent on `sender` was heard on a connection of its own; None = never.

    Raise DatabaseUnavailable where that connection cannot be opened.
    """
    channel = f"gpustackd_check_{uuid4().hex[:12]}"
    heard = anyio.Event()
    listener = await connect(listen_url, application_name="gpustackd check listen")
    try:
        await listener.add_listener(channel, lambda *_: heard.set())
        started = time.perf_counter()
        await sender.execute("SELECT pg_notify($1, '')", channel)
        with anyio.move_on_after(LISTEN_PATIENCE):
            await heard.wait()
        return time.perf_counter() - started if heard.is_set() else None
    finally:
        await listener.close(timeout=5)
