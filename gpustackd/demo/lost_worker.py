"""The stage in which a worker falls silent: its instances are placed elsewhere, and it is taken back."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from gpustackd.demo.narration import Narration
from gpustackd.demo.polling import poll
from gpustackd.store.postgres.connect import Connection

PATIENCE = 30.0
INTERVAL, GRACE, RESCHEDULE = 0.5, 1.5, 3.0
SETTINGS = {
    "GPUSTACK_WORKER_HEARTBEAT_INTERVAL": str(INTERVAL),
    "GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD": str(GRACE),
    "GPUSTACK_MODEL_INSTANCE_RESCHEDULE_GRACE_PERIOD": str(RESCHEDULE),
}
"""For the daemons. A hundredth of the defaults (30, 150 and 300 s), so that one can watch."""

_LEAST_USED = """
SELECT w.id, w.name, array_agg(DISTINCT k.instance_id) AS ids, array_agg(DISTINCT i.name) AS names
  FROM workers w JOIN instance_claims k ON k.worker_id = w.id JOIN model_instances i ON i.id = k.instance_id
 WHERE w.state = 'READY'
 GROUP BY w.id, w.name HAVING bool_and(i.distributed_servers IS NULL) ORDER BY sum(k.vram), w.id LIMIT 1"""
_RUN = """
UPDATE model_instances SET state = 'RUNNING'
 WHERE id = ANY ($1::bigint[]) AND state IN ('SCHEDULED', 'STARTING')"""
_BEAT = "UPDATE workers SET heartbeat_at = clock_timestamp() WHERE id = $1"
_LOOK = """
SELECT (SELECT state FROM workers WHERE id = $1) AS worker,
       count(*) FILTER (WHERE state = 'UNREACHABLE') AS unreachable,
       bool_and(worker_id IS NOT NULL AND worker_id <> $1) AS elsewhere,
       array_agg(name || ' on ' || coalesce(worker_name, 'none') ORDER BY name) AS places
  FROM model_instances WHERE id = ANY ($2::bigint[])"""


async def lose_a_worker(narration: Narration, connection: Connection) -> None:
    """The READY worker with the least booked sends one heartbeat, then none, then one again."""
    narration.say(
        f"\nA worker falls silent (NOT_READY after {GRACE:g} s, given up after {RESCHEDULE:g} s here)"
    )
    lost = await connection.fetchrow(_LEAST_USED)
    if lost is None:
        narration.check(False, "a worker has something on it")
        return
    worker, ids = lost["id"], list(lost["ids"])
    await connection.execute(_RUN, ids)
    await connection.execute(_BEAT, worker)
    began = anyio.current_time()
    not_ready: float | None = None
    unreachable = 0

    async def moved() -> tuple[float, Sequence[str]] | None:
        nonlocal not_ready, unreachable
        row = await connection.fetchrow(_LOOK, worker, ids)
        assert row is not None
        seconds = anyio.current_time() - began
        unreachable = max(unreachable, row["unreachable"])
        if row["worker"] == "NOT_READY" and not_ready is None:
            not_ready = seconds
        return (seconds, row["places"]) if row["elsewhere"] else None

    elsewhere = await poll(moved, PATIENCE)
    narration.check(
        not_ready is not None and unreachable > 0,
        f"{lost['name']}, which runs {_listed(lost['names'])}: NOT_READY {not_ready or 0:.1f} s after its"
        " last heartbeat, its instances UNREACHABLE",
    )
    seconds, places = elsewhere or (0.0, ())
    narration.check(
        elsewhere is not None, f"{seconds:.1f} s after it: {_listed(places) or 'nothing was moved'}"
    )
    back = await _take_back(connection, worker) if elsewhere is not None else None
    narration.check(
        back is not None,
        f"{lost['name']} sends heartbeats again: READY {(back or 0) * 1000:.0f} ms later",
    )


async def _take_back(connection: Connection, worker: int) -> float | None:
    """Seconds from a heartbeat until the worker is READY. It is not managed by heartbeat afterwards."""

    async def ready() -> bool | None:
        return await connection.fetchval("SELECT state = 'READY' FROM workers WHERE id = $1", worker) or None

    began = anyio.current_time()
    await connection.execute(_BEAT, worker)
    if await poll(ready, PATIENCE) is None:
        return None
    seconds = anyio.current_time() - began
    await connection.execute("UPDATE workers SET heartbeat_at = NULL WHERE id = $1", worker)
    return seconds


def _listed(names: Sequence[str], most: int = 4) -> str:
    """The first few of them."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
