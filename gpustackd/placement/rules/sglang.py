"""Rules of SGLang. Its static memory fraction may follow from the cards themselves: `sglang_fractions`."""

from __future__ import annotations

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.flags import COLUMN, parse_flags
from gpustackd.engines.parallelism import positive
from gpustackd.engines.sglang import FRACTION, TP, check, fraction, world_size
from gpustackd.errors import BadRow
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules, divisors, gpu_count

IMAGE = "image"


def sglang_rules(demand: Demand) -> ResourceRules:
    """Raises BadRow where a flag cannot be used or flags contradict each other; it names them."""
    spec, need = demand.spec, demand.need
    parameters = parse_flags(spec.backend_parameters)
    count, fixed = gpu_count(spec, world_size(parameters))
    divides = divisors(demand, vision=not parameters.flag("language-only"))
    tp = positive(parameters, TP) or 1
    hyper = demand.facts.hyper
    check(parameters, (hyper.num_attention_heads or 0) if hyper else 0)
    complaint = divides.complaint(tp)
    if complaint is not None:
        raise BadRow(COLUMN, f"--{TP[0]} {tp}: {complaint}", "change the tensor-parallel size")
    image = IMAGE in demand.categories
    return ResourceRules(
        engine=Engine.SGLANG,
        vram=need.vram or 0,
        claim_policy=ClaimPolicy.EACH if image else ClaimPolicy.SHARE,
        share=0.0 if image else fraction(parameters) or 0.0,
        share_flag="" if image else FRACTION,
        ram=need.ram,
        ram_static=need.ram_static,
        ram_ratio=need.ram_ratio,
        gpu_count=count,
        fixed_world=fixed,
        divisors=divides,
        distributed=not image and spec.distributed_inference_across_workers is not False,
        grouped=True,
        fewest=False,
        mode="initialize_later",
        replicas=1 if spec.replicas is None else spec.replicas,
    )
