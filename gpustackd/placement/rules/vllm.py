"""Rules of vLLM."""

from __future__ import annotations

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.flags import COLUMN, parse_flags
from gpustackd.engines.parallelism import positive
from gpustackd.engines.vllm import SHARE, TP, executor, parallel_sizes, share, splits_vision, world_size
from gpustackd.errors import BadRow
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules, divisors, gpu_count


def vllm_rules(demand: Demand) -> ResourceRules:
    """Raises BadRow where a flag cannot be used; it names flag and value."""
    spec = demand.spec
    need = demand.need
    parameters = parse_flags(spec.backend_parameters)
    found = world_size(parameters)
    count, fixed = gpu_count(spec, found)
    divides = divisors(demand, vision=splits_vision(demand, parameters))
    tp = positive(parameters, TP)
    complaint = divides.complaint(tp or 0)
    if complaint is not None:
        raise BadRow(COLUMN, f"--{TP[0]} {tp}: {complaint}", "change the tensor-parallel size")
    topology = None
    if executor(demand, parameters) == "mp":
        topology = parallel_sizes(parameters)
    u = share(demand, parameters)
    return ResourceRules(
        engine=Engine.VLLM,
        vram=need.vram or 0,
        claim_policy=ClaimPolicy.SHARE if u > 0 else ClaimPolicy.SPLIT,
        share=u,
        share_flag=SHARE,
        ram=need.ram,
        ram_static=need.ram_static,
        ram_ratio=need.ram_ratio,
        gpu_count=count,
        fixed_world=fixed,
        divisors=divides,
        distributed=spec.distributed_inference_across_workers is not False,
        topology=topology,
        mode="initialize_later",
        replicas=1 if spec.replicas is None else spec.replicas,
    )
