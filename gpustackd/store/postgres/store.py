"""`ports.Store` over PostgreSQL: the statements of the daemon's loops, through one bounded pool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Self
from uuid import UUID

import anyio

from gpustackd.domain.backends import Backends
from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.placement_hints import placement_hints
from gpustackd.domain.pools import Pools
from gpustackd.errors import BadRow, Contended
from gpustackd.ports import (
    Claim,
    CommitCode,
    CommitResult,
    DatabaseHealth,
    FleetChanges,
    ModelRecord,
    Proposal,
    Refusal,
    WaitingInstance,
)
from gpustackd.store.placement_columns import as_json
from gpustackd.store.postgres import commit_call
from gpustackd.store.postgres import lookups as lu
from gpustackd.store.postgres.connections import COMMIT_LIMITS, Connections
from gpustackd.store.postgres.jsonb import Unreadable
from gpustackd.store.postgres.revision import read_revision

_COMMIT_ATTEMPTS = 4

_WORKERS = """
SELECT w.id, w.name, w.cluster_id, w.state, w.version, w.labels, w.ram_capacity, w.ram_allocated,
       w.unified_memory, w.over_committed, w.vram_reserved, w.cpu_arch, w.ip, w.advertise_address, w.ifname,
       w.port, w.state_message
  FROM workers w WHERE {where}"""
"""Columns in the order of `WorkerRow`."""
_GPUS = """
SELECT m.mark, g.id, g.worker_id, g.index, g.type, g.version, g.vram_total, g.capacity, g.vram_allocated,
       g.open, g.schedulable, g.over_committed, g.vendor, g.name, g.uuid, g.arch_family, g.compute_capability,
       g.runtime_version, g.vram_used, g.links, g.network
  FROM (SELECT pg_current_snapshot()::text AS mark) m LEFT JOIN gpu_devices g ON {where}"""
"""The mark, then columns in the order of `GpuRow`."""
# Exactly the rows whose last change was not visible in the snapshot `$1`; the index serves the range.
_SINCE = (
    "{0}.changed_in >= pg_snapshot_xmin($1::text::pg_snapshot)::text::bigint"
    " AND NOT pg_visible_in_snapshot({0}.changed_in::text::xid8, $1::text::pg_snapshot)"
)
_SUMS = (
    "SELECT w.*, g.* FROM (SELECT count(*), coalesce(sum(version), 0)::bigint FROM workers) w,"
    " (SELECT count(*), coalesce(sum(version), 0)::bigint FROM gpu_devices) g"
)

# `ModelSpec.effective_backend` in SQL
_BACKEND = (
    "coalesce(nullif(m.backend, ''), CASE WHEN coalesce(m.huggingface_filename, m.model_scope_file_path,"
    " m.local_path, '') LIKE '%.gguf' THEN 'Custom' ELSE 'vLLM' END)"
)
_BOOKINGS = f"""
SELECT c.instance_id, i.model_id, c.worker_id, c.gpu_device_id, c.vram, c.ram, c.part, {_BACKEND} AS backend
  FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id JOIN models m ON m.id = i.model_id"""

_WAITING = """
SELECT i.id, i.name, i.model_id, i.placement_epoch, i.attempts, coalesce(i.priority, m.priority) AS priority,
       i.created_at,
       coalesce(extract(epoch FROM i.next_attempt_at - clock_timestamp()), 0)::double precision AS due_in,
       CASE WHEN jsonb_typeof(i.reasons) = 'array' THEN
            (SELECT string_agg((r.value ->> 'filter') || ':' || (r.value ->> 'code'), ';'
                               ORDER BY r.ordinality)
               FROM jsonb_array_elements(i.reasons) WITH ORDINALITY r)
            || '#' || md5(coalesce(i.state_message, '')) END AS signature,
       CASE WHEN i.avoid IS NOT NULL THEN gpustackd_avoided(i.avoid) END AS avoid, i.claim_raise
  FROM model_instances i JOIN models m ON m.id = i.model_id
 WHERE i.state = 'PENDING' {where}
 ORDER BY priority DESC, i.created_at, i.id LIMIT $1"""
"""Columns in the order of `WaitingInstance`, the hints as the two columns they come from."""

# The claim waits for no flush to disk: one that a crash of the server loses is lost with all that would have
# followed from it (the flush of the placement's commit includes the claim before it), and the row waits as before.
_CLAIM = """
SELECT c.* FROM (SELECT set_config('synchronous_commit', 'off', true)) s, gpustackd_claim($1, $2, $3, $4) c"""
_REFUSE = "SELECT gpustackd_refuse($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) AS id"

_PRUNE = """
DELETE FROM scheduling_decisions WHERE id IN (
    SELECT id FROM (SELECT id, created_at, row_number() OVER (PARTITION BY instance_id ORDER BY id DESC) AS n
                      FROM scheduling_decisions) d
     WHERE n > $1 OR created_at < now() - make_interval(days => $2) LIMIT 5000) RETURNING id"""

_HEALTH = (
    "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off' AS writable,"
    " current_setting('server_version') AS version"
)


class PostgresStore:
    """`ports.Store` over asyncpg. Open with `PostgresStore.open`, end with `close`."""

    def __init__(self, connections: Connections) -> None:
        self.connections = connections

    @classmethod
    async def open(cls, url: str, size: int = 5, *, pooled: bool = False, replica: str = "") -> Self:
        """As `Connections.open`. Raises DatabaseUnavailable."""
        return cls(await Connections.open(url, size, pooled=pooled, replica=replica))

    async def close(self) -> None:
        """Close all connections."""
        await self.connections.close()

    # -- the fleet ---------------------------------------------------------------------------------------

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        where = "true" if since is None else _SINCE
        arguments = () if since is None else (since,)
        async with self.connections.acquire() as connection:
            # The mark belongs to the first statement; what the second sees beyond it comes again next time. GPUs
            # are read first: where a worker leaves in between, the worker is reported gone rather than its GPUs
            # closed.
            gpus = await connection.fetch(_GPUS.format(where=where.format("g")), *arguments)
            workers = await connection.fetch(_WORKERS.format(where=where.format("w")), *arguments)
        return FleetChanges(
            mark=gpus[0]["mark"],
            workers=[_worker(r) for r in workers],
            gpus=[GpuRow(*list(r)[1:]) for r in gpus if r["id"] is not None],
            complete=since is None,
        )

    async def fleet_sums(self) -> tuple[int, int, int, int]:
        ((workers, worker_versions, gpus, gpu_versions),) = await self.connections.fetch(_SUMS)
        return workers, worker_versions, gpus, gpu_versions

    async def bookings(self, worker_ids: Sequence[int] | None) -> Sequence[Booking]:
        if worker_ids is None:
            rows = await self.connections.fetch(_BOOKINGS)
        else:
            rows = await self.connections.fetch(f"{_BOOKINGS} WHERE c.worker_id = ANY ($1)", list(worker_ids))
        on_gpus = {(r["instance_id"], r["worker_id"]) for r in rows if r["gpu_device_id"] is not None}
        return [_booking(r, on_gpus) for r in rows]

    async def foreign_memory(self, fresh: float) -> Mapping[int, int]:
        rows = await self.connections.fetch(lu.FOREIGN_MEMORY, float(fresh))
        return {r["id"]: r["beyond"] for r in rows}

    # -- instances that wait, models, and what surrounds them ------------------------------------------------

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[WaitingInstance]:
        if ids is None:
            rows = await self.connections.fetch(_WAITING.format(where=""), limit)
        else:
            where = "AND i.id = ANY ($2)"
            rows = await self.connections.fetch(_WAITING.format(where=where), limit, list(ids))
        return [
            WaitingInstance(*[*list(r)[:-2], placement_hints(r["avoid"], r["claim_raise"])]) for r in rows
        ]

    async def pending_ids(self) -> Sequence[int]:
        rows = await self.connections.fetch("SELECT id FROM model_instances WHERE state = 'PENDING'")
        return [r["id"] for r in rows]

    async def models(self, ids: Sequence[int]) -> Sequence[ModelRecord]:
        rows = await self.connections.fetch("SELECT * FROM models WHERE id = ANY ($1)", list(ids))
        return [_model(r) for r in rows]

    async def ready_files(self) -> Mapping[str, Mapping[int, int]]:
        return lu.read_files(await self.connections.fetch(lu.FILES))

    async def pools(self) -> Pools:
        pools = await self.connections.fetch(lu.POOLS)
        return lu.read_pools(pools, await self.connections.fetch(lu.INVENTORIES))

    async def backends(self) -> Backends:
        return lu.read_backends(await self.connections.fetch(lu.BACKENDS))

    # -- the commit protocol -----------------------------------------------------------------------------

    async def claim(self, owner: UUID, wanted: Sequence[tuple[int, int]], lease: float) -> Sequence[Claim]:
        ids, epochs = [w[0] for w in wanted], [w[1] for w in wanted]
        rows = await self.connections.fetch(_CLAIM, owner, ids, epochs, float(lease))
        return [
            Claim(r["id"], r["name"], r["model_id"], r["epoch"], r["attempts"], r["priority"], r["waited"])
            for r in rows
        ]

    async def renew(self, owner: UUID, ids: Sequence[int], lease: float) -> set[int]:
        rows = await self.connections.fetch(
            "SELECT gpustackd_renew($1, $2, $3) AS id", owner, list(ids), float(lease)
        )
        return {r["id"] for r in rows}

    async def commit(self, owner: UUID, replica: str, batch: Sequence[Proposal]) -> Sequence[CommitResult]:
        """As the port says, sorted by instance. Where another transaction is in the way, the batch is tried
        again in halves; a proposal that still fails alone is a conflict that names no rows."""
        batch = sorted(batch, key=lambda p: p.claim.id)
        arguments = commit_call.arguments(owner, replica, batch)
        for attempt in range(_COMMIT_ATTEMPTS):
            try:
                return commit_call.results(batch, await self._commit(arguments))
            except Contended:
                # Spread the attempts of several replicas that met on one row.
                await anyio.sleep(random.uniform(0.005, 0.05) * 2**attempt)
            if len(batch) > 1:
                middle = len(batch) // 2
                first = await self.commit(owner, replica, batch[:middle])
                return [*first, *await self.commit(owner, replica, batch[middle:])]
        return [CommitResult(p.claim.id, CommitCode.CONFLICT) for p in batch]

    async def _commit(self, arguments: tuple[Any, ...]) -> list[Any]:
        rows: list[Any]
        async with self.connections.acquire_for_commit() as connection:
            if not self.connections.pooled:
                rows = await connection.fetch(commit_call.SQL, *arguments)
            else:
                async with connection.transaction():  # a session's settings would stay behind in the pooler
                    await connection.execute(COMMIT_LIMITS, "true")
                    rows = await connection.fetch(commit_call.SQL, *arguments)
        return rows

    async def refuse(self, owner: UUID, replica: str, batch: Sequence[Refusal]) -> set[int]:
        batch = sorted(batch, key=lambda r: r.claim.id)
        rows = await self.connections.fetch(
            _REFUSE,
            owner,
            replica,
            [r.claim.id for r in batch],
            [r.claim.epoch for r in batch],
            ["ERROR" if r.to_error else "PENDING" for r in batch],
            [r.outcome.message for r in batch],
            [as_json([x.as_json() for x in r.outcome.reasons]) for r in batch],
            [r.retry_in for r in batch],
            [r.record for r in batch],
            [r.claim.attempts for r in batch],
            [as_json([s.as_json() for s in r.outcome.pool]) for r in batch],
            [r.duration_ms for r in batch],
        )
        return {r["id"] for r in rows}

    async def hand_back(self, owner: UUID) -> Sequence[int]:
        rows = await self.connections.fetch("SELECT gpustackd_hand_back($1) AS id", owner)
        return [r["id"] for r in rows]

    async def expire_leases(self) -> Sequence[int]:
        rows = await self.connections.fetch("SELECT gpustackd_expire_leases() AS id")
        return [r["id"] for r in rows]

    async def autofill(self, model_id: int, version: int, patch: Mapping[str, Any]) -> bool:
        return bool(
            await self.connections.fetchval(
                "SELECT gpustackd_autofill($1, $2, $3)", model_id, version, dict(patch)
            )
        )

    # -- around it ---------------------------------------------------------------------------------------

    async def health(self) -> DatabaseHealth:
        async with self.connections.acquire() as connection:
            row = await connection.fetchrow(_HEALTH)
            revision = await read_revision(connection)
        return DatabaseHealth(row["writable"], revision, row["version"])

    async def notify(self, channel: str, payload: str) -> None:
        """Send a notification through the pool; the listener probes itself with it."""
        await self.connections.fetch("SELECT pg_notify($1, $2)", channel, payload)

    async def prune_decisions(self, keep: int = 20, days: int = 30) -> int:
        """Delete at most 5,000 decision records: beyond the newest `keep` of one instance, or older than
        `days`. Returns how many."""
        return len(await self.connections.fetch(_PRUNE, keep, days))


def _booking(r: Any, on_gpus: set[tuple[int, int]]) -> Booking:
    return Booking(
        instance_id=r["instance_id"],
        model_id=r["model_id"],
        worker_id=r["worker_id"],
        gpu_id=r["gpu_device_id"],
        vram=r["vram"],
        ram=r["ram"],
        part=r["part"],
        backend=r["backend"],
        occupies=r["gpu_device_id"] is not None or (r["instance_id"], r["worker_id"]) not in on_gpus,
    )


def _worker(r: Any) -> WorkerRow:
    values = dict(r)
    if not isinstance(values["labels"], dict):
        values["labels"] = {}
    return WorkerRow(**values)


def _model(r: Any) -> ModelRecord:
    try:
        for column, value in r.items():
            if isinstance(value, Unreadable):
                raise BadRow(column, value)
        return ModelRecord(r["id"], r["version"], r["name"], model_spec(dict(r)))
    except BadRow as error:
        return ModelRecord(r["id"], r["version"], r["name"], None, str(error))
