"""Resident memory of one replica that knows a large fleet and everything that sits on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.bench.daemons import replicas
from tests.bench.figure import Figure
from tests.bench.stage import Stage

MIB = 2**20


async def memory(stage: Stage, folder: Path, number: int, tell: Callable[[str], None]) -> list[Figure]:
    """One daemon places `number` instances on single cards; another starts and finds them there."""
    models = stage.models["one"]
    gpus = await stage.sql.fetchval("SELECT count(*) FROM gpu_devices")
    async with replicas(stage, folder, 1) as (daemon,):
        burst = await stage.burst(models, number)
        await stage.settled()
        placed, _ = daemon.memory()
    async with replicas(stage, folder, 1) as (daemon,):
        await stage.settled()
        found, most = daemon.memory()
    await stage.clear()
    tell(f"memory: {placed / MIB:.0f} MiB after placing {burst.placed}, {found / MIB:.0f} MiB after a start")
    row = f"memory, {gpus:,} GPUs and {burst.placed:,} instances"
    bound = 200 if gpus >= 40_000 and burst.placed >= 20_000 else None
    return [
        Figure(row, "resident, all of them placed by it", placed / 1e6, "MB", bound, True),
        Figure(row, "resident, all of them found at its start", found / 1e6, "MB", bound, True,
               note=f"{most / 1e6:.0f} MB at most while it read them"),
    ]  # fmt: skip
