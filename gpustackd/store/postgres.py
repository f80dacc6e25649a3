"""The store over PostgreSQL: every statement of the daemon's loops, through one bounded pool."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import anyio
import asyncpg

from gpustackd.domain.backends import Backends
from gpustackd.domain.fleet import Booking, GpuRow, WorkerRow
from gpustackd.domain.lessons import lessons
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.pools import Pools
from gpustackd.errors import BadRow, Contended, DatabaseUnavailable
from gpustackd.ports import (
    Claim,
    CommitCode,
    CommitResult,
    FleetChanges,
    Health,
    ModelRecord,
    Proposal,
    Refusal,
    Waiting,
)
from gpustackd.store import ledger
from gpustackd.store.backends import BACKENDS, backends_of
from gpustackd.store.connect import CONNECT_TIMEOUT, SCHEMA, UNREACHABLE, connect, unavailable
from gpustackd.store.files import known_files
from gpustackd.store.foreign import FOREIGN
from gpustackd.store.jsonb import Unreadable, set_codec
from gpustackd.store.pools import DEVICES, TYPES, pools_of

_CONTENDED = (
    asyncpg.LockNotAvailableError,
    asyncpg.QueryCanceledError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
)
_NO_SCHEMA = (asyncpg.UndefinedTableError, asyncpg.UndefinedFunctionError, asyncpg.UndefinedColumnError)

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

# Time-outs so far below the server's deadlock time-out that a user's statement which waits for us sees us gone
# before it looks for a cycle: it is always the daemon that yields. A commit is one statement, and the flush to
# disk at its end does not count.
_COMMIT_LIMITS = (
    "SELECT set_config('lock_timeout', (d * 0.3)::int::text, $1::text::bool),"
    " set_config('statement_timeout', (d * 0.8)::int::text, $1::text::bool)"
    " FROM (SELECT extract(epoch FROM current_setting('deadlock_timeout')::interval) * 1000 AS d) t"
)
_COMMIT_TRIES = 4
COMMAND_TIMEOUT = 40.0
"""Seconds until a statement without an answer counts as a lost server; above every statement time-out."""

_WAITING = """
SELECT i.id, i.name, i.model_id, i.placement_epoch, i.attempts, coalesce(i.priority, m.priority) AS priority,
       i.created_at,
       coalesce(extract(epoch FROM i.next_attempt_at - clock_timestamp()), 0)::double precision AS due_in,
       CASE WHEN jsonb_typeof(i.reasons) = 'array' THEN
            (SELECT string_agg((r.value ->> 'filter') || ':' || (r.value ->> 'code'), ';' ORDER BY r.ordinality)
               FROM jsonb_array_elements(i.reasons) WITH ORDINALITY r)
            || '#' || md5(coalesce(i.state_message, '')) END AS signature,
       CASE WHEN i.avoid IS NOT NULL THEN gpustackd_avoided(i.avoid) END AS avoid, i.claim_raise
  FROM model_instances i JOIN models m ON m.id = i.model_id
 WHERE i.state = 'PENDING' {where}
 ORDER BY priority DESC, i.created_at, i.id LIMIT $1"""


# No flush is waited for: a claim that a crash of the server loses is lost with all that would have followed from
# it (the flush of a placement's commit takes the claim before it along), and the row waits as before.
_CLAIM = """
SELECT c.* FROM (SELECT set_config('synchronous_commit', 'off', true)) s, gpustackd_claim($1, $2, $3, $4) c"""


class PostgresStore:
    """`ports.Store` over asyncpg. Open with `async with await PostgresStore.open(url, size)`."""

    def __init__(self, pool: asyncpg.Pool, committing: asyncpg.Pool, url: str, pooled: bool) -> None:
        self._pool = pool
        self._committing = committing
        self._url = url
        self._pooled = pooled

    @classmethod
    async def open(cls, url: str, size: int = 5, *, pooled: bool = False, replica: str = "") -> PostgresStore:
        """Connect; `pooled` = an external pooler stands in between (no prepared statements kept).

        Raises DatabaseUnavailable.
        """
        name = f"gpustackd {replica}".strip()[:63]

        async def make(*_: Any, **more: Any) -> asyncpg.Connection:
            return await connect(url, application_name=name, pooled=pooled, **more)

        async def prepare(connection: Any) -> None:
            await set_codec(connection)
            if not pooled:  # a session of ours alone
                await connection.execute("SET lock_timeout = '5s'; SET statement_timeout = '30s'")

        async def prepare_commits(connection: Any) -> None:
            if not pooled:
                await connection.execute(_COMMIT_LIMITS, "false")

        async def keep(_: Any) -> None:
            """Instead of asyncpg's reset at each release: its RESET ALL would undo the time-outs above."""

        async def pool(connections: int, init: Any) -> asyncpg.Pool:
            return await asyncpg.create_pool(
                min_size=0,
                max_size=connections,
                connect=make,
                init=init,
                reset=keep,
                command_timeout=COMMAND_TIMEOUT,
                max_inactive_connection_lifetime=300,
                **({"statement_cache_size": 0} if pooled else {}),
            )

        try:
            return cls(await pool(max(size - 1, 1), prepare), await pool(1, prepare_commits), url, pooled)
        except UNREACHABLE as error:
            raise unavailable(url, error) from error

    async def close(self) -> None:
        """Give running statements a moment, then cut the connections."""
        for pool in (self._pool, self._committing):
            with anyio.move_on_after(2, shield=True) as scope:
                await pool.close()
            if scope.cancelled_caught:
                pool.terminate()

    async def drop_connections(self) -> None:
        """Replace every connection at its next use (after the server was gone)."""
        await self._pool.expire_connections()
        await self._committing.expire_connections()

    @asynccontextmanager
    async def connection(self, *, committing: bool = False) -> AsyncIterator[Any]:
        """A connection of the pool, with errors turned into ours."""
        pool = self._committing if committing else self._pool
        try:
            async with pool.acquire(timeout=CONNECT_TIMEOUT) as connection:
                yield connection
        except _CONTENDED as error:
            raise Contended(f"the database made us yield: {error}") from error
        except _NO_SCHEMA as error:
            raise DatabaseUnavailable(
                f"the schema is missing or wrong: {error}", "run `gpustackd migrate`"
            ) from error
        except asyncpg.InsufficientPrivilegeError as error:
            raise DatabaseUnavailable(
                f"the database does not let this user do that: {error}",
                "grant it, or connect as another user",
            ) from error
        except UNREACHABLE as error:
            raise unavailable(self._url, error) from error

    async def _fetch(self, sql: str, *arguments: Any) -> list[Any]:
        async with self.connection() as connection:
            found: list[Any] = await connection.fetch(sql, *arguments)
            return found

    # -- reading ------------------------------------------------------------------------------------

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

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[Waiting]:
        where = "" if ids is None else "AND i.id = ANY ($2)"
        rows = await self._fetch(_WAITING.format(where=where), limit, *(() if ids is None else (list(ids),)))
        return [Waiting(*[*list(r)[:-2], lessons(r["avoid"], r["claim_raise"])]) for r in rows]

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

    async def health(self) -> Health:
        async with self.connection() as connection:
            row = await connection.fetchrow(
                "SELECT NOT pg_is_in_recovery() AND current_setting('transaction_read_only') = 'off'"
                " AS writable, current_setting('server_version') AS version,"
                " to_regclass('alembic_version') IS NOT NULL AS there"
            )
            revision = (
                await connection.fetchval("SELECT version_num FROM alembic_version") if row["there"] else None
            )
        return Health(row["writable"], revision, row["version"])

    # -- the protocol -----------------------------------------------------------------------------------

    async def claim(self, owner: UUID, wanted: Sequence[tuple[int, int]], lease: float) -> Sequence[Claim]:
        rows = await self._fetch(
            _CLAIM,
            owner,
            [w[0] for w in wanted],
            [w[1] for w in wanted],
            float(lease),
        )
        return [
            Claim(r["id"], r["name"], r["model_id"], r["epoch"], r["attempts"], r["priority"], r["waited"])
            for r in rows
        ]

    async def renew(self, owner: UUID, ids: Sequence[int], lease: float) -> set[int]:
        rows = await self._fetch("SELECT gpustackd_renew($1, $2, $3) AS id", owner, list(ids), float(lease))
        return {r["id"] for r in rows}

    async def commit(self, owner: UUID, replica: str, batch: Sequence[Proposal]) -> Sequence[CommitResult]:
        """As the port says, sorted by instance. Where a user's statement makes us yield, the batch is tried
        again in halves; what still has to yield alone is a conflict that names no rows."""
        batch = sorted(batch, key=lambda p: p.claim.id)
        arguments = ledger.commit_arguments(owner, replica, batch)
        for attempt in range(_COMMIT_TRIES):
            try:
                return ledger.results(batch, await self._commit(arguments))
            except Contended:
                # Spread the tries of several replicas that met on one row.
                await anyio.sleep(random.uniform(0.005, 0.05) * 2**attempt)
            if len(batch) > 1:
                middle = len(batch) // 2
                first = await self.commit(owner, replica, batch[:middle])
                return [*first, *await self.commit(owner, replica, batch[middle:])]
        return [CommitResult(p.claim.id, CommitCode.CONFLICT) for p in batch]

    async def _commit(self, arguments: tuple[Any, ...]) -> list[Any]:
        rows: list[Any]
        async with self.connection(committing=True) as connection:
            if not self._pooled:
                rows = await connection.fetch(ledger.COMMIT_SQL, *arguments)
            else:
                async with connection.transaction():  # a session's settings would stay behind in the pooler
                    await connection.execute(_COMMIT_LIMITS, "true")
                    rows = await connection.fetch(ledger.COMMIT_SQL, *arguments)
        return rows

    async def refuse(self, owner: UUID, replica: str, batch: Sequence[Refusal]) -> set[int]:
        batch = sorted(batch, key=lambda r: r.claim.id)
        rows = await self._fetch(
            "SELECT gpustackd_refuse($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12) AS id",
            owner,
            replica,
            [r.claim.id for r in batch],
            [r.claim.epoch for r in batch],
            ["ERROR" if r.to_error else "PENDING" for r in batch],
            [r.outcome.message for r in batch],
            [ledger.as_json([x.as_json() for x in r.outcome.reasons]) for r in batch],
            [r.retry_in for r in batch],
            [r.record for r in batch],
            [r.claim.attempts for r in batch],
            [ledger.as_json([s.as_json() for s in r.outcome.pool]) for r in batch],
            [r.duration_ms for r in batch],
        )
        return {r["id"] for r in rows}

    async def hand_back(self, owner: UUID) -> Sequence[int]:
        return [r["id"] for r in await self._fetch("SELECT gpustackd_hand_back($1) AS id", owner)]

    async def expire_leases(self) -> Sequence[int]:
        return [r["id"] for r in await self._fetch("SELECT gpustackd_expire_leases() AS id")]

    async def autofill(self, model_id: int, version: int, patch: Mapping[str, Any]) -> bool:
        async with self.connection() as connection:
            return bool(
                await connection.fetchval(
                    "SELECT gpustackd_autofill($1, $2, $3)", model_id, version, dict(patch)
                )
            )

    async def notify(self, channel: str, payload: str) -> None:
        """Send a notification through the pool (the listener's self-probe)."""
        await self._fetch("SELECT pg_notify($1, $2)", channel, payload)

    async def schema(self) -> str:
        async with self.connection() as connection:
            return str(await connection.fetchval(SCHEMA))

    async def prune_decisions(self, keep: int = 20, days: int = 30) -> int:
        """Delete old decision records: more than `keep` of one instance, or older than `days`."""
        rows = await self._fetch(
            "DELETE FROM scheduling_decisions WHERE id IN (SELECT id FROM (SELECT id, created_at,"
            " row_number() OVER (PARTITION BY instance_id ORDER BY id DESC) AS n FROM scheduling_decisions) d"
            " WHERE n > $1 OR created_at < now() - make_interval(days => $2) LIMIT 5000) RETURNING id",
            keep,
            days,
        )
        return len(rows)


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
