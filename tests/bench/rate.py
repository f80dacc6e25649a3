"""What one replica commits a second, and its share of the ceiling taken in the same run, turn about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from tests.bench import ceiling
from tests.bench.daemons import Replica
from tests.bench.figure import Figure
from tests.bench.stage import Stage


async def one_replica(
    stage: Stage, daemon: Replica, folder: Path, number: int, rounds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """Mixed demands, then one model. `number` instances a burst."""
    figures: list[Figure] = []
    for name, models, bound in (
        ("100 mixed demands", stage.mixed, 0.35),
        ("one model", stage.models["one"][:1], 0.5),
    ):
        rates, tops, batch, cpu = [], [], [], []
        for n in range(rounds):
            await stage.settled()
            await stage.clear()
            spent = daemon.cpu()
            burst = await stage.burst(models, number)
            cpu.append((daemon.cpu() - spent) / max(burst.placed, 1))
            daemon.pause()
            await ceiling.record(stage)
            top = await ceiling.play(stage, folder)
            await stage.clear()
            daemon.go_on()
            rates.append(burst.rate)
            tops.append(top.rate)
            batch.append(top.batch)
            tell(
                f"{name}, round {n + 1}: {burst.rate:,.0f}/s of {top.rate:,.0f}/s,"
                f" {burst.placed} placed, {burst.waiting} wait"
            )
        figures += _figures(name, rates, tops, batch, cpu, bound)
    return figures


def _figures(
    name: str,
    rates: Sequence[float],
    tops: Sequence[float],
    batch: Sequence[float],
    cpu: Sequence[float],
    bound: float,
) -> list[Figure]:
    row = f"one replica, {name}"
    shares = [r / t for r, t in zip(rates, tops, strict=True)]
    spread = f"{len(rates)} rounds, {min(rates):,.0f} to {max(rates):,.0f}"
    return [
        Figure(row, "committed placements", median(rates), "/s", 2500, note=spread),
        Figure(
            row, "ceiling: pgbench, one client, the same calls", median(tops), "/s",
            note=f"batches of {median(batch):.0f}",
        ),
        Figure(
            row, "share of the ceiling", median(shares), "", bound,
            note=f"median of pairs, {min(shares):.2f} to {max(shares):.2f}",
        ),
        Figure(row, "processor time of the daemon for one placement", 1000 * median(cpu), "ms"),
    ]  # fmt: skip
