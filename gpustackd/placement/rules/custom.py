"""Rules of custom backends: whatever a user's engine takes, as far as its flags tell (custom spec part A)."""

from __future__ import annotations

import shlex

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.flags import parse_flags
from gpustackd.errors import BadRow
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules, gpu_count

FRACTIONS = ("gpu-memory-utilization", "mem-fraction-static")


def custom_rules(demand: Demand) -> ResourceRules:
    """Rules of user-defined backends, VoxBox and omni models; of the router role, which takes no GPU.

    Raises BadRow where flags or hand-picked GPUs cannot be used.
    """
    spec, need = demand.spec, demand.need
    count, _ = gpu_count(spec, None)
    return ResourceRules(
        engine=demand.engine,
        vram=need.vram or 0,
        taking=ClaimPolicy.AT_LEAST,
        share=card_fraction(demand) or 0.0,
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


def card_fraction(demand: Demand) -> float | None:
    """The share of every card that the engine takes, from its command line: the last occurrence of either
    flag decides; None where none is given, or it is no number in (0, 1]."""
    spec = demand.spec
    try:
        words = shlex.split(spec.run_command or "")
        command = parse_flags(words)
    except (ValueError, BadRow):
        command = parse_flags(())
    flags = [*command.flags, *parse_flags(spec.backend_parameters).flags]
    given = [f.value for f in flags if f.name in FRACTIONS]
    if not given or given[-1] is None:
        return None
    try:
        value = float(given[-1])
    except ValueError:
        return None
    return value if 0 < value <= 1 else None
