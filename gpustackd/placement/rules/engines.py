"""Rules of the engines that take GPUs by count and share: vLLM, SGLang, MindIE, and those that users bring.

Each is a function from a demand to `ResourceRules`; what is true of the engine lies in `gpustackd/engines/`.
"""

from __future__ import annotations

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines import custom, sglang, vllm
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.mindie import flags as mindie
from gpustackd.engines.mindie.parallelism import Ranks, check_model, ranks
from gpustackd.engines.parallelism import positive
from gpustackd.placement.rules.resource_rules import (
    ClaimPolicy,
    ResourceRules,
    check_split,
    demand_fields,
    divisors,
    gpu_count,
)

NPU = "cann"
IMAGE = "image"


def vllm_rules(demand: Demand) -> ResourceRules:
    """vLLM takes a fixed share of every GPU, or what a pooling model needs.

    Raises BadRow where a flag cannot be used; it names flag and value.
    """
    spec = demand.spec
    parameters = parse_flags(spec.backend_parameters)
    count, fixed = gpu_count(spec, vllm.world_size(parameters))
    divides = divisors(demand, vision=vllm.splits_vision(demand, parameters))
    check_split(divides, vllm.TP[0], positive(parameters, vllm.TP))
    by_processes = vllm.executor(demand, parameters) == "mp"
    topology = vllm.parallel_sizes(parameters) if by_processes else None
    share = vllm.share(demand, parameters)
    return ResourceRules(
        **demand_fields(demand),
        claim_policy=ClaimPolicy.SHARE if share > 0 else ClaimPolicy.SPLIT,
        share=share,
        share_flag=vllm.SHARE,
        gpu_count=count,
        fixed_world=fixed,
        divisors=divides,
        distributed=spec.distributed_inference_across_workers is not False,
        topology=topology,
        mode="initialize_later",
    )


def sglang_rules(demand: Demand) -> ResourceRules:
    """SGLang takes its static memory fraction of every GPU: as given, or by the cards (`sglang_fractions`).

    Raises BadRow where a flag cannot be used or flags contradict each other; it names them.
    """
    spec, hyper = demand.spec, demand.facts.hyper
    parameters = parse_flags(spec.backend_parameters)
    count, fixed = gpu_count(spec, sglang.world_size(parameters))
    divides = divisors(demand, vision=sglang.splits_vision(parameters))
    sglang.check(parameters, (hyper.num_attention_heads or 0) if hyper else 0)
    check_split(divides, sglang.TP[0], positive(parameters, sglang.TP))
    image = IMAGE in demand.categories
    return ResourceRules(
        **demand_fields(demand),
        claim_policy=ClaimPolicy.EACH if image else ClaimPolicy.SHARE,
        share=0.0 if image else sglang.fraction(parameters) or 0.0,
        share_flag="" if image else sglang.FRACTION,
        gpu_count=count,
        fixed_world=fixed,
        divisors=divides,
        distributed=not image and spec.distributed_inference_across_workers is not False,
        grouped=True,
        fewest=False,
        mode="initialize_later",
    )


def mindie_rules(demand: Demand) -> ResourceRules:
    """MindIE takes a fixed fraction of every Ascend NPU.

    Raises BadRow where a parameter cannot be used, or the model cannot be split as asked.
    """
    spec, hyper = demand.spec, demand.facts.hyper
    asked = mindie.serving(parse_flags(spec.backend_parameters), spec.env, mindie.default_length(hyper))
    sizes = ranks(asked.sizes)
    count, fixed = gpu_count(spec, sizes.world_size)
    check_model(sizes, hyper)
    return ResourceRules(
        **demand_fields(demand),
        claim_policy=ClaimPolicy.SHARE,
        share=asked.fraction,
        share_flag=mindie.FRACTION,
        kinds=frozenset({NPU}),
        addresses=True,
        gpu_count=count,
        fixed_world=fixed,
        per_worker=max(sizes.local, 0),
        fewest=False,
        divisors=divisors(demand, vision=False),
        distributed=spec.distributed_inference_across_workers is not False,
        mode="initialize_later",
    )


def mindie_ranks(demand: Demand) -> Ranks:
    """Parallel sizes of a MindIE model, for selectors that only count cards. Raises BadRow."""
    spec, hyper = demand.spec, demand.facts.hyper
    length = mindie.default_length(hyper) if hyper else mindie.DEFAULT_LENGTH
    return ranks(mindie.serving(parse_flags(spec.backend_parameters), spec.env, length).sizes)


def custom_rules(demand: Demand) -> ResourceRules:
    """User-defined backends, VoxBox and omni models take what they need, or the share that their command line
    names; the router role takes no GPU.

    Raises BadRow where flags or hand-picked GPUs cannot be used.
    """
    spec = demand.spec
    count, _ = gpu_count(spec, None)
    return ResourceRules(
        **demand_fields(demand),
        claim_policy=ClaimPolicy.AT_LEAST,
        share=custom.card_fraction(spec) or 0.0,
        share_flag=custom.FRACTIONS[0],
        gpu_count=count,
        spans=False,
        cpu=bool(spec.cpu_offloading) or demand.engine is Engine.ROUTER,
        cpu_only=demand.engine is Engine.ROUTER,
    )
