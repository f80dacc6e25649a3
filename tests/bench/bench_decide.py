"""How long one decision takes on a fleet of mixed workers with instances on it.

`rows()` returns the figures; `python -m tests.bench.bench_decide` prints them.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections import deque
from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import NoFit
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import demand, fleet, model

BOUNDS = {"one GPU": 0.8, "2 to 8 GPUs of one worker": 0.5, "2 to 4 workers": 1.0}
"""p50 in milliseconds; p99 may be three times as much."""

INSTANCES_PER_WORKER = 4
STANDING = 64
"""Instances of a row that stay placed while it is measured; older ones go: the fleet stays as full."""


def mixed(workers: int) -> Fleet:
    """Workers of eight GPUs each: 80, 141, 48 and 24 GB in parts of 30, 20, 30 and 20 %."""
    w = workers // 10
    return fleet(f"{3 * w}x8xH100-80 + {2 * w}x8xH200-141 + {3 * w}x8xA6000-48 + {2 * w}x8x4090-24",
                 ram=1024, reserved=1)  # fmt: skip


def demands() -> dict[str, list[Demand]]:
    """A hundred demands by row."""
    small = [demand(0.5 + 0.2 * i, model(1 + i, categories=("embedding",))) for i in range(24)]
    one = [demand(8 + i, model(100 + i), heads=64) for i in range(40)]
    many = [demand(130 + 12 * i, model(200 + i), heads=64) for i in range(32)]
    over = [demand(1100 + 150 * i, model(300 + i), heads=128) for i in range(4)]
    return {"one GPU": small + one, "2 to 8 GPUs of one worker": many, "2 to 4 workers": over}


def by_engine() -> dict[str, list[Demand]]:
    """A few demands of every engine and step, and of every placement strategy."""
    found: dict[str, list[Demand]] = {}
    for engine in (Engine.VLLM, Engine.SGLANG, Engine.CUSTOM):
        for n, (step, sizes) in enumerate(STEPS.items()):
            if step == "workers" and engine is Engine.CUSTOM:
                continue
            base = 1000 + 100 * n + 300 * list(Engine).index(engine)
            found[f"{engine}, {step}"] = [
                demand(
                    size, model(base + i), engine=engine, heads=128, ram=2 if engine is Engine.CUSTOM else 0
                )
                for i, size in enumerate(sizes)
            ]
    for n, strategy in enumerate(Strategy):
        spec = [model(5000 + 10 * n + i, placement_strategy=strategy) for i in range(8)]
        found[f"strategy {strategy}"] = [demand(10 + i, s, heads=64) for i, s in enumerate(spec)]
    return found


STEPS = {"GPU": range(8, 16), "GPUs": range(200, 360, 20), "workers": range(1100, 1700, 150)}
"""Needs in GiB that take one GPU, several of one worker, several workers."""


class Desk:
    """Decides, and lets every placement count as committed."""

    def __init__(self, on: Fleet, policy: Policy) -> None:
        self.on = on
        self.policy = policy
        self.memo: Searches = SearchCache(256)
        self.next_id = 1
        self.refused = 0

    def one(self, wanted: Demand) -> tuple[int | None, tuple[float, float]]:
        """Instance id (None = refused), milliseconds by the clock and of this thread's processor time."""
        n = self.next_id
        self.next_id += 1
        subject = Subject(n, f"{wanted.spec.name}-{n}")
        started, worked = perf_counter(), thread_time()
        outcome = decide(self.on, wanted, subject, self.policy, self.memo)
        took = ((perf_counter() - started) * 1000, (thread_time() - worked) * 1000)
        if isinstance(outcome, NoFit):
            self.refused += 1
            return None, took
        self.on.assume(outcome.placement, n, wanted.spec.id)
        self.on.confirm(n)
        return n, took

    def leave(self, n: int) -> None:
        """An instance goes, and gives back what it held."""
        for b in list(self.on.occupancy.by_instance.get(n, ())):
            place = self.on.slot[b.gpu_id] if b.gpu_id is not None else None
            if place is not None:
                self.on.vram_allocated[place] -= b.vram
            self.on.ram_allocated[self.on.position[b.worker_id]] -= b.ram
        self.on.remove_instance(n)


