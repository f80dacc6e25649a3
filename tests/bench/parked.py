"""Ten thousand instances that wait for capacity beside a burst that finds some: they must cost nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median

from tests.bench.figure import Figure
from tests.bench.stage import Stage

PARKED = "parked"
_MODELS = """
INSERT INTO models (name, cluster_id, source, local_path, backend, categories, worker_selector)
SELECT $1 || m.id, m.cluster_id, m.source, m.local_path, m.backend, m.categories, $2::jsonb
  FROM models m WHERE m.id = ANY ($3::bigint[]) RETURNING id"""


async def parked(
    stage: Stage, number: int, waiting: int, rounds: int, tell: Callable[[str], None]
) -> list[Figure]:
    """Bursts of `number` mixed instances with and without `waiting` parked ones, turn about; one daemon."""
    # Ten demands that fit nowhere: no worker carries the label that they select.
    selector = json.dumps({"pool": "none"})
    rows = await stage.sql.fetch(_MODELS, PARKED, selector, stage.models["one"][:10])
    nowhere = [r["id"] for r in rows]
    without, beside = [], []
    for n in range(rounds):
        without.append(await _rate(stage, number))
        await stage.insert(nowhere, waiting, PARKED)
        await stage.decided()
        beside.append(await _rate(stage, number))
        tell(f"parked, round {n + 1}: {without[-1]:,.0f}/s without, {beside[-1]:,.0f}/s beside {waiting}")
        await stage.clear()
    await stage.sql.execute("DELETE FROM models WHERE id = ANY ($1::bigint[])", nowhere)
    row = f"{waiting:,} parked instances"
    return [
        Figure(row, "committed placements beside them", median(beside), "/s"),
        Figure(
            row, "as a share of the rate without", median(beside) / median(without), "", 0.95,
            note=f"{rounds} rounds each, turn about",
        ),
    ]  # fmt: skip


async def _rate(stage: Stage, number: int) -> float:
    await stage.settled()
    burst = await stage.burst(stage.mixed, number)
    await stage.clear(keep=PARKED)
    return burst.rate
