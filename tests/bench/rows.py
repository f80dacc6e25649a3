"""Which rows there are, in what order, and how large each is in the short and the long form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from gpustackd.store.embedded import EmbeddedPostgres
from gpustackd.store.postgres.migrate import migrate
from tests.bench import (
    bench_all_stages,
    bench_decide,
    bench_engines,
    bench_estimate,
    bench_gguf_search,
    gguf_errors,
    machine,
    side_by_side,
)
from tests.bench.daemons import replicas, warm
from tests.bench.demands import BenchModel, write_models
from tests.bench.explain import explain
from tests.bench.figure import Figure
from tests.bench.growth import growth
from tests.bench.latency import latency
from tests.bench.memory import memory
from tests.bench.parked import parked
from tests.bench.rate import one_replica
from tests.bench.stage import Stage

Tell = Callable[[str], None]

NAMES = (
    "decide",
    "stages",
    "engines",
    "estimate",
    "gguf",
    "truth",
    "rate",
    "latency",
    "parked",
    "replicas",
    "full",
    "memory",
    "explain",
    "growth",
)
"""In the order of the table in README.md, as far as rows do not share a daemon."""
SHARING = ("latency", "rate", "parked")
"""Rows that one daemon serves."""


IN_MEMORY: dict[str, Callable[[bool], list[dict[str, Any]]]] = {
    "decide": bench_decide.rows,
    "stages": bench_all_stages.rows,
    "engines": bench_engines.rows,
    "estimate": bench_estimate.rows,
    "gguf": bench_gguf_search.rows,
    "truth": gguf_errors.rows,
}
"""Rows without a database."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    workers: int
    burst: int
    rounds: int
    singles: int
    parked: int
    parked_rounds: int
    full_workers: int
    full_burst: int
    replica_rounds: int
    instances: int
    growth: tuple[int, ...]
    growth_burst: int
    growth_rounds: int


QUICK = Size(
    workers=1000, burst=960, rounds=1, singles=40, parked=2000, parked_rounds=1, full_workers=60,
    full_burst=400, replica_rounds=1, instances=4000, growth=(100, 1000), growth_burst=160, growth_rounds=1,
)  # fmt: skip
LONG = Size(
    workers=5000, burst=6000, rounds=4, singles=400, parked=10_000, parked_rounds=2,
    full_workers=500, full_burst=3200, replica_rounds=2, instances=20_000,
    growth=(100, 1000, 5000), growth_burst=160, growth_rounds=7,
)  # fmt: skip


async def measure(
    folder: Path, quick: bool, only: Sequence[str] | None, cores: list[int], tell: Tell
) -> tuple[dict[str, Any], list[Figure]]:
    """Every row asked for (None = all): what is known of the machine, and the figures."""
    wanted = only or NAMES
    figures: list[Figure] = []
    for name, rows in IN_MEMORY.items():
        if name in wanted:
            figures += [Figure(**row) for row in await anyio.to_thread.run_sync(rows, quick)]
    async with EmbeddedPostgres(folder / "postgres", report=tell) as server:
        bench = Bench(server, folder, write_models(folder / "models"), QUICK if quick else LONG, tell)
        found = await bench.machine(cores)
        figures += await bench.figures(wanted)
    return found, figures


class Bench:
    """The server and everything that rows share."""

    def __init__(
        self, server: EmbeddedPostgres, folder: Path, models: list[BenchModel], size: Size, tell: Tell
    ) -> None:
        self.server = server
        self.folder = folder
        self.models = models
        self.size = size
        self.tell = tell
        self._names: list[str] = []
        self._migrated = False

    async def figures(self, wanted: Sequence[str]) -> list[Figure]:
        """All rows but that of the decision alone."""
        size, figures = self.size, []
        large = {"replicas", "memory", "explain", *SHARING} & set(wanted)
        stages: dict[int, Stage] = {}
        async with AsyncExitStack() as stack:
            if large:
                stages[size.workers] = await stack.enter_async_context(await self.stage(size.workers))
                figures += await self._on_large(stages[size.workers], wanted)
            if "full" in wanted:
                async with await self.stage(size.full_workers) as stage:
                    figures += await side_by_side.nearly_full(
                        stage, self.folder, size.full_burst, size.replica_rounds, self.tell
                    )
            if "growth" in wanted:
                for workers in size.growth:
                    if workers not in stages:
                        stages[workers] = await stack.enter_async_context(await self.stage(workers))
                figures += await growth(
                    {w: stages[w] for w in size.growth}, self.folder, size.growth_burst, size.growth_rounds,
                    self.tell,
                )  # fmt: skip
        return figures

    async def _on_large(self, stage: Stage, wanted: Sequence[str]) -> list[Figure]:
        size, figures = self.size, []
        if set(SHARING) & set(wanted):
            async with replicas(stage, self.folder, 1) as (daemon,):
                await warm(stage)
                if "rate" in wanted:
                    figures += await one_replica(
                        stage, daemon, self.folder, size.burst, size.rounds, self.tell
                    )
                if "latency" in wanted:
                    figures += await latency(stage, size.singles, self.tell)
                if "parked" in wanted:
                    figures += await parked(stage, size.burst, size.parked, size.parked_rounds, self.tell)
        if "replicas" in wanted:
            figures += await side_by_side.with_room(
                stage, self.folder, size.burst, size.replica_rounds, self.tell
            )
        if "memory" in wanted:
            figures += await memory(stage, self.folder, size.instances, self.tell)
        if "explain" in wanted:
            figures += await explain(stage, self.folder, size.instances, self.tell)
        return figures

    async def stage(self, workers: int) -> Stage:
        """A database of its own with so many workers of eight GPUs."""
        name = f"bench_{workers}_{len(self._names)}"
        self._names.append(name)
        maintenance = await Stage.open(self.server.url("postgres"))
        await maintenance.sql.execute(
            f'CREATE DATABASE "{name}" TEMPLATE "{await self._template(maintenance)}"'
        )
        await maintenance.close()
        stage = await Stage.open(self.server.url(name))
        await stage.fill(workers, self.models)
        self.tell(f"{workers} workers with {8 * workers} GPUs, {len(self.models)} models")
        return stage

    async def _template(self, maintenance: Stage) -> str:
        """A database with the schema, migrated once."""
        if not self._migrated:
            await maintenance.sql.execute("CREATE DATABASE bench_template")
            await migrate(self.server.url("bench_template"))
            self._migrated = True
        return "bench_template"

    async def machine(self, cores: list[int]) -> dict[str, Any]:
        stage = await Stage.open(self.server.url("postgres"))
        try:
            return await machine.machine(stage.sql, cores)
        finally:
            await stage.close()
