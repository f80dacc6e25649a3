"""How long it takes to know what a model needs, for a hundred models on disk. Printed only.

Warm: the facts are at hand; what is left is what a daemon does before the first decision on a model whose
files it knows: judge the row, build the demand. Besides, the whole breakdown of `gpustackd estimate`, and for
comparison the reading of a directory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio
import numpy as np

from gpustackd.domain.model_spec import ModelSpec, model_spec
from gpustackd.estimate.breakdown import breakdown
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.evaluate import evaluate
from gpustackd.sources.reader import Reader
from tests.bench.bench_decide import figure, show
from tests.bench.demands import write_models

BACKENDS = ("vLLM", "SGLang", "MindIE")


def specs(folder: Path) -> list[ModelSpec]:
    """The hundred models, taking turns on three engines."""
    return [
        model_spec({"id": n, "version": 1, "name": m.name, "source": "local_path",
                    "local_path": str(m.path), "backend": BACKENDS[n % len(BACKENDS)]})
        for n, m in enumerate(write_models(folder))
    ]  # fmt: skip


async def measured(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by what was done."""
    models = specs(folder)
    found: dict[str, list[float]] = {"read": [], "warm": [], "breakdown": []}
    async with Reader() as reader:
        for spec in models:
            started = perf_counter()
            await reader.facts(spec)
            found["read"].append((perf_counter() - started) * 1000)

        def warm(spec: ModelSpec) -> None:
            facts = reader.cached(spec)
            assert facts is not None
            evaluate(spec, facts)
            build_demand(spec, facts)

        def taken_apart(spec: ModelSpec) -> None:
            facts = reader.cached(spec)
            assert facts is not None
            breakdown(spec, facts)

        for _ in range(rounds):
            found["warm"] += _timed(warm, models)
            found["breakdown"] += _timed(taken_apart, models)
    return found


def _timed(call: Callable[[ModelSpec], None], models: Sequence[ModelSpec]) -> list[float]:
    times = []
    for spec in models:
        started = perf_counter()
        call(spec)
        times.append((perf_counter() - started) * 1000)
    return times


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Figures: an estimate from a warm cache, its breakdown, and a directory read anew."""
    with tempfile.TemporaryDirectory(prefix="gpustackd-bench-") as folder:
        times = anyio.run(measured, Path(folder), 5 if quick else 50)
    named = {
        "warm": "estimate from a warm cache",
        "breakdown": "estimate from a warm cache, part by part",
        "read": "estimate: a directory read anew",
    }
    return [
        figure(
            row,
            "p50",
            float(np.percentile(times[key], 50)),
            None,
            f"p99 {np.percentile(times[key], 99):.3f} ms; {len(times[key])} estimates, 100 models, 3 engines",
        )
        for key, row in named.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    show(rows(parser.parse_args().quick))


if __name__ == "__main__":
    main()
