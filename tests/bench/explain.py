"""`explain` of an instance that waits on a large fleet with instances on it: the whole answer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import anyio.to_thread

from gpustackd.cli.explain import explain_instance
from gpustackd.settings import load
from tests.bench.daemons import replicas
from tests.bench.figure import Figure
from tests.bench.stage import Stage

ROUNDS = 5
LIMIT = 2000
"""Milliseconds."""
_MODEL = """
INSERT INTO models (name, cluster_id, source, local_path, backend, backend_parameters, categories,
                    worker_selector)
SELECT $1, m.cluster_id, m.source, m.local_path, m.backend, $2::jsonb, m.categories, $3::jsonb
  FROM models m WHERE m.id = $4 RETURNING id"""


async def explain(stage: Stage, folder: Path, number: int, tell: Callable[[str], None]) -> list[Figure]:
    """`number` mixed instances are placed, then two wait: one for a label that nobody carries, one for GPUs
    that nobody has free, as it asks for 32 of one worker."""
    cases = {
        "no worker carries its label": ([], {"zone": "none"}),
        "it asks for more GPUs than any worker has": (["--tensor-parallel-size=32"], {"pool": "common"}),
    }
    async with replicas(stage, folder, 1):
        burst = await stage.burst(stage.mixed, number)
        ids = [
            await stage.sql.fetchval(
                _MODEL, f"explained-{n}", json.dumps(flags), json.dumps(labels), stage.models["one"][0]
            )
            for n, (flags, labels) in enumerate(cases.values())
        ]
        await stage.sql.execute("UPDATE models SET distributed_inference_across_workers = false"
                                " WHERE id = ANY ($1::bigint[])", ids)  # fmt: skip
        await stage.insert(ids, len(ids), "explained")
        await stage.decided()
    names = [
        r["name"]
        for r in await stage.sql.fetch(
            "SELECT name FROM model_instances WHERE model_id = ANY ($1::bigint[]) ORDER BY model_id", ids
        )
    ]
    settings = load(None, {"database_url": stage.url})
    figures: list[Figure] = []
    for case, name in zip(cases, names, strict=True):
        times = []
        told: dict[str, object] = {}
        for _ in range(ROUNDS):
            began = perf_counter()
            told = await explain_instance(settings, stage.url, name)
            times.append((perf_counter() - began) * 1000)
        waiting = told["waiting"]
        assert isinstance(waiting, dict)
        count = len(waiting["suggestions"])
        figures.append(
            Figure(f"explain beside {burst.placed:,} instances", case, median(times), "ms", LIMIT,
                   at_most=True, note=f"{count} suggestions; {ROUNDS} times, at most {max(times):,.0f} ms")
        )  # fmt: skip
        tell(f"explain: {case}: {median(times):.0f} ms")
    began = perf_counter()
    await anyio.to_thread.run_sync(_command, stage.url, names[-1])
    whole = (perf_counter() - began) * 1000
    figures.append(Figure(figures[0].row, "the command, from its start to its end", whole, "ms"))
    await stage.clear()
    await stage.sql.execute("DELETE FROM models WHERE id = ANY ($1::bigint[])", ids)
    return figures


def _command(url: str, name: str) -> None:
    line = [sys.executable, "-m", "gpustackd", "explain", name, "--database-url", url, "-o", "json"]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
