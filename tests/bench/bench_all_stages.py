"""How long one decision takes with every filter and every scorer on, at 5,000 workers (issue 5).

The fleet and demands of `bench_decide`, and besides: a cluster, labels with preferred terms, engine images, a
local path of which 200 workers say that they lack it, files ready on 500 workers and on their way to others,
an adapter and a draft model, memory of others on a tenth of the cards; then the same with each strategy.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpustackd.domain.backends import Backends
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import ModelSpec, Source, Strategy
from gpustackd.domain.origin import DOWNLOADING, adapter_origins, draft_origin
from gpustackd.domain.paths import PathKnowledge, Presence
from gpustackd.placement.policy import Policy
from gpustackd.placement.search_cache import SearchCache
from tests.bench.bench_decide import BOUNDS, Desk, demands, figure, filled, measure, show

PATH = "/models/all-of-them"
LACKING, READY, COMING, ADAPTED = 200, 500, 100, 250
GIB = 2**30


def rows(quick: bool = False) -> list[dict[str, Any]]:
    """Figures: `row`, `what`, `value`, `unit`, `bound`, `at_most`, `note`."""
    workers, count = (1000, 400) if quick else (5000, 2000)
    desk = filled(workers)
    label(desk)
    every = {name: [whole(d) for d in wanted] for name, wanted in demands().items()}
    policy = everything(desk, [d.spec for wanted in every.values() for d in wanted])
    found: list[dict[str, Any]] = []
    gc.collect()
    for strategy in Strategy:
        desk.policy = replace(policy, strategy=strategy)
        desk.memo = SearchCache(256)
        for name, wanted in every.items():
            before = desk.refused
            times = measure(desk, wanted, count if strategy is Strategy.SPREAD else count // 4)
            (p50, cpu50), (p99, cpu99) = (np.percentile(times, q, axis=0).tolist() for q in (50, 99))
            note = f"{workers:,} workers, {strategy}; processor time {cpu50:.2f} / {cpu99:.2f} ms"
            refused = desk.refused - before
            note += f"; {refused} refused" if refused else ""
            bound = BOUNDS[name] if strategy is Strategy.SPREAD and not quick else None
            row = f"all filters and scorers: {name}"
            found.append(figure(row, f"p50, {strategy}", p50, bound, note))
            found.append(figure(row, f"p99, {strategy}", p99, bound and 3 * bound, note))
    return sorted(found, key=lambda f: list(every).index(f["row"].partition(": ")[2]))


def label(desk: Desk) -> None:
    """Labels on every worker, and memory of others on a tenth of the cards."""
    on = desk.on
    for w, row in enumerate(on.worker_rows):
        if row is not None:
            on.put_worker(replace(row, labels={"pool": "common", "zone": f"z{w % 5}", "disk": "nvme"}))
    on.set_foreign({gpu_id: GIB // 2 for n, gpu_id in enumerate(on.slot) if n % 10 == 0})


def whole(wanted: Demand) -> Demand:
    """The demand with everything that calls for a filter or a scorer."""
    spec = replace(
        wanted.spec,
        cluster_id=1,
        backend="vLLM",
        source=Source.LOCAL_PATH,
        local_path=PATH,
        worker_selector={
            "match": {"pool": "common"},
            "terms": [{"key": "disk", "operator": "In", "values": ["nvme", "ssd"]},
                      {"key": "broken", "operator": "DoesNotExist"}],
            "preferred": [{"key": "zone", "operator": "In", "values": ["z1", "z3"], "weight": 3}],
        },
        lora_list=({"lora_name": "a", "source": "local_path", "local_path": "/lora"},),
        speculative_config={"draft_model": "/draft"},
    )  # fmt: skip
    return replace(wanted, spec=spec)


def everything(desk: Desk, specs: Sequence[ModelSpec]) -> Policy:
    """What is known of paths, files and images."""
    ids = [int(i) for i in desk.on.worker_id[: desk.on.count]]
    spec = specs[0]
    (adapter,), draft = adapter_origins(spec), draft_origin(spec)
    assert draft is not None
    files = {
        spec.source_index: dict.fromkeys(ids[1000 % len(ids) :][:READY], 40 * GIB),
        adapter.index: dict.fromkeys(ids[:ADAPTED], GIB),
        draft.index: dict.fromkeys(ids[ADAPTED // 2 :][:ADAPTED], 2 * GIB),
        DOWNLOADING + spec.source_index: dict.fromkeys(ids[-COMING:], 40 * GIB),
    }
    lacking = PathKnowledge(dict.fromkeys(ids[-LACKING - COMING : -COMING], Presence.MISSING), False)
    return Policy(backends=Backends.of(()), paths={PATH: lacking}, ready_files=files)


if __name__ == "__main__":
    show(rows())
