"""How long a decision takes for engines and steps that the mixed demands do not reach: MindIE's NPUs, pools
of cards, hand-picked GPUs, places without a GPU. Printed only.

`rows()` returns the figures; `python -m tests.bench.bench_engines` prints them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.facts import HyperParameters
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.pools import Pools, gpu_pool
from gpustackd.placement.policy import Policy
from tests.bench.bench_decide import Desk, figure, measure, mixed, show
from tests.fleets import demand, fleet, model, occupy

HYPER = HyperParameters(num_attention_heads=128, max_sequence_length=8192)
CARD = {"memory": "80Gi", "manufacturer": "nvidia", "product": "H100"}
POOLS = Pools.of([gpu_pool("h100", 1, CARD)])
SHARED = ("--gpu-memory-utilization=0.2",)
HALF = {"type": "h100", "accelerator_sliced_memory_percentage": 50}


def npus(workers: int) -> Fleet:
    """Workers of eight linked NPUs; on a third of them two NPUs are in use."""
    on = fleet(f"{workers}x8x910B-64", type="cann", ram=1024, reserved=1)
    for gpu in list(on.gpu_rows.values()):
        on.put_gpu(replace(gpu, network={"status": "up", "inet": f"10.0.0.{gpu.id}"}))
    return _used(on, workers)


def cards(workers: int) -> Fleet:
    """The mixed fleet; on a third of its workers two cards are in use."""
    return _used(mixed(workers), workers)


def _used(on: Fleet, workers: int) -> Fleet:
    for w in range(1, workers + 1, 3):
        occupy(on, f"w{w}", [0, 1], 20, instance=10**6 + w, model=10**6)
    return on


def mindie() -> dict[str, list[Demand]]:
    """A few demands for each step."""
    steps: dict[str, tuple[range, tuple[str, ...]]] = {
        "one NPU": (range(8, 16), ()),
        "NPUs of one worker": (range(120, 200, 20), ()),
        "world size": (range(120, 200, 20), ("-tp", "4")),
        "workers": (range(500, 900, 100), ()),
    }
    return {
        f"mindie, {step}": [
            demand(
                size,
                model(8000 + 100 * n + i, backend="MindIE", backend_parameters=flags),
                engine=Engine.MINDIE,
                hyper=HYPER,
                ram=0.5,
            )
            for i, size in enumerate(sizes)
        ]
        for n, (step, (sizes, flags)) in enumerate(steps.items())
    }


def others() -> dict[str, list[Demand]]:
    """Slices, whole cards, hand-picked GPUs, and a model that no GPU holds but that may run without one."""
    picked = [f"w{w}:cuda:{g}" for w in (2, 3) for g in range(8)]
    return {
        "vgpu, a slice": [
            demand(20 + i, model(9000 + i, cluster_id=1, gpu_type_selector=HALF), engine=Engine.VGPU)
            for i in range(4)
        ],
        "vgpu, slices over workers": [
            demand(
                100 + i, model(9020 + i, cluster_id=1, gpu_type_selector=HALF), engine=Engine.VGPU, heads=128
            )
            for i in range(4)
        ],
        "whole cards": [
            demand(
                200 + i,
                model(9040 + i, cluster_id=1, gpu_type_selector={"type": "h100"},
                      backend_parameters=("--tensor-parallel-size=4",)),
                engine=Engine.WHOLE_CARD,
            )
            for i in range(4)
        ],
        "vllm, picked GPUs": [
            demand(
                20 + i, model(9060 + i, gpu_ids=picked, per_replica=2, backend_parameters=SHARED), heads=128
            )
            for i in range(4)
        ],
        "custom, CPU": [
            demand(4000 + i, model(9080 + i, cpu_offloading=True), engine=Engine.CUSTOM, ram=2)
            for i in range(4)
        ],
    }  # fmt: skip


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Figures by engine and step, for fleets of 100, 1,000 and 5,000 workers (short form: not these)."""
    found: list[dict[str, Any]] = []
    kinds: tuple[tuple[Callable[[int], Fleet], dict[str, list[Demand]]], ...] = (
        (npus, mindie()),
        (cards, others()),
    )
    for workers in (100, 1000) if quick else (100, 1000, 5000):
        for make, demands in kinds:
            desk = Desk(make(workers), Policy(pools=POOLS))
            for row, wanted in demands.items():
                before = desk.refused
                times = measure(desk, wanted, 50 if quick else 200)
                (p50, cpu50), (p99, cpu99) = (np.percentile(times, q, axis=0).tolist() for q in (50, 99))
                told = f"p99 {p99:.2f} ms; processor time {cpu50:.2f} / {cpu99:.2f} ms"
                refused = desk.refused - before
                told += f"; {refused} refused" if refused else ""
                found.append(figure(f"decide: {row}", f"p50 at {workers:,}", p50, None, told))
    order = list(dict.fromkeys(f["row"] for f in found))
    return sorted(found, key=lambda f: order.index(f["row"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    show(rows(parser.parse_args().quick))


if __name__ == "__main__":
    main()
