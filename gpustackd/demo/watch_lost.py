"""What somebody who watches a worker fall silent and return writes and sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from gpustackd.demo.watch import LOOK
from gpustackd.store.postgres.connect import Connection

_LEAST = """
SELECT w.id, w.name, array_agg(DISTINCT k.instance_id) AS ids, array_agg(DISTINCT i.name) AS names
  FROM workers w JOIN instance_claims k ON k.worker_id = w.id JOIN model_instances i ON i.id = k.instance_id
 WHERE w.state = 'READY'
 GROUP BY w.id, w.name HAVING bool_and(i.distributed_servers IS NULL) ORDER BY sum(k.vram), w.id LIMIT 1"""
_SEEN = """
SELECT (SELECT state FROM workers WHERE id = $1) AS worker,
       (SELECT state_message FROM workers WHERE id = $1) AS message,
       count(*) FILTER (WHERE state = 'UNREACHABLE') AS unreachable,
       bool_and(worker_id IS NOT NULL AND worker_id <> $1) AS elsewhere,
       array_agg(name || ' on ' || coalesce(worker_name, 'none') ORDER BY name) AS places
  FROM model_instances WHERE id = ANY ($2::bigint[])"""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that fell silent; seconds since its last heartbeat, None = it did not happen in time."""

    worker: str
    instances: tuple[str, ...]
    not_ready: float | None
    message: str
    unreachable: int
    """Of its instances were marked so."""
    elsewhere: float | None
    places: tuple[str, ...]
    back: float | None
    """From the heartbeat after that until it was READY."""


async def lose_a_worker(connection: Connection, patience: float) -> Lost | None:
    """Let the worker with the least booked run what it has, beat once and fall silent; when all is elsewhere
    it beats again. None where no worker has anything."""
    row = await connection.fetchrow(_LEAST)
    if row is None:
        return None
    worker, ids = row["id"], list(row["ids"])
    await connection.execute(
        "UPDATE model_instances SET state = 'RUNNING'"
        " WHERE id = ANY ($1::bigint[]) AND state IN ('SCHEDULED', 'STARTING')",
        ids,
    )
    await _beat(connection, worker)
    began = anyio.current_time()
    not_ready = elsewhere = None
    message, unreachable, places = "", 0, ()
    with anyio.move_on_after(patience):
        while elsewhere is None:
            seen = await connection.fetchrow(_SEEN, worker, ids)
            assert seen is not None
            now = anyio.current_time() - began
            unreachable = max(unreachable, seen["unreachable"])
            if seen["worker"] == "NOT_READY" and not_ready is None:
                not_ready, message = now, seen["message"] or ""
            if seen["elsewhere"]:
                elsewhere, places = now, tuple(seen["places"])
            await anyio.sleep(LOOK)
    back = await _return(connection, worker, patience) if elsewhere is not None else None
    return Lost(row["name"], tuple(row["names"]), not_ready, message, unreachable, elsewhere, places, back)


async def _return(connection: Connection, worker: int, patience: float) -> float | None:
    began = anyio.current_time()
    await _beat(connection, worker)
    with anyio.move_on_after(patience):
        while True:
            if await connection.fetchval("SELECT state = 'READY' FROM workers WHERE id = $1", worker):
                took = anyio.current_time() - began
                await connection.execute("UPDATE workers SET heartbeat_at = NULL WHERE id = $1", worker)
                return took
            await anyio.sleep(LOOK)
    return None


async def _beat(connection: Connection, worker: int) -> None:
    await connection.execute("UPDATE workers SET heartbeat_at = clock_timestamp() WHERE id = $1", worker)


def in_words(names: Sequence[str], most: int = 4) -> str:
    """The first few of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
