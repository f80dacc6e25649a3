"""What the daemon's loops read: the fleet, the ledger, waiting rows, models and what surrounds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpustackd.domain.backends import Backends
from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.placement_hints import placement_hints
from gpustackd.domain.pools import Pools
from gpustackd.errors import BadRow
from gpustackd.ports import DatabaseHealth, FleetChanges, ModelRecord, WaitingInstance
from gpustackd.store.postgres.backends import BACKENDS, backends_of
from gpustackd.store.postgres.connections import Connections
from gpustackd.store.postgres.files import known_files
from gpustackd.store.postgres.foreign import FOREIGN
from gpustackd.store.postgres.jsonb import Unreadable
from gpustackd.store.postgres.pools import DEVICES, TYPES, pools_of

_WORKERS = """
SELECT w.id, w.name, w.cluster_id, w.state, w.version, w.labels, w.ram_capacity, w.ram_allocated,
       w.unified_memory, w.over_committed, w.vram_reserved, w.cpu_arch, w.ip, w.advertise_address, w.ifname,
       w.port, w.state_message
  FROM workers w WHERE {where}"""
_GPUS = """
SELECT m.mark, g.id, g.worker_id, g.index, g.type, g.version, g.vram_total, g.capacity, g.vram_allocated,
       g.open, g.schedulable, g.over_committed, g.vendor, g.name, g.uuid, g.arch_family, g.compute_capability,
       g.runtime_version, g.vram_used, g.links, g.network
  FROM (SELECT pg_current_snapshot()::text AS mark) m LEFT JOIN gpu_devices g ON {where}"""
# Exactly the rows whose last change was not visible in the snapshot `$1`; the index takes the range.
_SINCE = (
    "{0}.changed_in >= pg_snapshot_xmin($1::text::pg_snapshot)::text::bigint"
    " AND NOT pg_visible_in_snapshot({0}.changed_in::text::xid8, $1::text::pg_snapshot)"
)

_BACKEND = (
    "coalesce(nullif(m.backend, ''), CASE WHEN coalesce(m.huggingface_filename, m.model_scope_file_path,"
    " m.local_path, '') LIKE '%.gguf' THEN 'Custom' ELSE 'vLLM' END)"
)
"""`ModelSpec.effective_backend` in SQL."""

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


class FleetReads(Connections):
    """The part of `ports.Store` that changes nothing."""

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        where = "true" if since is None else _SINCE
        arguments = () if since is None else (since,)
        async with self.connection() as connection:
            # The mark is taken with the first look; whatever the second sees beyond it comes again. GPUs come
            # first: of a worker that goes away in between it is then told that the worker is gone, not that
            # its cards are closed.
            gpus = await connection.fetch(_GPUS.format(where=where.format("g")), *arguments)
            workers = await connection.fetch(_WORKERS.format(where=where.format("w")), *arguments)
        return FleetChanges(
            mark=gpus[0]["mark"],
            workers=[_worker(r) for r in workers],
            gpus=[GpuRow(*list(r)[1:]) for r in gpus if r["id"] is not None],
            complete=since is None,
        )

    async def fleet_sums(self) -> tuple[int, int, int, int]:
        rows = await self._fetch(
            "SELECT w.*, g.* FROM (SELECT count(*), coalesce(sum(version), 0)::bigint FROM workers) w,"
            " (SELECT count(*), coalesce(sum(version), 0)::bigint FROM gpu_devices) g"
        )
        workers, worker_versions, gpus, gpu_versions = rows[0]
        return workers, worker_versions, gpus, gpu_versions

    async def bookings(self, worker_ids: Sequence[int] | None) -> Sequence[Booking]:
        where = "" if worker_ids is None else "WHERE c.worker_id = ANY ($1)"
        rows = await self._fetch(
            "SELECT c.instance_id, i.model_id, c.worker_id, c.gpu_device_id, c.vram, c.ram, c.part,"
            f" {_BACKEND} AS backend FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id"
            f" JOIN models m ON m.id = i.model_id {where}",
            *(() if worker_ids is None else (list(worker_ids),)),
        )
        on_gpus = {(r["instance_id"], r["worker_id"]) for r in rows if r["gpu_device_id"] is not None}
        return [_booking(r, on_gpus) for r in rows]

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[WaitingInstance]:
        where = "" if ids is None else "AND i.id = ANY ($2)"
        rows = await self._fetch(_WAITING.format(where=where), limit, *(() if ids is None else (list(ids),)))
        return [
            WaitingInstance(*[*list(r)[:-2], placement_hints(r["avoid"], r["claim_raise"])]) for r in rows
        ]

    async def pending_ids(self) -> Sequence[int]:
        return [r["id"] for r in await self._fetch("SELECT id FROM model_instances WHERE state = 'PENDING'")]

    async def models(self, ids: Sequence[int]) -> Sequence[ModelRecord]:
        rows = await self._fetch("SELECT * FROM models WHERE id = ANY ($1)", list(ids))
        return [_model(r) for r in rows]

    async def ready_files(self) -> Mapping[str, Mapping[int, int]]:
        rows = await self._fetch(
            "SELECT worker_id, source_index, resolved_path, size, state FROM model_files"
            " WHERE state IN ('READY', 'DOWNLOADING')"
        )
        return known_files(rows)

    async def pools(self) -> Pools:
        return pools_of(await self._fetch(TYPES), await self._fetch(DEVICES))

    async def backends(self) -> Backends:
        return backends_of(await self._fetch(BACKENDS))

    async def foreign_memory(self, fresh: float) -> Mapping[int, int]:
        return {r["id"]: r["beyond"] for r in await self._fetch(FOREIGN, float(fresh))}

    async def health(self) -> DatabaseHealth:
        async with self.connection() as connection:
            row = await connection.fetchrow(
                "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'"
                " AS writable, current_setting('server_version') AS version,"
                " to_regclass('alembic_version') IS NOT NULL AS there"
            )
            revision = (
                await connection.fetchval("SELECT version_num FROM alembic_version") if row["there"] else None
            )
        return DatabaseHealth(row["writable"], revision, row["version"])


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
    labels = r["labels"] if isinstance(r["labels"], dict) else {}
    return WorkerRow(
        id=r["id"],
        name=r["name"],
        cluster_id=r["cluster_id"],
        state=r["state"],
        version=r["version"],
        labels=labels,
        ram_capacity=r["ram_capacity"],
        ram_allocated=r["ram_allocated"],
        unified_memory=r["unified_memory"],
        over_committed=r["over_committed"],
        vram_reserved=r["vram_reserved"],
        cpu_arch=r["cpu_arch"],
        ip=r["ip"],
        advertise_address=r["advertise_address"],
        ifname=r["ifname"],
        port=r["port"],
        state_message=r["state_message"],
    )


def _model(r: Any) -> ModelRecord:
    try:
        for column, value in r.items():
            if isinstance(value, Unreadable):
                raise BadRow(column, value)
        return ModelRecord(r["id"], r["version"], r["name"], model_spec(dict(r)))
    except BadRow as error:
        return ModelRecord(r["id"], r["version"], r["name"], None, str(error))
