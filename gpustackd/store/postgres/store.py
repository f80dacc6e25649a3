"""The store over PostgreSQL: every statement of the daemon's loops, through one bounded pool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import anyio

from gpustackd.errors import Contended
from gpustackd.ports import Claim, CommitCode, CommitResult, Proposal, Refusal
from gpustackd.store.postgres import ledger
from gpustackd.store.postgres.connections import COMMIT_LIMITS
from gpustackd.store.postgres.reading import FleetReads

_COMMIT_TRIES = 4

# No flush is waited for: a claim that a crash of the server loses is lost with all that would have followed from
# it (the flush of a placement's commit takes the claim before it along), and the row waits as before.
_CLAIM = """
SELECT c.* FROM (SELECT set_config('synchronous_commit', 'off', true)) s, gpustackd_claim($1, $2, $3, $4) c"""


class PostgresStore(FleetReads):
    """`ports.Store` over asyncpg. Open with `async with await PostgresStore.open(url, size)`."""

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
                    await connection.execute(COMMIT_LIMITS, "true")
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
