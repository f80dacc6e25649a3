"""Can a daemon work with this database: version, rights, notifications?"""

from __future__ import annotations

import time
from uuid import uuid4

import anyio

from gpustackd.store.postgres.connect import Connection, connect

MIN_VERSION = 14
MAX_VERSION = 18
"""Major versions of PostgreSQL that are supported."""
NOTIFICATION_TIMEOUT = 5.0
"""Seconds."""

_WRITTEN = ("workers", "gpu_devices", "models", "model_instances", "instance_claims", "scheduling_decisions")


async def server_version(connection: Connection) -> str:
    """The server's version, such as `18.6`, without a distribution's suffix."""
    return str(await connection.fetchval("SELECT current_setting('server_version')")).split()[0]


async def is_writable(connection: Connection) -> bool:
    """False on a standby, or where this user's transactions are read-only."""
    return bool(
        await connection.fetchval(
            "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'"
        )
    )


async def tables_without_rights(connection: Connection) -> list[str]:
    """Existing tables of ours that this user may not both read and write."""
    rows = await connection.fetch(
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace"
        " AND relkind = 'r' AND relname = ANY ($1)"
        " AND NOT (has_table_privilege(oid, 'SELECT') AND has_table_privilege(oid, 'INSERT')"
        " AND has_table_privilege(oid, 'UPDATE') AND has_table_privilege(oid, 'DELETE'))",
        list(_WRITTEN),
    )
    return [r["relname"] for r in rows]


async def notification_delay(listen_url: str, sender: Connection) -> float | None:
    """Seconds until a notification sent on `sender` arrived at a connection of its own; None = it did not.

    Raises DatabaseUnavailable where that connection cannot be opened.
    """
    channel = f"gpustackd_check_{uuid4().hex[:12]}"
    heard = anyio.Event()
    listener = await connect(listen_url, application_name="gpustackd check listen")
    try:
        await listener.add_listener(channel, lambda *_: heard.set())
        started = time.perf_counter()
        await sender.execute("SELECT pg_notify($1, '')", channel)
        with anyio.move_on_after(NOTIFICATION_TIMEOUT):
            await heard.wait()
        return time.perf_counter() - started if heard.is_set() else None
    finally:
        await listener.close(timeout=5)
