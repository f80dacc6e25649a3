"""Users in a storm: one session of plain SQL that inserts, deletes, edits, cordons, takes machines away.

One session, so that users cannot get in each other's way: whatever goes wrong with a statement here is the
daemons' doing, and a failure.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import asyncpg

from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import GONE
from tests.integration.world import connected
from tests.waiting import elapse

KINDS: dict[str, dict[str, Any]] = {
    "whole": {"env": {"GPUSTACK_MODEL_VRAM_CLAIM": str(14 * GIB)}},
    "third": {"env": {"GPUSTACK_MODEL_VRAM_CLAIM": str(6 * GIB)}, "flags": ["--gpu-memory-utilization=0.3"]},
    "pair": {"env": {"GPUSTACK_MODEL_VRAM_CLAIM": str(30 * GIB)}, "flags": ["--tensor-parallel-size=2"]},
    "ram": {
        "env": {"GPUSTACK_MODEL_VRAM_CLAIM": str(4 * GIB)},
        "flags": ["--gpu-memory-utilization=0.2"],
        "extended_kv_cache": {"enabled": True, "ram_size": 8},
    },
    "huge": {"env": {"GPUSTACK_MODEL_VRAM_CLAIM": str(900 * GIB)}},
}
"""Models of one directory that differ in what they ask. `huge` fits nowhere, ever."""

SHARES = [("third", 40), ("whole", 25), ("ram", 20), ("pair", 10), ("huge", 5)]

FLEET = [W(f"w{n}", 96, "4x24", "2/1") for n in range(8)]
UNIFIED = W("u0", 64, "1x64", "2/1")


@dataclass
class Users:
    """Acts until told to stop. `did` counts what it did, `failed` holds statements that went wrong."""

    url: str
    path: str
    chance: random.Random
    backlog: int
    """Waiting instances up to which more are inserted."""
    did: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    inserted: int = 0
    broken: bool = False
    """The server is being restarted: connections may be lost."""
    stale: bool = False
    """Our connection may be of a time before the last restart."""
    _sql: Any = None
    _number: int = 0

    async def prepare(self, site: Site) -> None:
        """The fleet and the models."""
        for w in FLEET:
            await site.worker(w)
        await site.worker(UNIFIED, unified_memory=True)
        for kind in KINDS:
            await self._model(site.sql, kind)

    async def act(self, enough: Callable[[], bool]) -> None:
        """One deed after another until `enough`; then give everything that was taken away back."""
        deeds: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._insert, 30), (self._free, 30), (self._take, 12), (self._cancel, 6), (self._fail, 4),
            (self._flap, 5), (self._cordon, 4), (self._shrink, 4), (self._lose, 2), (self._edit, 2),
            (self._drop_model, 1),
        ]  # fmt: skip
        names, weights = zip(*deeds, strict=True)
        while not enough():
            (deed,) = self.chance.choices(names, weights)
            await self._do(deed)
            await elapse(self.chance.uniform(0, 0.03), "between two statements")
        await self._do(self._restore)

    async def _do(self, deed: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                if self._sql is None or self._sql.is_closed():
                    self._sql = await connected(self.url, application_name="users")
                    self.stale = False
                await deed()
                self.did[deed.__name__.strip("_")] += 1
                return
            except GONE as error:
                if not ((self.broken or self.stale) and self._lost(error)):
                    self.failed.append(f"{deed.__name__}: {type(error).__name__}: {error}")
                    return
                self.close()
                await elapse(0.1, "until the server may be back")

    def _lost(self, error: BaseException) -> bool:
        """Whether this says that the server is away, and not that a statement was wrong."""
        gone = (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError)
        return self._sql is None or self._sql.is_closed() or isinstance(error, gone)

    def close(self) -> None:
        if self._sql is not None:
            self._sql.terminate()
            self._sql = None

    # -- instances ------------------------------------------------------------------------------------

    async def _insert(self) -> None:
        waiting = await self._sql.fetchval("SELECT count(*) FROM model_instances WHERE worker_id IS NULL")
        if waiting >= self.backlog:
            return
        (kind,) = self.chance.choices([k for k, _ in SHARES], [n for _, n in SHARES])
        count = self.chance.randint(1, 40)
        names = [f"s{self._number + n}" for n in range(count)]
        self._number += count
        rows = await self._sql.fetch(
            "INSERT INTO model_instances (name, model_id, priority) SELECT n, m.id, $3 FROM models m,"
            " unnest($2::text[]) n WHERE m.name LIKE $1 || '-%' RETURNING id",
            kind,
            names,
            self.chance.choice([None, None, 1, 5]),
        )
        self.inserted += len(rows)

    async def _free(self) -> None:
        """Delete some that are placed, in no order."""
        await self._sql.execute(
            "DELETE FROM model_instances WHERE id = ANY (ARRAY(SELECT id FROM model_instances"
            " WHERE worker_id IS NOT NULL ORDER BY random() LIMIT $1))",
            self.chance.randint(1, 25),
        )

    async def _cancel(self) -> None:
        """Delete whatever comes, in whatever state."""
        await self._sql.execute(
            "DELETE FROM model_instances WHERE id = ANY (ARRAY(SELECT id FROM model_instances"
            " ORDER BY random() LIMIT $1))",
            self.chance.randint(1, 8),
        )

    async def _take(self) -> None:
        """Workers take what is SCHEDULED and report on."""
        state, was = self.chance.choice(
            [("INITIALIZING", "SCHEDULED"), ("STARTING", "INITIALIZING"), ("RUNNING", "STARTING"),
             ("RUNNING", "SCHEDULED"), ("UNREACHABLE", "RUNNING"), ("RUNNING", "UNREACHABLE")]
        )  # fmt: skip
        await self._sql.execute(
            "UPDATE model_instances SET state = $1 WHERE id = ANY (ARRAY(SELECT id FROM model_instances"
            " WHERE state = $2 ORDER BY random() LIMIT 10)) AND state = $2",
            state,
            was,
        )

    async def _fail(self) -> None:
        """An engine dies, or is restarted in place."""
        if self.chance.random() < 0.5:
            state, was = "ERROR", ("SCHEDULED", "STARTING", "RUNNING")
        else:
            state, was = "SCHEDULED", ("ERROR",)
        await self._sql.execute(
            "UPDATE model_instances SET state = $1 WHERE id = ANY (ARRAY(SELECT id FROM model_instances"
            " WHERE state = ANY ($2) AND worker_id IS NOT NULL ORDER BY random() LIMIT 3))"
            " AND state = ANY ($2) AND worker_id IS NOT NULL",
            state,
            list(was),
        )

    # -- machines -------------------------------------------------------------------------------------

    async def _flap(self) -> None:
        await self._sql.execute(
            "UPDATE workers SET state = CASE state WHEN 'READY' THEN 'MAINTENANCE' ELSE 'READY' END"
            " WHERE id = (SELECT id FROM workers ORDER BY random() LIMIT 1)"
        )

    async def _cordon(self) -> None:
        await self._sql.execute(
            "UPDATE gpu_devices SET schedulable = NOT schedulable"
            " WHERE id = (SELECT id FROM gpu_devices ORDER BY random() LIMIT 1)"
        )

    async def _shrink(self) -> None:
        """A card shows less memory than before, or all of it again."""
        await self._sql.execute(
            "UPDATE gpu_devices SET vram_total = CASE WHEN vram_total > $1 THEN $1 ELSE $2 END"
            " WHERE id = (SELECT id FROM gpu_devices WHERE NOT unified ORDER BY random() LIMIT 1)",
            12 * GIB,
            24 * GIB,
        )

    async def _lose(self) -> None:
        """A worker's row is deleted; the next time it is there again."""
        missing = await self._sql.fetchval(
            "SELECT n FROM unnest($1::text[]) n WHERE n NOT IN (SELECT name FROM workers) LIMIT 1",
            [w.name for w in FLEET],
        )
        if missing is None:
            await self._sql.execute(
                "DELETE FROM workers WHERE id = (SELECT id FROM workers WHERE NOT unified_memory"
                " ORDER BY random() LIMIT 1)"
            )
        else:
            await Site(self.url, None, self._sql).worker(next(w for w in FLEET if w.name == missing))  # type: ignore[arg-type]

    async def _restore(self) -> None:
        """The whole fleet is there, READY and open."""
        for w in FLEET:
            if not await self._sql.fetchval("SELECT true FROM workers WHERE name = $1", w.name):
                await Site(self.url, None, self._sql).worker(w)  # type: ignore[arg-type]
        await self._sql.execute("UPDATE workers SET state = 'READY' WHERE state <> 'READY'")
        await self._sql.execute("UPDATE gpu_devices SET schedulable = true WHERE NOT schedulable")
        await self._sql.execute(
            "UPDATE gpu_devices SET vram_total = $1 WHERE NOT unified AND vram_total < $1", 24 * GIB
        )

    # -- models ---------------------------------------------------------------------------------------

    async def _edit(self) -> None:
        """A model is edited: decisions on the version before are void."""
        await self._sql.execute(
            "UPDATE models SET env = env || $2 WHERE name LIKE $1 || '-%'",
            self.chance.choice(list(KINDS)),
            {"EDITION": str(self.chance.random())},
        )

    async def _drop_model(self) -> None:
        """A model goes with all its instances, and another takes its place."""
        kind = self.chance.choice([k for k in KINDS if k != "huge"])
        await self._sql.execute("DELETE FROM models WHERE name LIKE $1 || '-%'", kind)
        await self._model(self._sql, kind)

    async def _model(self, sql: Any, kind: str) -> None:
        found = dict(KINDS[kind])
        await sql.execute(
            "INSERT INTO models (name, source, local_path, backend, categories, env, backend_parameters,"
            " extended_kv_cache) VALUES ($1, 'local_path', $2, 'vLLM', $3, $4, $5, $6)",
            f"{kind}-{self.chance.getrandbits(40):x}",
            self.path,
            ["llm"],
            found["env"],
            found.get("flags", []),
            found.get("extended_kv_cache"),
        )


def told(did: Counter[str]) -> str:
    """Counts as one line."""
    return json.dumps(dict(sorted(did.items()))).strip("{}").replace('"', "")