def filled(workers: int) -> Desk:
    """A fleet with four instances per worker on average, packed so that whole workers stay free."""
    desk = Desk(mixed(workers), Policy(strategy=Strategy.BINPACK))
    by_row = demands()
    wanted = [*by_row["one GPU"], *by_row["2 to 8 GPUs of one worker"][:8]]
    for i in range(INSTANCES_PER_WORKER * workers):
        desk.one(wanted[i % len(wanted)])
    desk.policy = Policy()
    desk.memo = SearchCache(256)
    return desk


def measure(desk: Desk, wanted: Sequence[Demand], count: int) -> np.ndarray[Any, Any]:
    """(count, 2) milliseconds, by the clock and of processor time, of decisions for demands that take turns
    and that were each met once before."""
    standing: deque[int] = deque()
    times: list[tuple[float, float]] = []
    for i in range(count + len(wanted)):
        n, took = desk.one(wanted[i % len(wanted)])
        if i >= len(wanted):
            times.append(took)
        if n is not None:
            standing.append(n)
        if len(standing) > min(STANDING, 4 * len(wanted)):
            desk.leave(standing.popleft())
    for n in standing:
        desk.leave(n)
    return np.array(times)


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Figures of all rows: `row`, `what`, `value`, `unit`, `bound`, `at_most`, `note`."""
    sizes = (100, 1000) if quick else (100, 1000, 5000)
    count = 400 if quick else 2000
    found: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []
    gc.collect()
    for workers in sizes:
        desk = filled(workers)
        note = f"{workers:,} workers, {8 * workers:,} GPUs, {len(desk.on.occupancy.by_instance):,} instances"
        for row, wanted in demands().items():
            before = desk.refused
            times = measure(desk, wanted, count)
            (p50, cpu50), (p99, cpu99) = (np.percentile(times, q, axis=0).tolist() for q in (50, 99))
            refused = desk.refused - before
            told = f"{note}; processor time {cpu50:.2f} / {cpu99:.2f} ms"
            told += f"; {refused} refused" if refused else ""
            if workers == sizes[-1]:
                bound = BOUNDS[row]
                found.append(figure(f"decide: {row}", "p50", p50, bound, told))
                found.append(figure(f"decide: {row}", "p99", p99, 3 * bound, told))
            growth.append(figure(f"decide: {row}, by workers", f"p50 at {workers:,}", p50, None, told))
        for row, wanted in by_engine().items():
            times = measure(desk, wanted, count // 8)
            (p50, cpu50), (p99, cpu99) = (np.percentile(times, q, axis=0).tolist() for q in (50, 99))
            told = f"p99 {p99:.2f} ms; processor time {cpu50:.2f} / {cpu99:.2f} ms"
            growth.append(figure(f"decide: {row}", f"p50 at {workers:,}", p50, None, told))
    order = list(dict.fromkeys(g["row"] for g in growth))
    return found + sorted(growth, key=lambda g: order.index(g["row"]))


def figure(row: str, what: str, value: float, bound: float | None, note: str) -> dict[str, Any]:
    """Milliseconds as a row of the table (`figure.Figure`)."""
    return {
        "row": row,
        "what": what,
        "value": value,
        "unit": "ms",
        "bound": bound,
        "at_most": True,
        "note": note,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    found = rows(options.quick)
    if options.output == "json":
        print(json.dumps(found, indent=2))
        return
    show(found)


def show(found: Sequence[dict[str, Any]]) -> None:
    """Print figures, a line each."""
    for f in found:
        bound = f"<= {f['bound']:g}" if f["bound"] else "-"
        print(f"{f['row']:48} {f['what']:14} {f['value']:8.3f} {f['unit']}  {bound:8} {f['note']}")


if __name__ == "__main__":
    main()
