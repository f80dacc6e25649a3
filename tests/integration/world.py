"""A database with the schema, what users do to it by plain SQL, and a replica that claims and commits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import asyncpg

from gpustackd.domain.outcome import Check, Cure, NoFit, Part, Placed, Placement, Reason
from gpustackd.ports import Claim, CommitResult, Proposal, Refusal
from gpustackd.store.audit.audit import AuditReport, audit
from gpustackd.store.postgres.store import PostgresStore

GIB = 2**30
LEASE = 30.0


async def connected(url: str, **settings: str) -> Any:
    """A connection as a user has it, with jsonb as Python values."""
    connection = await asyncpg.connect(url, server_settings=settings)
    await connection.set_type_codec(
        "jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog", format="text"
    )
    return connection


def no_fit(text: str = "no GPU has room", code: str = "no_room") -> NoFit:
    return NoFit((Reason(code, "fit", text),), text, Cure.CAPACITY)


class World:
    """`sql` is a user's connection; `store` the replica's; `owner` its random id."""

    def __init__(self, url: str, sql: Any, store: PostgresStore) -> None:
        self.url = url
        self.sql = sql
        self.store = store
        self.owner = uuid4()
        self.names = count(1)

    # -- users --------------------------------------------------------------------------------------------

    async def insert(self, table: str, **columns: Any) -> int:
        names = ", ".join(f'"{c}"' for c in columns)
        places = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
        into = f"({names}) VALUES ({places})" if columns else "DEFAULT VALUES"
        found: int = await self.sql.fetchval(f"INSERT INTO {table} {into} RETURNING id", *columns.values())
        return found

    async def worker(self, *vram: int | None, name: str = "", **columns: Any) -> tuple[int, list[int]]:
        """A READY worker with 512 GiB of RAM and a GPU for each size: (worker id, GPU ids)."""
        columns = {"state": "READY", "ram_total": 512 * GIB, **columns}
        worker_id = await self.insert("workers", name=name or f"w{next(self.names)}", **columns)
        gpus = [
            await self.insert("gpu_devices", worker_id=worker_id, index=n, type="cuda", vram_total=size)
            for n, size in enumerate(vram)
        ]
        return worker_id, gpus

    async def model(self, **columns: Any) -> int:
        return await self.insert("models", **{"name": f"m{next(self.names)}", **columns})

    async def instance(self, model_id: int | None = None, **columns: Any) -> int:
        model_id = await self.model() if model_id is None else model_id
        name = {"name": f"i{next(self.names)}"}
        return await self.insert("model_instances", **{**name, "model_id": model_id, **columns})

    async def row(self, table: str, id_: int) -> dict[str, Any]:
        found = await self.sql.fetchrow(f"SELECT * FROM {table} WHERE id = $1", id_)
        assert found is not None, f"{table} {id_} is gone"
        return dict(found)

    async def exists(self, table: str, id_: int) -> bool:
        return bool(await self.sql.fetchval(f"SELECT true FROM {table} WHERE id = $1", id_))

    async def update(self, table: str, id_: int, **columns: Any) -> None:
        changes = ", ".join(f'"{c}" = ${n}' for n, c in enumerate(columns, 2))
        await self.sql.execute(f"UPDATE {table} SET {changes} WHERE id = $1", id_, *columns.values())

    async def delete(self, table: str, *ids: int) -> None:
        await self.sql.execute(f"DELETE FROM {table} WHERE id = ANY ($1::bigint[])", list(ids))

    async def ledger(
        self, instance_id: int | None = None
    ) -> list[tuple[int, int, int | None, int, int, str]]:
        """(instance, worker, GPU or None, vram, ram, part) of every row, or of one instance's."""
        rows = await self.sql.fetch(
            "SELECT instance_id, worker_id, gpu_device_id, vram, ram, part FROM instance_claims"
            " WHERE $1::bigint IS NULL OR instance_id = $1 ORDER BY id",
            instance_id,
        )
        return [tuple(r) for r in rows]

    async def allocated(self, gpu_id: int) -> int:
        return int((await self.row("gpu_devices", gpu_id))["vram_allocated"])

    async def expire(self, *ids: int) -> None:
        """Let the leases of these instances be over."""
        await self.sql.execute(
            "UPDATE model_instances SET lease_until = clock_timestamp() - interval '1 s'"
            " WHERE id = ANY ($1::bigint[]) AND state = 'ANALYZING'",
            list(ids),
        )

    async def audit(self, limit: int = 1000) -> AuditReport:
        return await audit(self.sql, limit)

    async def clean(self) -> None:
        """Every rule of the contract holds."""
        assert (await self.audit()).breaches == ()

    # -- a replica ----------------------------------------------------------------------------------------

    async def claims(self, *ids: int, owner: UUID | None = None, lease: float = LEASE) -> list[Claim]:
        wanted = [(i, (await self.row("model_instances", i))["placement_epoch"]) for i in ids]
        return sorted(await self.store.claim(owner or self.owner, wanted, lease), key=lambda c: c.id)

    async def claim(self, id_: int, owner: UUID | None = None, lease: float = LEASE) -> Claim:
        (claim,) = await self.claims(id_, owner=owner, lease=lease)
        return claim

    async def part(
        self, worker_id: int, gpus: Sequence[int] = (), vram: int | Sequence[int] = 0, ram: int = 0
    ) -> Part:
        """A part as a decision on the rows of this moment makes it."""
        host = await self.row("workers", worker_id)
        cards = [await self.row("gpu_devices", g) for g in gpus]
        return Part(
            worker_id=worker_id,
            worker_name=host["name"],
            gpu_type=cards[0]["type"] if cards else None,
            gpu_ids=tuple(gpus),
            gpu_indexes=tuple(c["index"] for c in cards),
            gpu_versions=tuple(c["version"] for c in cards),
            vram=tuple([vram] * len(gpus) if isinstance(vram, int) else vram),
            ram=ram,
            worker_version=host["version"],
            unified=host["unified_memory"],
            worker_ip=host["ip"],
        )

    async def proposal(
        self,
        claim: Claim,
        *parts: Part,
        check: Check = Check.FITS,
        over_commit: bool = False,
        model_version: int | None = None,
        mode: str | None = None,
    ) -> Proposal:
        if model_version is None:
            model_version = (await self.row("models", claim.model_id))["version"]
        placement = Placement(parts, check=check, over_commit=over_commit, mode=mode)
        return Proposal(claim, model_version, Placed(placement))

    async def commit(self, *batch: Proposal, owner: UUID | None = None) -> list[CommitResult]:
        """Results in the order of the batch."""
        found = {r.instance_id: r for r in await self.store.commit(owner or self.owner, "r1", batch)}
        return [found[p.claim.id] for p in batch]

    async def place(self, instance_id: int, *parts: Part, **options: Any) -> CommitResult:
        """Claim and commit one instance."""
        claim = await self.claim(instance_id)
        (result,) = await self.commit(await self.proposal(claim, *parts, **options))
        return result

    async def placed(self, *parts: Part, model_id: int | None = None, **options: Any) -> int:
        """A new instance that holds these parts."""
        instance_id = await self.instance(model_id)
        result = await self.place(instance_id, *parts, **options)
        assert result.code is None, result
        return instance_id

    async def refuse(self, claim: Claim, owner: UUID | None = None, **more: Any) -> bool:
        outcome = more.pop("outcome", no_fit())
        return bool(await self.store.refuse(owner or self.owner, "r1", [Refusal(claim, outcome, **more)]))


def holds(row: Mapping[str, Any]) -> bool:
    """Whether an instance row says that it is placed."""
    return row["worker_id"] is not None


@asynccontextmanager
async def world_of(url: str, **settings: str) -> AsyncIterator[World]:
    """Opened on a database whose schema is at head."""
    sql = await connected(url, **settings)
    store = await PostgresStore.open(url, 4, replica="r1")
    try:
        yield World(url, sql, store)
    finally:
        await store.close()
        sql.terminate()
