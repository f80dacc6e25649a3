"""A database with a synthetic fleet and models, and bursts of instances that daemons find a place for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any

import anyio
import asyncpg

from tests.bench.demands import BenchModel

GIB = 2**30
LOOK = 0.05
"""Seconds between two looks whether a burst is over."""
PATIENCE = 300.0

_WORKERS = """
INSERT INTO workers (name, cluster_id, state, ram_total, ip, labels)
SELECT 'w' || n, (SELECT min(id) FROM clusters), 'READY', 512 * 1024::bigint ^ 3,
       '10.' || n / 65536 || '.' || n / 256 % 256 || '.' || n % 256,
       jsonb_build_object('pool', CASE WHEN n % 10 = 0 THEN 'large' ELSE 'common' END, 'zone', 'z' || n % 7)
  FROM generate_series(1, $1::int) n"""
# 80 GB on every large worker, elsewhere 80, 48 and 24 GB.
_GPUS = """
INSERT INTO gpu_devices (worker_id, index, type, vendor, name, vram_total)
SELECT w.id, i, 'cuda', 'nvidia', size || 'GB', size * 1024::bigint ^ 3
  FROM (SELECT id, CASE WHEN id % 10 = 0 THEN 80 ELSE (ARRAY[80, 80, 48, 24])[1 + id % 4] END AS size
          FROM workers) w, generate_series(0, 7) i
 ORDER BY w.id, i"""
_MODELS = """
INSERT INTO models (name, cluster_id, source, local_path, backend, backend_parameters, categories,
                    worker_selector)
SELECT $1, (SELECT min(id) FROM clusters), 'local_path', $2, 'vLLM', $3::jsonb, '["llm"]', $4::jsonb"""
_BURST = """
INSERT INTO model_instances (name, model_id)
SELECT $1 || '-' || n, ($2::bigint[])[1 + n % cardinality($2::bigint[])] FROM generate_series(1, $3::int) n"""
_UNDECIDED = """
SELECT EXISTS (SELECT FROM model_instances
                WHERE state = 'ANALYZING' OR (state = 'PENDING' AND reasons IS NULL))"""


@dataclass(frozen=True, slots=True)
class Burst:
    """What became of one burst. `seconds` from the INSERT's commit to the last placement, by the server's
    clock; `batches` transactions that placed something."""

    placed: int
    waiting: int
    seconds: float
    batches: int

    @property
    def rate(self) -> float:
        return self.placed / self.seconds if self.seconds > 0 else 0.0


class Stage:
    """Opened on a database whose schema is at head."""

    def __init__(self, url: str, sql: Any) -> None:
        self.url = url
        self.sql = sql
        self.models: dict[str, list[int]] = {}
        """Kind of demand -> ids of its models."""
        self._names = count(1)

    @classmethod
    async def open(cls, url: str) -> Stage:
        return cls(url, await asyncpg.connect(url, server_settings={"application_name": "gpustackd bench"}))

    async def close(self) -> None:
        await self.sql.close()

    async def __aenter__(self) -> Stage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def fill(self, workers: int, models: Sequence[BenchModel]) -> None:
        """The fleet (eight GPUs a worker) and the models."""
        await self.sql.execute("INSERT INTO clusters (name) VALUES ('bench')")
        await self.sql.execute(_WORKERS, workers)
        await self.sql.execute(_GPUS)
        for m in models:
            selector = json.dumps({"pool": m.pool})
            await self.sql.execute(_MODELS, m.name, str(m.path), json.dumps(m.parameters), selector)
        await self.know_models({m.name: m.kind for m in models})
        await self.tidy()

    async def know_models(self, kinds: dict[str, str]) -> None:
        self.models = {}
        for row in await self.sql.fetch("SELECT id, name FROM models ORDER BY id"):
            if row["name"] in kinds:
                self.models.setdefault(kinds[row["name"]], []).append(row["id"])

    @property
    def mixed(self) -> list[int]:
        """All models, in the order in which a burst of mixed demands goes round."""
        return sorted(i for ids in self.models.values() for i in ids)

    async def insert(self, models: Sequence[int], number: int, name: str = "burst") -> datetime:
        """A burst by one statement; the server's clock just after its commit."""
        await self.sql.execute(_BURST, f"{name}-{next(self._names)}", list(models), number)
        return await self.sql.fetchval("SELECT clock_timestamp()")  # type: ignore[no-any-return]

    async def decided(self) -> None:
        """Wait until every instance is placed or has its reasons. Raise TimeoutError."""
        with anyio.fail_after(PATIENCE):
            while await self.sql.fetchval(_UNDECIDED):
                await anyio.sleep(LOOK)

    async def burst(self, models: Sequence[int], number: int) -> Burst:
        """Insert, wait, count. Instances that were there before are no part of it."""
        last = await self.sql.fetchval("SELECT coalesce(max(id), 0) FROM model_instances")
        began = await self.insert(models, number)
        await self.decided()
        row = await self.sql.fetchrow(
            "SELECT count(*) FILTER (WHERE state = 'SCHEDULED') AS placed,"
            " count(*) FILTER (WHERE state = 'PENDING') AS waiting, max(scheduled_at) AS ended,"
            " count(DISTINCT xmin::text) FILTER (WHERE state = 'SCHEDULED') AS batches"
            " FROM model_instances WHERE id > $1",
            last,
        )
        seconds = (row["ended"] - began).total_seconds() if row["ended"] else 0.0
        return Burst(row["placed"], row["waiting"], seconds, row["batches"])

    async def clear(self, *, keep: str = "") -> None:
        """Give everything back, but for instances whose name begins with `keep`, and tidy up."""
        await self.sql.execute("DELETE FROM model_instances WHERE $1 = '' OR NOT starts_with(name, $1)", keep)
        await self.sql.execute("DELETE FROM scheduling_decisions")
        await self.tidy()

    async def tidy(self) -> None:
        """Every measurement starts with the same empty pages."""
        for table in ("model_instances", "instance_claims", "scheduling_decisions", "gpu_devices", "workers"):
            await self.sql.execute(f"VACUUM (ANALYZE) {table}")

    async def settled(self) -> None:
        """Wait until the daemons have heard of all that happened: one instance goes the whole way."""
        await self.burst(self.models["one"][:1], 1)
