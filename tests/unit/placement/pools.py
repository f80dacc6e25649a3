"""Pools for tests: one type of card, with or without an inventory, and models that ask for it."""

from __future__ import annotations

from typing import Any

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.facts import HyperParameters
from gpustackd.domain.pools import Pools, gpu_pool
from gpustackd.placement.policy import Policy
from tests import fleets
from tests.fleets import GIB, model

A100 = {
    "memory": "80Gi",
    "manufacturer": "nvidia",
    "product": "A100",
    "sliced_detail": {"physical": {"profiles": [{"name": "3g.40gb", "count": 2, "memory_mib": 40960}]}},
}


def policy(detail: dict[str, Any] | None = None, devices: Any = None, *, name: str = "pool") -> Policy:
    """A policy that knows one pool in cluster 1."""
    types = [gpu_pool(name, 1, A100 if detail is None else detail)]
    return Policy(pools=Pools.of(types, {1: devices}))


def node(*remaining: int, logical: int = 8, profiles: int = 0, product: str = "A100") -> list[dict[str, Any]]:
    """What a cluster reports of one node: what remains of each card, in percent."""
    return [
        {
            "id": "g", "manufacturer": "NVIDIA", "product": product, "logical_count": logical,
            "physical_profiles": [{"name": "3g.40gb", "count": profiles}] if profiles else [],
            "accelerators": [{"index": n, "remaining": r * 10_000} for n, r in enumerate(remaining)],
        }
    ]  # fmt: skip


def asking(
    gib: float, *flags: str, heads: int | None = 64, ram: float = 0, n: int = 1, selector: dict[str, Any],
    **fields: Any,
) -> Demand:  # fmt: skip
    """A model that needs so much of the pool."""
    fields = {"cluster_id": 1, **fields}
    spec = model(n, gpu_type_selector={"type": "pool", **selector}, backend_parameters=flags, **fields)
    whole = not any(selector.values())
    hyper = HyperParameters(num_attention_heads=heads, max_sequence_length=8192)
    engine = Engine.WHOLE_CARD if whole else Engine.VGPU
    return fleets.demand(gib, spec, engine=engine, hyper=hyper, ram=ram)


def half(gib: float, *flags: str, **more: Any) -> Demand:
    """A model on slices of half a card."""
    return asking(gib, *flags, selector={"accelerator_sliced_memory_percentage": 50}, **more)


def partition(gib: float, *flags: str, profile: str = "3g.40gb", **more: Any) -> Demand:
    """A model on hardware partitions."""
    return asking(gib, *flags, selector={"accelerator_partitioned_profile": profile}, **more)


def whole(gib: float, *flags: str, **more: Any) -> Demand:
    """A model on whole cards."""
    return asking(gib, *flags, selector={}, **more)


__all__ = ["A100", "GIB", "asking", "half", "node", "partition", "policy", "whole"]
