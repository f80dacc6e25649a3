"""Rules of SGLang: flags and their contradictions.

The share of a card, its static memory fraction, follows from the cards themselves: `static_fraction`.
"""

from __future__ import annotations

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.flags import COLUMN, BackendParameters, parse_flags
from gpustackd.engines.parallelism import positive
from gpustackd.engines.sglang import DP, FRACTION, PP, TP, fraction, world_size
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
    _check(parameters, tp, demand)
    complaint = divides.complaint(tp)
    if complaint is not None:
        raise BadRow(COLUMN, f"--{TP[0]} {tp}: {complaint}", "change the tensor-parallel size")
    image = IMAGE in demand.categories
    return ResourceRules(
        engine=Engine.SGLANG,
        vram=need.vram or 0,
        taking=ClaimPolicy.EACH if image else ClaimPolicy.SHARE,
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


def _check(parameters: BackendParameters, tp: int, demand: Demand) -> None:
    pp, dp = positive(parameters, PP) or 1, positive(parameters, DP) or 1
    nodes = positive(parameters, ("nnodes",)) or 1
    for name in ("chunked-prefill-size", "piecewise-cuda-graph-max-tokens", "cuda-graph-max-bs"):
        parameters.integer(name)  # read with the cards, judged here
    positive(parameters, ("cuda-graph-max-bs",))
    speculative = parameters.text("speculative-algorithm")
    mixed = parameters.flag("enable-mixed-chunk")
    heads = (demand.facts.hyper.num_attention_heads or 0) if demand.facts.hyper else 0
    if heads and heads % tp:
        raise BadRow(COLUMN, f"--{TP[0]} {tp}: {heads} heads cannot be split evenly over {tp} GPUs")
    if (tp * pp) % nodes:
        raise BadRow(COLUMN, f"--{TP[0]} {tp} x --{PP[0]} {pp} is no multiple of --nnodes {nodes}")
    if pp > 1 and speculative:
        raise BadRow(COLUMN, f"--{PP[0]} {pp} and --speculative-algorithm {speculative} exclude each other")
    if pp > 1 and mixed:
        raise BadRow(COLUMN, f"--{PP[0]} {pp} and --enable-mixed-chunk exclude each other")
    if dp > 1 and nodes != 1 and not parameters.flag("enable-dp-attention"):
        raise BadRow(COLUMN, f"--{DP[0]} {dp} on --nnodes {nodes} needs --enable-dp-attention")
    if speculative and mixed:
        raise BadRow(COLUMN, "--speculative-algorithm and --enable-mixed-chunk exclude each other")
