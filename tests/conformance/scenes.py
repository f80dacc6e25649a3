"""One way to act as a user on either store, and to look at what became of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol
from uuid import UUID, uuid4

import asyncpg

from gpustackd.domain.outcome import Check, Part, Placed, Placement
from gpustackd.errors import Refused
from gpustackd.ports import Claim, CommitResult, Proposal, Store
from gpustackd.store.memory.store import MemoryStore
from tests.integration.world import GIB, World, world_of

SHOWN = {
    "workers": ("name", "state", "ram_capacity", "ram_allocated", "over_committed", "unified_memory"),
    "gpu_devices": ("index", "capacity", "open", "vram_allocated", "over_committed"),
    "models": ("name", "version"),
    "model_instances": (
        "name", "state", "worker_name", "gpu_indexes", "computed_resource_claim", "placement_epoch",
        "attempts", "lease_owner", "distributed_servers",
    ),
}  # fmt: skip
"""Columns that both stores must agree on, whatever their ids are."""


class Scene(Protocol):
    """A store and its users. Refused = the schema said no."""

    store: Store

    async def insert(self, table: str, **columns: Any) -> int: ...
    async def update(self, table: str, id_: int, **columns: Any) -> None: ...
    async def delete(self, table: str, *ids: int) -> None: ...
    async def row(self, table: str, id_: int) -> dict[str, Any] | None: ...
    async def rows(self, table: str) -> list[dict[str, Any]]: ...
    async def expire(self, *ids: int) -> None: ...
    async def evict(self, *ids: int) -> None: ...
    async def records(self) -> list[tuple[int, int, str]]: ...


class SqlScene:
    """Over PostgreSQL."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store: Store = world.store

    async def insert(self, table: str, **columns: Any) -> int:
        try:
            return await self.world.insert(table, **columns)
        except asyncpg.IntegrityConstraintViolationError as error:
            raise Refused(str(error)) from error

    async def update(self, table: str, id_: int, **columns: Any) -> None:
        try:
            await self.world.update(table, id_, **columns)
        except asyncpg.IntegrityConstraintViolationError as error:
            raise Refused(str(error)) from error

    async def delete(self, table: str, *ids: int) -> None:
        try:
            await self.world.delete(table, *ids)
        except asyncpg.IntegrityConstraintViolationError as error:
            raise Refused(str(error)) from error

    async def row(self, table: str, id_: int) -> dict[str, Any] | None:
        found = await self.world.sql.fetchrow(f"SELECT * FROM {table} WHERE id = $1", id_)
        return None if found is None else dict(found)

    async def rows(self, table: str) -> list[dict[str, Any]]:
        return [dict(r) for r in await self.world.sql.fetch(f"SELECT * FROM {table} ORDER BY id")]

    async def expire(self, *ids: int) -> None:
        await self.world.expire(*ids)

    async def evict(self, *ids: int) -> None:
        await self.world.sql.execute("SELECT gpustackd_evict($1::bigint[], 'drained')", list(ids))

    async def records(self) -> list[tuple[int, int, str]]:
        rows = await self.world.sql.fetch(
            "SELECT instance_id, placement_epoch, outcome FROM scheduling_decisions ORDER BY id"
        )
        return [tuple(r) for r in rows]


