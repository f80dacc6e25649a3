"""The stage in which a GPU is given back, and a waiting instance takes it."""

from __future__ import annotations

from gpustackd.demo.narration import Narration
from gpustackd.demo.polling import INTERVAL, poll
from gpustackd.store.postgres.connect import Connection

PATIENCE = 10.0
AT_ONCE = 1.0
"""Seconds within which a freed GPU must be taken."""

_ALONE_AND_WANTED = """
SELECT v.id, v.name, m.name AS model, w.name || ' ' || g.type || ':' || g.index AS gpu, g.id AS gpu_id
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
"""An instance that has a GPU to itself and whose model waits for another one."""

_TAKEN = """
SELECT i.name, extract(epoch FROM i.scheduled_at - $2::timestamptz)::double precision AS seconds
  FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id
 WHERE c.gpu_device_id = $1 AND i.id <> $3 ORDER BY i.scheduled_at LIMIT 1"""


async def free_a_gpu(narration: Narration, connection: Connection) -> None:
    """Delete such an instance; another must have its GPU at once, by the database's clock."""
    narration.say("\nA GPU is given back")
    leaving = await connection.fetchrow(_ALONE_AND_WANTED)
    if leaving is None:
        narration.check(False, "an instance waits for a GPU like one that is taken")
        return
    await connection.execute("DELETE FROM model_instances WHERE name = $1", leaving["name"])
    freed_at = await connection.fetchval("SELECT clock_timestamp()")
    taker = await poll(
        lambda: connection.fetchrow(_TAKEN, leaving["gpu_id"], freed_at, leaving["id"]),
        PATIENCE,
        INTERVAL / 4,
    )
    freed = f"DELETE of {leaving['name']} freed {leaving['gpu']}"
    if taker is None:
        narration.check(False, f"{freed}; nobody took it within {PATIENCE:.0f} s")
        return
    seconds = max(taker["seconds"], 0.0)
    narration.check(seconds <= AT_ONCE, f"{freed}; {taker['name']} had it {seconds * 1000:.0f} ms later")
