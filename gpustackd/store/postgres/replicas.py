"""`ports.ReplicaStore` over PostgreSQL: models out of sync, their instances, and the guarded write."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from gpustackd.ports import ReplicaSnapshot, SyncResult
from gpustackd.replicas.replica import replica
from gpustackd.replicas.sync_plan import SyncPlan
from gpustackd.store.postgres.connections import Connections

_OUT_OF_SYNC = """
SELECT m.id
  FROM models m
  LEFT JOIN (SELECT model_id, count(*) AS n, count(draining_since) AS leaving, count(role) AS members
               FROM model_instances WHERE {instances} GROUP BY model_id) i ON i.model_id = m.id
 WHERE {models}
   AND (m.replicas IS NOT NULL
        AND (coalesce(i.n - i.leaving, 0) <> m.replicas OR i.leaving > 0 OR i.members > 0)
        OR m.scaling_schedule @> '{{"enabled": true}}'
        OR jsonb_typeof(m.scaling_schedule) NOT IN ('object', 'null')
        OR jsonb_typeof(m.scaling_schedule -> 'enabled') NOT IN ('boolean', 'null'))
 ORDER BY m.priority DESC, m.id"""
# Two statements: a single one would be planned once for both, and read all rows for a few models.
_ALL = _OUT_OF_SYNC.format(instances="true", models="true")
_SOME = _OUT_OF_SYNC.format(instances="model_id = ANY ($1::bigint[])", models="m.id = ANY ($1::bigint[])")

_MODEL = """
SELECT m.id, m.name, m.replicas, m.roles, m.scaling_schedule, m.placement_strategy,
       md5(m.scaling_schedule::text) AS schedule_digest, clock_timestamp() AS now,
       current_setting('TimeZone') AS zone, x.who AS members_digest,
       x.standing AS states_digest
  FROM models m, LATERAL gpustackd_members(m.id) x WHERE m.id = $1"""

_ROWS = """
SELECT i.id, i.name, i.state, i.worker_id, w.state AS worker_state, i.gpu_type, i.gpu_indexes,
       i.computed_resource_claim, i.distributed_servers, i.role, i.group_id,
       gpustackd_age(i.draining_since) AS draining_for,
       extract(epoch FROM i.created_at)::double precision AS created,
       coalesce(i.scheduled_at < m.updated_at, false) AS stale
  FROM model_instances i JOIN models m ON m.id = i.model_id LEFT JOIN workers w ON w.id = i.worker_id
 WHERE i.model_id = $1 ORDER BY i.id"""

_SYNC = "SELECT gpustackd_sync_replicas($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)"

# A row that another transaction has locked is skipped: its change will notify.
_SET = """
UPDATE models SET replicas = $2
 WHERE id = (SELECT id FROM models WHERE id = $1 FOR NO KEY UPDATE SKIP LOCKED)
   AND md5(scaling_schedule::text) = $3 AND replicas IS DISTINCT FROM $2
   AND ($4::timestamptz IS NULL OR clock_timestamp() < $4) RETURNING id"""


class PostgresReplicaStore:
    """`ports.ReplicaStore` over the daemon's pool."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def out_of_sync(self, ids: Sequence[int] | None) -> Sequence[int]:
        fetch = self._connections.fetch
        rows = await (fetch(_ALL) if ids is None else fetch(_SOME, list(ids)))
        return [r["id"] for r in rows]

    async def replicas(self, model_id: int) -> ReplicaSnapshot | None:
        async with self._connections.acquire() as connection:
            # The digests first: whatever changes between the two statements makes the write fail its check.
            model = await connection.fetchrow(_MODEL, model_id)
            rows: list[Any] = await connection.fetch(_ROWS, model_id) if model is not None else []
        if model is None:
            return None
        return ReplicaSnapshot(
            model_id=model["id"],
            name=model["name"],
            replicas=model["replicas"],
            instances=[replica(dict(r)) for r in rows],
            names=frozenset(r["name"] for r in rows),
            now=model["now"],
            zone=model["zone"],
            roles=model["roles"],
            scaling_schedule=model["scaling_schedule"],
            placement_strategy=model["placement_strategy"],
            members_digest=model["members_digest"],
            states_digest=model["states_digest"],
            schedule_digest=model["schedule_digest"],
        )

    async def sync(
        self, seen: ReplicaSnapshot, replicas: int, plan: SyncPlan, names: Sequence[Sequence[str]]
    ) -> SyncResult:
        result = await self._connections.fetchval(
            _SYNC,
            seen.model_id,
            replicas,
            seen.members_digest,
            seen.states_digest,
            [new.number for new in plan.add],
            [name for candidates in names for name in candidates],
            [n for n, candidates in enumerate(names, 1) for _ in candidates],
            [new.role for new in plan.add],
            [new.group_id for new in plan.add],
            list(plan.delete),
            list(plan.drain),
            list(plan.undrain),
        )
        return SyncResult(result)

    async def set_replicas(self, seen: ReplicaSnapshot, replicas: int, until: datetime | None) -> bool:
        written = await self._connections.fetchval(_SET, seen.model_id, replicas, seen.schedule_digest, until)
        return written is not None
