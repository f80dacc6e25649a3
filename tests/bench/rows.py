"""Which rows there are, in what order, and how large each is in the short and the long form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from gpustackd.store.embedded import EmbeddedPostgres
from gpustackd.store.migrate import upgrade
from tests.bench import machine, rate
from tests.bench.demands import BenchModel, write_models
from tests.bench.figure import Figure
from tests.bench.stage import Stage

Tell = Callable[[str], None]

NAMES = ("decide", "rate", "replicas", "full", "latency", "parked", "memory", "growth")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    workers: int
    burst: int
    rounds: int


QUICK = Size(1000, 960, 1)
LONG = Size(5000, 6400, 5)


async def measure(
    folder: Path, quick: bool, only: Sequence[str] | None, cores: list[int], tell: Tell
) -> tuple[dict[str, Any], list[Figure]]:
    """Every row asked for (None = all): what is known of the machine, and the figures."""
    size = QUICK if quick else LONG
    wanted = only or NAMES
    figures: list[Figure] = []
    async with EmbeddedPostgres(folder / "postgres", report=tell) as server:
        bench = Bench(server, folder, write_models(folder / "models"), size, tell)
        found = await bench.machine(cores)
        if "rate" in wanted:
            async with await bench.stage("rate", size.workers) as stage:
                figures += await rate.one_replica(stage, folder, size.burst, size.rounds, tell)
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

    async def stage(self, name: str, workers: int) -> Stage:
        """A database of its own with so many workers of eight GPUs."""
        maintenance = await Stage.open(self.server.url("postgres"))
        await maintenance.sql.execute(f'CREATE DATABASE "{name}"')
        await maintenance.close()
        url = self.server.url(name)
        await anyio.to_thread.run_sync(upgrade, url)
        stage = await Stage.open(url)
        await stage.fill(workers, self.models)
        self.tell(f"{name}: {workers} workers with {8 * workers} GPUs, {len(self.models)} models")
        return stage

    async def machine(self, cores: list[int]) -> dict[str, Any]:
        stage = await Stage.open(self.server.url("postgres"))
        try:
            return await machine.machine(stage.sql, cores)
        finally:
            await stage.close()
