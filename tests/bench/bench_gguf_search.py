"""How long placing GGUF models takes, by size of the fleet: unequal cards, partly used.

`rows()` returns the figures; `python -m tests.bench.bench_gguf_search` prints them. "First" is the first
decision for a model, with the exact sizes that it asks for; "next" are decisions after it, each on a fleet
that the one before changed. Milliseconds of this thread's processor time; the note has the wall clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Outcome, Placed
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.llama_cpp.flags import serving_of
from gpustackd.estimate.llama_cpp.need import LayerSizes
from gpustackd.estimate.llama_cpp.sizer import Sizer
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import fleet, occupy
from tests.gguf_models import GEMMA_27B, LLAMA_8B, LLAMA_70B, LLAMA_405B, R1_BF16, R1_Q8, Shape, demand

SIZES = (1, 8, 64, 512)
CARDS = ("A-24", "B-16", "C-48", "D-12")
REPORTED = 30
"""Workers of a search among thousands of sets of GPUs."""
BOUND = 50.0
"""Milliseconds that it may take here."""

SPREAD = {"distributed_inference_across_workers": True}
SOME = {"cpu_offloading": True}
WANTED: dict[str, tuple[Shape, dict[str, bool]]] = {
    "8B, one GPU": (LLAMA_8B, {}),
    "27B, one GPU": (GEMMA_27B, {}),
    "70B, GPUs of one worker": (LLAMA_70B, {}),
    "405B, over workers": (LLAMA_405B, SPREAD),
    "405B, some layers": (LLAMA_405B, SOME),
    "671B Q8, some layers over workers": (R1_Q8, {**SPREAD, **SOME}),
    "671B BF16, every way": (R1_BF16, {**SPREAD, **SOME}),
}


def unequal(workers: int, seed: int = 1, ram: int = 512) -> Fleet:
    """Workers with one to eight cards of 12 to 48 GiB, of which half are partly used, each differently."""
    chance = random.Random(seed)
    text = " + ".join(
        f"1x{chance.choice((1, 2, 3, 4, 6, 8))}x{chance.choice(CARDS)}[ram={ram}]" for _ in range(workers)
    )
    made = fleet(text)
    for w in range(1, workers + 1):
        for index in range(8):
            if chance.random() < 0.5:
                occupy(made, f"w{w}", [index], chance.uniform(0.5, 9), instance=10**6 + 10 * w + index)
    return made


def anew(wanted: Demand, shape: Shape) -> Demand:
    """The same demand with sizes that nobody asked for yet."""
    assert wanted.gguf is not None
    facts = shape.facts
    sizer = Sizer(facts, serving_of(facts, parse_flags(wanted.spec.backend_parameters)))
    return replace(wanted, gguf=replace(wanted.gguf, sizes=LayerSizes(sizer)))


def decisions(on: Fleet, wanted: Demand, count: int) -> Iterator[tuple[Outcome, float, float]]:
    """Outcomes with milliseconds of processor time and by the clock; what is placed goes again."""
    memo: Searches = SearchCache()
    for n in range(count):
        started, worked = perf_counter(), thread_time()
        outcome = decide(on, wanted, Subject(n + 1, f"x-{n}"), Policy(), memo)
        yield outcome, (thread_time() - worked) * 1000, (perf_counter() - started) * 1000
        if isinstance(outcome, Placed):
            on.assume(outcome.placement, n + 1, wanted.spec.id)
            on.forget(n + 1)


def told(outcome: Outcome) -> str:
    if not isinstance(outcome, Placed):
        return "no place"
    placed = outcome.placement
    workers = len({p.worker_id for p in placed.parts})
    return f"{placed.offload_layers}/{placed.total_layers} layers, {placed.gpu_count} GPUs, {workers} workers"


def measure(name: str, workers: int, count: int) -> tuple[float, float, float, str]:
    """First decision, median and p99 of the next ones, and what came out."""
    shape, fields = WANTED[name]
    wanted = anew(demand(shape, n=7, **fields), shape)
    gc.collect()
    found = list(decisions(unequal(workers), wanted, count))
    outcome, first, wall = found[0]
    rest = [cpu for _, cpu, _ in found[1:]]
    p50, p99 = np.percentile(rest, (50, 99)).tolist()
    return first, p50, p99, f"{told(outcome)}; first by the clock {wall:.1f}; p99 of the next {p99:.2f}"


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Figures of all rows: `row`, `what`, `value`, `unit`, `bound`, `at_most`, `note`."""
    count = 20 if quick else 60
    found: list[dict[str, Any]] = []
    for name in WANTED:
        row = f"GGUF search: {name}"
        first, p50, _, note = measure(name, REPORTED, count)
        note = f"{REPORTED} unequal workers; {note}"
        found.append(_figure(row, "first", first, BOUND if "over workers" in name else None, note))
        found.append(_figure(row, "next p50", p50, BOUND, note))
    for name in WANTED:
        row = f"GGUF search: {name}, by workers"
        for workers in SIZES:
            first, p50, _, note = measure(name, workers, count)
            found.append(_figure(row, f"first at {workers}", first, None, note))
            found.append(_figure(row, f"next p50 at {workers}", p50, None, note))
    return found


def _figure(row: str, what: str, value: float, bound: float | None, note: str) -> dict[str, Any]:
    return {"row": row, "what": what, "value": value, "unit": "ms", "bound": bound, "at_most": True,
            "note": note}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    found = rows(options.quick)
    if options.output == "json":
        print(json.dumps(found, indent=2))
        return
    for f in found:
        bound = f"<= {f['bound']:g}" if f["bound"] else "-"
        print(f"{f['row']:58} {f['what']:16} {f['value']:8.2f} {f['unit']}  {bound:8} {f['note']}")


if __name__ == "__main__":
    main()
