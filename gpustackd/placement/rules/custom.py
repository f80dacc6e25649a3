"""Rules of custom backends: whatever a user's engine takes, as far as its flags tell."""

from __future__ import annotations

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.custom import FRACTIONS, card_fraction
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules, gpu_count


def custom_rules(demand: Demand) -> ResourceRules:
    """Rules of user-defined backends, VoxBox and omni models; of the router role, which takes no GPU.

    Raises BadRow where flags or hand-picked GPUs cannot be used.
    """
    spec, need = demand.spec, demand.need
    count, _ = gpu_count(spec, None)
    return ResourceRules(
        engine=demand.engine,
        vram=need.vram or 0,
        claim_policy=ClaimPolicy.AT_LEAST,
        share=card_fraction(spec) or 0.0,
        share_flag=FRACTIONS[0],
        ram=need.ram,
        ram_static=need.ram_static,
        ram_ratio=need.ram_ratio,
        gpu_count=count,
        spans=False,
        cpu=bool(spec.cpu_offloading) or demand.engine is Engine.ROUTER,
        cpu_only=demand.engine is Engine.ROUTER,
        replicas=1 if spec.replicas is None else spec.replicas,
    )