class MemoryScene:
    """Over memory, with a clock that stands still."""

    def __init__(self) -> None:
        self.time = 1_000_000.0
        self.memory = MemoryStore(lambda: self.time)
        self.store: Store = self.memory

    async def insert(self, table: str, **columns: Any) -> int:
        return self.memory.database.insert(table, **columns)

    async def update(self, table: str, id_: int, **columns: Any) -> None:
        self.memory.database.update(table, id_, **columns)

    async def delete(self, table: str, *ids: int) -> None:
        self.memory.database.delete(table, *ids)

    async def row(self, table: str, id_: int) -> dict[str, Any] | None:
        found = self.memory.database.table(table).get(id_)
        return None if found is None else self._shown(table, found)

    async def rows(self, table: str) -> list[dict[str, Any]]:
        return [self._shown(table, r) for _, r in sorted(self.memory.database.table(table).items())]

    def _shown(self, table: str, row: Any) -> dict[str, Any]:
        if isinstance(row, dict):
            return row
        names = (*SHOWN[table], "id", "version", "state_message", "next_attempt_at", "reasons", "columns")
        shown = {n: getattr(row, n) for n in names if hasattr(row, n)}
        if table == "workers":
            shown["ram_capacity"] = row.capacity
        return shown | shown.pop("columns", {})

    async def expire(self, *ids: int) -> None:
        for i in ids:
            row = self.memory.database.model_instances[i]
            if row.lease_until is not None:
                row.lease_until = self.time - 1

    async def evict(self, *ids: int) -> None:
        self.memory.database.evict(ids, "drained")

    async def records(self) -> list[tuple[int, int, str]]:
        return [(d.instance_id, d.placement_epoch, d.outcome) for d in self.memory.database.decisions]


@asynccontextmanager
async def scene_of(url: str | None) -> AsyncIterator[Scene]:
    """Over the database at `url`, or in memory for None."""
    if url is None:
        yield MemoryScene()
    else:
        async with world_of(url) as world:
            yield SqlScene(world)


# --- what a replica does, over the port alone --------------------------------------------------------------


async def fleet(scene: Scene, *vram: int | None, name: str = "w", **columns: Any) -> tuple[int, list[int]]:
    """A READY worker with 64 GiB of RAM and a GPU for each size: (worker id, GPU ids)."""
    worker = await scene.insert(
        "workers", **{"name": name, "state": "READY", "ram_total": 64 * GIB, **columns}
    )
    gpus = [
        await scene.insert("gpu_devices", worker_id=worker, index=n, type="cuda", vram_total=size)
        for n, size in enumerate(vram)
    ]
    return worker, gpus


async def part_on(
    store: Store, worker_id: int, gpus: Sequence[int] = (), vram: int | Sequence[int] = 0, ram: int = 0
) -> Part:
    """A part as a decision on the feed of this moment makes it."""
    changes = await store.fleet_changes(None)
    (host,) = [w for w in changes.workers if w.id == worker_id]
    by_id = {g.id: g for g in changes.gpus}
    cards = [by_id[g] for g in gpus]
    return Part(
        worker_id=host.id,
        worker_name=host.name,
        gpu_type="cuda" if cards else None,
        gpu_ids=tuple(gpus),
        gpu_indexes=tuple(c.index for c in cards),
        gpu_versions=tuple(c.version for c in cards),
        vram=tuple([vram] * len(gpus) if isinstance(vram, int) else vram),
        ram=ram,
        worker_version=host.version,
        unified=host.unified_memory,
    )


class Replica:
    """A random owner that claims and commits."""

    def __init__(self, store: Store, owner: UUID | None = None) -> None:
        self.store = store
        self.owner = owner or uuid4()

    async def claim(self, *ids: int, lease: float = 30.0) -> list[Claim]:
        wanted = [(w.id, w.epoch) for w in await self.store.waiting(ids)]
        return sorted(await self.store.claim(self.owner, wanted, lease), key=lambda c: c.id)

    async def proposal(
        self, claim: Claim, *parts: Part, check: Check = Check.FITS, over_commit: bool = False
    ) -> Proposal:
        (model,) = await self.store.models([claim.model_id])
        placement = Placement(parts, check=check, over_commit=over_commit, mode="initialize_later")
        return Proposal(claim, model.version, Placed(placement))

    async def commit(self, *batch: Proposal) -> list[CommitResult]:
        found = {r.instance_id: r for r in await self.store.commit(self.owner, "r", batch)}
        return [found[p.claim.id] for p in batch]

    async def place(self, instance_id: int, *parts: Part, **options: Any) -> CommitResult:
        (claim,) = await self.claim(instance_id)
        return (await self.commit(await self.proposal(claim, *parts, **options)))[0]
