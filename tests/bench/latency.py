"""From INSERT to SCHEDULED as a client sees it, one instance at a time, nothing else going on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import anyio

from tests.bench.figure import Figure
from tests.bench.stage import Stage

_PAUSE = 0.02
"""Seconds between two instances, so that none finds the daemon still at work on the last."""
_LOOK = 0.001
_ROW = "idle, warm"


async def latency(stage: Stage, number: int, tell: Callable[[str], None]) -> list[Figure]:
    """`number` single instances, of mixed models in turn; one daemon runs and knows them."""
    models = stage.mixed
    await stage.settled()
    times = sorted([await _one(stage, models[n % len(models)]) for n in range(number)])
    await stage.clear()
    tell(f"latency: {number} single instances, {times[0]:.1f} to {times[-1]:.1f} ms")
    return [
        Figure(_ROW, "INSERT to SCHEDULED, p50", _quantile(times, 0.5), "ms", 10, at_most=True),
        Figure(_ROW, "INSERT to SCHEDULED, p99", _quantile(times, 0.99), "ms", 40, at_most=True,
               note=f"{number} instances, seen by a client that looks every millisecond"),
    ]  # fmt: skip


async def _one(stage: Stage, model: int) -> float:
    """Milliseconds from the INSERT being sent to the placement being seen."""
    await anyio.sleep(_PAUSE)
    began = perf_counter()
    burst = await stage.sql.fetchval(
        "INSERT INTO model_instances (name, model_id) VALUES (gen_random_uuid()::text, $1) RETURNING id",
        model,
    )
    with anyio.fail_after(30):
        while not await stage.sql.fetchval(
            "SELECT state = 'SCHEDULED' FROM model_instances WHERE id = $1", burst
        ):
            await anyio.sleep(_LOOK)
    return (perf_counter() - began) * 1000


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]
