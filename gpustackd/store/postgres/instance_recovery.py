"""Placed instances that failed or that are to leave their worker: reads, and writes that check what was read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.placement_hints import AvoidedPlace, ClaimRaise, PlacementHints, placement_hints
from gpustackd.store.postgres.connections import Connections

_FAILED = """
SELECT i.id, i.name, i.model_id, i.placement_epoch AS epoch, i.restart_count, i.failures, i.state_message,
       i.worker_id, i.worker_name, m.name AS model, m.version AS model_version,
       gpustackd_avoided(i.avoid) AS avoided, i.claim_raise, m.updated_at > i.state_since AS edited,
       greatest(gpustackd_age(coalesce(i.last_restart_time, i.state_since, i.updated_at)), 0) AS since,
       h.vram, h.ram, h.gpu_ids
  FROM model_instances i JOIN models m ON m.id = i.model_id,
       LATERAL (SELECT coalesce(sum(k.vram), 0)::bigint AS vram, coalesce(max(k.ram), 0)::bigint AS ram,
                       coalesce(array_agg(k.gpu_device_id) FILTER (WHERE k.gpu_device_id IS NOT NULL), '{}')
                       AS gpu_ids,
                       bool_or(w.state IN ('NOT_READY', 'UNREACHABLE', 'ERROR', 'DELETING')) AS lost
                  FROM instance_claims k JOIN workers w ON w.id = k.worker_id WHERE k.instance_id = i.id) h
 WHERE i.state = 'ERROR' AND i.worker_id IS NOT NULL AND m.restart_on_error AND i.draining_since IS NULL
   AND NOT coalesce(h.lost, true)
 ORDER BY i.id LIMIT $1"""

_LEAVING = """
SELECT i.id, i.name, i.model_id, i.placement_epoch AS epoch, i.state, m.name AS model, d.worker,
       gpustackd_avoided(i.avoid) AS avoided, i.claim_raise, d.overdue, s.running,
       coalesce(m.min_available, greatest(coalesce(m.replicas, s.there) - 1, 0)) AS min_running
  FROM (SELECT k.instance_id, min(w.name) AS worker,
               bool_or(coalesce(gpustackd_moment(w.maintenance ->> 'deadline') <= clock_timestamp(), false))
               AS overdue
          FROM workers w JOIN instance_claims k ON k.worker_id = w.id
         WHERE w.state = 'MAINTENANCE' AND w.maintenance @> '{"drain": true}' GROUP BY k.instance_id) d
  JOIN model_instances i ON i.id = d.instance_id
  JOIN models m ON m.id = i.model_id,
       LATERAL (SELECT count(*) AS there,
                       count(*) FILTER (WHERE o.state = 'RUNNING' AND o.draining_since IS NULL) AS running
                  FROM model_instances o WHERE o.model_id = i.model_id) s
 WHERE i.worker_id IS NOT NULL AND i.draining_since IS NULL
 ORDER BY i.state = 'RUNNING', i.id"""

BATCH = 500
"""Instances in ERROR that one read returns at most."""


@dataclass(frozen=True, slots=True)
class FailedRow:
    """An instance in ERROR that holds a place and may be restarted. Sizes in bytes."""

    id: int
    name: str
    model_id: int
    model: str
    model_version: int
    epoch: int
    restart_count: int
    failures: int
    message: str | None
    worker: str | None
    worker_id: int
    since: float
    edited: bool
    vram: int
    ram: int
    gpu_ids: tuple[int, ...]
    hints: PlacementHints


@dataclass(frozen=True, slots=True)
class LeavingRow:
    """An instance on a worker that is being drained."""

    id: int
    name: str
    model_id: int
    model: str
    epoch: int
    state: str
    worker: str
    overdue: bool
    """The deadline of the drain has passed."""
    running: int
    """Replicas of its model that serve."""
    min_running: int
    """Replicas of its model that have to go on serving."""
    hints: PlacementHints


class InstanceRecoveryStore:
    """Over the daemon's pool. Raises DatabaseUnavailable or Contended."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def failed(self) -> list[FailedRow]:
        """Instances in ERROR with a placement, on workers that are there, of models that restart on error."""
        return [
            FailedRow(
                id=r["id"], name=r["name"], model_id=r["model_id"], model=r["model"],
                model_version=r["model_version"], epoch=r["epoch"], restart_count=r["restart_count"],
                failures=r["failures"], message=r["state_message"], worker=r["worker_name"],
                worker_id=r["worker_id"], since=r["since"], edited=bool(r["edited"]), vram=r["vram"],
                ram=r["ram"], gpu_ids=tuple(r["gpu_ids"]), hints=placement_hints(r["avoided"], r["claim_raise"]),
            )
            for r in await self._connections.fetch(_FAILED, BATCH)
        ]  # fmt: skip

    async def leaving(self) -> list[LeavingRow]:
        """Instances on workers that are being drained; those that do not run first."""
        return [
            LeavingRow(
                id=r["id"], name=r["name"], model_id=r["model_id"], model=r["model"], epoch=r["epoch"],
                state=r["state"], worker=r["worker"], overdue=r["overdue"], running=r["running"],
                min_running=r["min_running"], hints=placement_hints(r["avoided"], r["claim_raise"]),
            )
            for r in await self._connections.fetch(_LEAVING)
        ]  # fmt: skip

    async def restart(self, rows: Sequence[FailedRow]) -> set[int]:
        """ERROR -> SCHEDULED in place, where the instances are as they were read; returns the ids written."""
        written = await self._connections.fetch(
            "SELECT gpustackd_restart($1, $2, $3) AS id",
            [r.id for r in rows],
            [r.epoch for r in rows],
            [r.restart_count for r in rows],
        )
        return {r["id"] for r in written}

    async def replace(
        self,
        row: FailedRow,
        why: str,
        avoid: AvoidedPlace | None,
        seconds: float,
        claim_raise: ClaimRaise | None,
    ) -> bool:
        """Release a failed instance's placement and requeue it; `avoid` is avoided for `seconds`. False = it
        is not as it was read."""
        gpus: Any = None if avoid is None else (list(avoid.gpu_ids) or "whole")
        raised = None if claim_raise is None else claim_raise.as_json()
        return bool(
            await self._connections.fetchval(
                "SELECT gpustackd_replace($1, $2, $3, $4, $5, $6, $7)",
                row.id, row.epoch, row.restart_count, why, gpus, float(seconds), raised,
            )
        )  # fmt: skip

    async def drain(self, row: LeavingRow) -> bool:
        """Requeue one instance of a drained worker, if enough replicas of its model go on serving. Returns
        whether that was so."""
        return bool(await self._connections.fetchval("SELECT gpustackd_drain($1, $2)", row.id, row.epoch))
