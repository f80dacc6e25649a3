"""Rows for people and their scripts: of every kind, where instances are, and why.

`gpustackd get -o json` prints these rows unchanged, so their shape is stable. Sizes in bytes, times as
ISO 8601.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from gpustackd.errors import Refused
from gpustackd.store.postgres.connect import Connection

Row = dict[str, Any]

_WORKERS = """
SELECT w.id, w.name, c.name AS cluster, w.state, w.state_message, w.labels, w.ip, w.cpu_arch,
       w.unified_memory, w.ram_total, w.ram_reserved, w.ram_allocated, w.vram_reserved,
       coalesce(g.count, 0) AS gpus, g.total AS vram_total, coalesce(g.allocated, 0) AS vram_allocated,
       w.over_committed OR coalesce(g.over, false) AS over_committed, w.heartbeat_at,
       (SELECT count(DISTINCT instance_id) FROM instance_claims k WHERE k.worker_id = w.id) AS instances
  FROM workers w
  LEFT JOIN clusters c ON c.id = w.cluster_id
  LEFT JOIN (SELECT worker_id, count(*) AS count,
                    least(sum(vram_total), 9223372036854775807)::bigint AS total,
                    least(sum(vram_allocated), 9223372036854775807)::bigint AS allocated,
                    bool_or(over_committed) AS over
               FROM gpu_devices GROUP BY worker_id) g ON g.worker_id = w.id
 WHERE $1::text IS NULL OR w.name = $1
 ORDER BY w.name, w.id"""

_GPUS = """
SELECT g.id, w.name AS worker, w.state AS worker_state, g.type, g.index, g.vendor, g.name, g.uuid,
       g.vram_total, w.vram_reserved, g.vram_allocated, g.capacity, g.vram_used, g.open, g.schedulable,
       g.over_committed, w.unified_memory, w.ram_capacity, w.ram_allocated,
       coalesce((SELECT jsonb_agg(jsonb_build_object('name', i.name, 'model', m.name, 'state', i.state,
                                                     'part', k.part, 'vram', k.vram) ORDER BY i.name)
                   FROM instance_claims k JOIN model_instances i ON i.id = k.instance_id
                   JOIN models m ON m.id = i.model_id
                  WHERE k.worker_id = w.id AND k.gpu_device_id = g.id), '[]') AS instances
  FROM gpu_devices g JOIN workers w ON w.id = g.worker_id
 WHERE $1::text IS NULL OR w.name = $1 OR w.name || ':' || g.type || ':' || g.index = $1
 ORDER BY w.name, g.type, g.index"""

_MODELS = """
SELECT m.id, m.name, c.name AS cluster, m.source,
       coalesce(CASE m.source WHEN 'local_path' THEN m.local_path
                     WHEN 'model_scope' THEN m.model_scope_model_id END, m.huggingface_repo_id) AS location,
       coalesce(m.huggingface_filename, m.model_scope_file_path) AS file, m.backend, m.backend_parameters,
       m.categories, m.replicas, m.priority, m.placement_strategy,
       coalesce((SELECT jsonb_object_agg(s.state, s.n) FROM (SELECT state, count(*) AS n FROM model_instances
                  WHERE model_id = m.id GROUP BY state) s), '{}') AS instances
  FROM models m LEFT JOIN clusters c ON c.id = m.cluster_id
 WHERE $1::text IS NULL OR m.name = $1
 ORDER BY m.name, m.id"""

_CLUSTERS = """
SELECT c.id, c.name,
       (SELECT count(*) FROM workers w WHERE w.cluster_id = c.id) AS workers,
       (SELECT count(*) FROM workers w WHERE w.cluster_id = c.id AND w.state = 'READY') AS ready,
       (SELECT count(*) FROM gpu_devices g JOIN workers w ON w.id = g.worker_id
         WHERE w.cluster_id = c.id) AS gpus,
       (SELECT count(*) FROM models m WHERE m.cluster_id = c.id) AS models
  FROM clusters c
 WHERE $1::text IS NULL OR c.name = $1
 ORDER BY c.name, c.id"""

_INSTANCES = """
SELECT i.id, i.name, m.name AS model, i.model_id, i.state, i.state_message, i.worker_name AS worker,
       i.gpu_type,
       coalesce(i.gpu_indexes, '[]') AS gpu_indexes,
       coalesce(k.vram, 0) AS vram, coalesce(k.ram, 0) AS ram,
       coalesce(i.distributed_servers -> 'subordinate_workers', '[]') AS subordinates,
       coalesce(i.priority, m.priority) AS priority, i.role, i.group_id, i.placement_epoch, i.attempts,
       i.next_attempt_at, coalesce(i.reasons, '[]') AS reasons, i.created_at, i.scheduled_at,
       i.restart_count, i.failures, i.draining_since, m.restart_on_error
  FROM model_instances i JOIN models m ON m.id = i.model_id
  LEFT JOIN (SELECT instance_id, least(sum(vram), 9223372036854775807)::bigint AS vram,
                    least(sum(ram), 9223372036854775807)::bigint AS ram
               FROM instance_claims GROUP BY instance_id) k ON k.instance_id = i.id
 WHERE $1::text IS NULL OR i.name = $1
 ORDER BY i.name, i.id"""

_DECISIONS = """
SELECT placement_epoch, attempt, replica, outcome, pool, candidates, reasons, duration_ms, created_at
  FROM scheduling_decisions WHERE instance_id = $1 ORDER BY id DESC LIMIT $2"""

_HOLDERS = """
SELECT i.id, i.name, i.model_id, m.name AS model, coalesce(i.priority, m.priority) AS priority
  FROM model_instances i JOIN models m ON m.id = i.model_id WHERE i.worker_id IS NOT NULL"""

_QUERIES: Mapping[str, str] = {
    "clusters": _CLUSTERS,
    "workers": _WORKERS,
    "gpus": _GPUS,
    "models": _MODELS,
    "instances": _INSTANCES,
}


class InventoryReads:
    """Reads rows of one kind, or the history of one instance."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def rows(self, kind: str, name: str | None = None) -> list[Row]:
        """Rows of `clusters`, `workers`, `gpus`, `models` or `instances`, by name; all for None.

        The name of a GPU is `worker:type:index`; a worker's name stands for all its GPUs. Raises Refused
        where a name is given and no row has it.
        """
        rows = [plain(r) for r in await self.connection.fetch(_QUERIES[kind], name)]
        if name is not None and not rows:
            raise Refused(
                f"there is no {kind.removesuffix('s')} {name}", f"`gpustackd get {kind}` lists them"
            )
        return rows

    async def decisions(self, instance_id: int, limit: int = 10) -> list[Row]:
        """The newest decision records of an instance, newest first."""
        return [plain(r) for r in await self.connection.fetch(_DECISIONS, instance_id, limit)]

    async def holders(self) -> list[Row]:
        """Every placed instance: id, name, model, model_id, priority."""
        return [dict(r) for r in await self.connection.fetch(_HOLDERS)]

    async def counts(self) -> dict[str, int]:
        """Number of instances by state; states without any are left out."""
        rows = await self.connection.fetch("SELECT state, count(*) AS n FROM model_instances GROUP BY state")
        return {r["state"]: r["n"] for r in rows}


def plain(row: Mapping[str, Any]) -> Row:
    """A row with its times as text, ready for JSON."""
    return {k: v.isoformat() if isinstance(v, datetime) else v for k, v in dict(row).items()}


def by_worker(gpus: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """GPUs grouped by their worker's name, in order."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for gpu in gpus:
        grouped.setdefault(gpu["worker"], []).append(gpu)
    return grouped
