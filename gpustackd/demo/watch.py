"""What somebody who watches instances being placed asks the database, and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from gpustackd.errors import GpustackdError
from gpustackd.store.postgres.connect import Connection

Row = dict[str, Any]
LOOK = 0.02
"""Seconds between two looks at the rows that are waited for."""

_UNDECIDED = """
SELECT name FROM model_instances
 WHERE state = 'ANALYZING' OR (state = 'PENDING' AND reasons IS NULL) ORDER BY id"""

_TWINS = """
SELECT v.id, v.name, m.name AS model, w.name || ' ' || g.type || ':' || g.index AS card, g.id AS gpu_id
  FROM model_instances v
  JOIN models m ON m.id = v.model_id
  JOIN instance_claims c ON c.instance_id = v.id AND c.gpu_device_id IS NOT NULL
  JOIN gpu_devices g ON g.id = c.gpu_device_id
  JOIN workers w ON w.id = g.worker_id
 WHERE v.state = 'SCHEDULED'
   AND (SELECT count(*) FROM instance_claims k WHERE k.instance_id = v.id) = 1
   AND (SELECT count(*) FROM instance_claims k WHERE k.gpu_device_id = g.id) = 1
   AND EXISTS (SELECT FROM model_instances o WHERE o.model_id = v.model_id AND o.state = 'PENDING')
 ORDER BY v.id LIMIT 1"""

_TAKEN = """
SELECT i.name, extract(epoch FROM i.scheduled_at - $2::timestamptz)::double precision AS seconds
  FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id
 WHERE c.gpu_device_id = $1 AND i.id <> $3 ORDER BY i.scheduled_at LIMIT 1"""


async def decided(connection: Connection, patience: float) -> None:
    """Wait until every instance is placed or has its reasons.

    Raise GpustackdError naming what is still undecided after `patience` seconds.
    """
    left: Sequence[Any] = ()
    with anyio.move_on_after(patience):
        while True:
            left = await connection.fetch(_UNDECIDED)
            if not left:
                return
            await anyio.sleep(LOOK)
    names = ", ".join(r["name"] for r in left[:10])
    raise GpustackdError(f"{len(left)} instances were not decided in {patience:.0f} s: {names}")


@dataclass(frozen=True, slots=True)
class Freed:
    """A card that was given back, and who took it after how many seconds by the database's clock."""

    card: str
    before: str
    after: str | None
    seconds: float


async def free_a_card(connection: Connection, patience: float = 10.0) -> Freed | None:
    """Delete an instance that has a card to itself and whose model waits for another; see who comes.

    None where no such instance is there.
    """
    twin = await connection.fetchrow(_TWINS)
    if twin is None:
        return None
    await connection.execute("DELETE FROM model_instances WHERE name = $1", twin["name"])
    freed_at = await connection.fetchval("SELECT clock_timestamp()")
    with anyio.move_on_after(patience):
        while True:
            taker = await connection.fetchrow(_TAKEN, twin["gpu_id"], freed_at, twin["id"])
            if taker is not None:
                return Freed(twin["card"], twin["name"], taker["name"], max(taker["seconds"], 0.0))
            await anyio.sleep(LOOK / 4)
    return Freed(twin["card"], twin["name"], None, patience)


async def speeds(connection: Connection) -> Row:
    """Milliseconds from INSERT to SCHEDULED, as the database saw them: median, 90 % and the slowest."""
    row = await connection.fetchrow(
        "SELECT count(*) AS n, percentile_cont(0.5) WITHIN GROUP (ORDER BY ms) AS p50,"
        " percentile_cont(0.9) WITHIN GROUP (ORDER BY ms) AS p90, max(ms) AS worst"
        " FROM (SELECT (extract(epoch FROM scheduled_at - created_at) * 1000)::double precision AS ms"
        "         FROM model_instances WHERE scheduled_at IS NOT NULL) t"
    )
    return dict(row)


async def placed_by(connection: Connection) -> dict[str, int]:
    """How many placements each replica committed."""
    rows = await connection.fetch(
        "SELECT replica, count(*) AS n FROM scheduling_decisions"
        " WHERE outcome = 'PLACED' GROUP BY 1 ORDER BY 1"
    )
    return {r["replica"]: r["n"] for r in rows}


async def under_lease(connection: Connection) -> int:
    """How many instances some replica works on right now."""
    return int(await connection.fetchval("SELECT count(*) FROM model_instances WHERE state = 'ANALYZING'"))


async def clear(connection: Connection) -> None:
    """Delete every instance, and so give back all that they hold."""
    await connection.execute("DELETE FROM model_instances")


async def run_sql(connection: Connection, statement: str) -> int:
    """Run a statement as psql would; how many rows it touched."""
    return int((await connection.execute(statement)).rpartition(" ")[2])
