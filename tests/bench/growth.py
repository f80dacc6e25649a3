"""What one placement costs on fleets of different size, the burst being the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from tests.bench.daemons import replicas, warm
from tests.bench.figure import Figure
from tests.bench.stage import Stage

_ROW = "cost against workers"


async def growth(
    stages: Mapping[int, Stage], folder: Path, number: int, rounds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """Stages by their number of workers; bursts of `number` instances of one worker or less."""
    costs: dict[int, tuple[float, float]] = {}
    for workers, stage in stages.items():
        models = [*stage.models["one"], *stage.models["many"]]
        wall, spent = [], []
        async with replicas(stage, folder, 1) as (daemon,):
            await warm(stage)
            for _ in range(rounds):
                before = daemon.cpu()
                burst = await stage.burst(models, number)
                spent.append(1000 * (daemon.cpu() - before) / max(burst.placed, 1))
                wall.append(1000 / burst.rate if burst.rate else 0.0)
                await stage.clear()
        costs[workers] = (median(wall), median(spent))
        tell(f"growth: {workers} workers, {median(wall):.2f} ms a placement, {median(spent):.2f} of it ours")
    figures = [
        Figure(_ROW, f"{workers:,} workers, one placement", wall, "ms",
               note=f"{spent:.2f} ms of the daemon's processor")
        for workers, (wall, spent) in costs.items()
    ]  # fmt: skip
    if {100, 1000} <= costs.keys() and costs[100][0]:
        times = costs[1000][0] / costs[100][0]
        figures.append(Figure(_ROW, "1,000 workers against 100", times, "times", 10, at_most=True))
    return figures
