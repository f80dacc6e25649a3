"""How many cards of one size a model takes, and what is booked on them: the daemon's decision on hosts that
have nothing else to do."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.outcome import Placed
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.rules.engines import NPU

CARDS = 8
"""On one host."""
HOSTS = 4
MOST_HOSTS = 64
RAM = 2**42


@dataclass(frozen=True, slots=True)
class OnCards:
    """`gpus` 0 = no place, and `message` says why. Bytes; `booked` over all GPUs."""

    memory: int
    gpus: int = 0
    workers: int = 0
    booked: int = 0
    message: str = ""


def on_cards(demand: Demand, memory: int, world: int | None = None) -> OnCards:
    """Place one instance on hosts of eight cards of `memory` bytes each, as many as `world` GPUs need.

    A need that is not known, and flags that cannot be used, are refusals as well.
    """
    hosts = min(max(HOSTS, -(-(world or 0) // CARDS)), MOST_HOSTS)
    outcome = decide(_hosts(hosts, memory, demand), demand, Subject(1, "estimate"), Policy())
    if not isinstance(outcome, Placed):
        return OnCards(memory, message=outcome.message)
    found = outcome.placement
    booked = sum(v for part in found.parts for v in part.vram)
    return OnCards(memory, found.gpu_count, len(found.parts), booked)


def _hosts(count: int, memory: int, demand: Demand) -> Fleet:
    made = Fleet()
    kind, vendor = (NPU, "ascend") if demand.engine is Engine.MINDIE else ("cuda", "nvidia")
    for w in range(1, count + 1):
        made.put_worker(
            WorkerRow(
                w, f"host-{w}", demand.spec.cluster_id or 1, "READY", ram_capacity=RAM, ip=f"10.0.0.{w}"
            )
        )
        for g in range(CARDS):
            link = {"status": "up", "inet": f"10.1.{w}.{g}"}
            made.put_gpu(
                GpuRow(
                    CARDS * w + g, w, g, kind, vram_total=memory, capacity=memory, vendor=vendor, network=link
                )
            )
    return made
