"""Placed instances that fail or are to leave: reading them, and writes that state what they expect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.placement_hints import AvoidedPlace, ClaimRaise, PlacementHints, placement_hints
from gpustackd.store.postgres.store import PostgresStore

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
       coalesce(m.min_available, greatest(coalesce(m.replicas, s.there) - 1, 0)) AS least
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

MOST = 500
"""Instances in ERROR that one look brings."""


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
    """An instance on a worker that is being drained. `running`: replicas of its model that serve, of which
    `least` have to go on; `overdue`: the deadline of the drain is over."""

    id: int
    name: str
    model_id: int
    model: str
    epoch: int
    state: str
    worker: str
    overdue: bool
    running: int
    least: int
    hints: PlacementHints


class InstanceLifecycleStore:
    """Over the daemon's pool. Raises DatabaseUnavailable, and Contended where it had to yield."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def failed(self) -> list[FailedRow]:
        """Instances in ERROR with a place, on workers that are there, of models that restart on error."""
        async with self._store.connection() as connection:
            rows = await connection.fetch(_FAILED, MOST)
        return [
            FailedRow(
                id=r["id"], name=r["name"], model_id=r["model_id"], model=r["model"],
                model_version=r["model_version"], epoch=r["epoch"], restart_count=r["restart_count"],
                failures=r["failures"], message=r["state_message"], worker=r["worker_name"],
                worker_id=r["worker_id"], since=r["since"], edited=bool(r["edited"]), vram=r["vram"],
                ram=r["ram"], gpu_ids=tuple(r["gpu_ids"]), hints=placement_hints(r["avoided"], r["claim_raise"]),
            )
            for r in rows
        ]  # fmt: skip

    async def leaving(self) -> list[LeavingRow]:
        """Instances on workers that are being drained; those that do not run first."""
        async with self._store.connection() as connection:
            rows = await connection.fetch(_LEAVING)
        return [
            LeavingRow(
                id=r["id"], name=r["name"], model_id=r["model_id"], model=r["model"], epoch=r["epoch"],
                state=r["state"], worker=r["worker"], overdue=r["overdue"], running=r["running"],
                least=r["least"], hints=placement_hints(r["avoided"], r["claim_raise"]),
            )
            for r in rows
        ]  # fmt: skip

    async def restart(self, rows: Sequence[FailedRow]) -> set[int]:
        """ERROR -> SCHEDULED in place; the ids for which that was still so."""
        async with self._store.connection() as connection:
            found = await connection.fetch(
                "SELECT gpustackd_restart($1, $2, $3) AS id",
                [r.id for r in rows],
                [r.epoch for r in rows],
                [r.restart_count for r in rows],
            )
        return {r["id"] for r in found}

    async def replace(
        self, row: FailedRow, why: str, avoid: AvoidedPlace | None, seconds: float, more: ClaimRaise | None
    ) -> bool:
        """Release the place of a failed instance and have it placed anew; False = it was not so any more."""
        gpus: Any = None if avoid is None else (list(avoid.gpu_ids) or "whole")
        async with self._store.connection() as connection:
            return bool(
                await connection.fetchval(
                    "SELECT gpustackd_replace($1, $2, $3, $4, $5, $6, $7)",
                    row.id, row.epoch, row.restart_count, why, gpus, float(seconds),
                    None if more is None else more.as_json(),
                )
            )  # fmt: skip

    async def drain(self, row: LeavingRow) -> bool:
        """Send one replica away, where the minimum of its model still holds then."""
        async with self._store.connection() as connection:
            return bool(await connection.fetchval("SELECT gpustackd_drain($1, $2)", row.id, row.epoch))
