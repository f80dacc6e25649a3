"""The fleet and the replicas of the executed rankings (scale-down spec section 4), and rows by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import Strategy
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.ranking import deletion_order
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.retention_score import RetentionWeights

GIB = 2**30
MODEL = 1

CARDS = {1: (24, 24), 2: (80,), 3: (80,)}
RAM = {1: 40, 2: 100, 3: 100}
PLACES = {1: (1, 0), 2: (2, 0), 3: (2, 0), 5: (1, 1), 6: (3, 0)}
"""Instance -> (worker, GPU index)."""


def fleet(states: Mapping[int, str] | None = None, without: tuple[int, ...] = ()) -> Fleet:
    """W1 2 x 24 GiB, W2 and W3 1 x 80 GiB, each claim 12 GiB of VRAM and 2 GiB of RAM booked."""
    made = Fleet()
    states = {3: "UNREACHABLE", **(states or {})}
    for worker_id, cards in CARDS.items():
        if worker_id in without:
            continue
        held = [i for i, (w, _) in PLACES.items() if w == worker_id]
        made.put_worker(
            WorkerRow(
                worker_id, f"w{worker_id}", 1, states.get(worker_id, "READY"),
                ram_capacity=RAM[worker_id] * GIB, ram_allocated=2 * len(held) * GIB,
            )
        )  # fmt: skip
        for index, size in enumerate(cards):
            here = [i for i in held if PLACES[i][1] == index]
            gpu = 10 * worker_id + index
            made.put_gpu(
                GpuRow(
                    gpu, worker_id, index, "cuda", vram_total=size * GIB, capacity=size * GIB,
                    vram_allocated=12 * len(here) * GIB,
                )
            )  # fmt: skip
            for i in here:
                made.add_booking(Booking(i, MODEL, worker_id, gpu, 12 * GIB, 0))
    return made


def row(
    id_: int,
    state: str,
    worker_state: str | None = "READY",
    layers: tuple[int, int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """An instance as the store reads it."""
    found: dict[str, Any] = {"id": id_, "state": state, "created": float(id_), "worker_state": worker_state}
    if id_ in PLACES:
        worker, index = PLACES[id_]
        claim: dict[str, Any] = {"ram": 2 * GIB, "vram": {str(index): 12 * GIB}}
        if layers:
            claim |= {"offload_layers": layers[0], "total_layers": layers[1]}
        found |= {
            "worker_id": worker, "gpu_type": "cuda", "gpu_indexes": [index], "computed_resource_claim": claim
        }  # fmt: skip
    return found | more


def six(layers: bool = False) -> list[Replica]:
    """#1 running W1, #2 running W2, #3 starting W2, #4 unplaced, #5 error W1, #6 on an unreachable worker."""
    full, part = ((33, 33), (20, 33)) if layers else (None, None)
    return [
        replica(r)
        for r in (
            row(1, "RUNNING", layers=full),
            row(2, "RUNNING", layers=part),
            row(3, "STARTING", layers=full),
            row(4, "PENDING", None),
            row(5, "ERROR", layers=full),
            row(6, "RUNNING", "UNREACHABLE", layers=full),
        )
    ]


def places(on: Fleet, strategy: Strategy = Strategy.BINPACK) -> PlacementScores:
    return PlacementScores(on, MODEL, strategy, 1.0)


def order(
    candidates: list[Replica], where: PlacementScores, weights: RetentionWeights | None = None
) -> list[int]:
    """Ids, the one to go first in front."""
    return [r.id for r in deletion_order(candidates, weights or RetentionWeights(), where)]
