"""Rules of MindIE on Ascend NPUs: a fixed fraction of every NPU, counted in whole bytes."""

from __future__ import annotations

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.mindie.flags import DEFAULT_LENGTH, FRACTION, MindieServing, default_length, serving
from gpustackd.engines.mindie.parallelism import Ranks, check_model, ranks
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules, divisors, gpu_count

NPU = "cann"


def mindie_rules(demand: Demand) -> ResourceRules:
    """Raises BadRow where a parameter cannot be used, or the model cannot be split as asked."""
    spec, need = demand.spec, demand.need
    asked = serving_of(demand)
    r = ranks(asked.sizes)
    count, fixed = gpu_count(spec, r.found)
    check_model(r, demand.facts.hyper)
    return ResourceRules(
        engine=Engine.MINDIE,
        vram=need.vram or 0,
        claim_policy=ClaimPolicy.SHARE,
        share=asked.fraction,
        share_flag=FRACTION,
        kinds=frozenset({NPU}),
        addresses=True,
        ram=need.ram,
        ram_static=need.ram_static,
        ram_ratio=need.ram_ratio,
        gpu_count=count,
        fixed_world=fixed,
        per_worker=max(r.local, 0),
        fewest=False,
        divisors=divisors(demand, vision=False),
        distributed=spec.distributed_inference_across_workers is not False,
        mode="initialize_later",
        replicas=1 if spec.replicas is None else spec.replicas,
    )


def serving_of(demand: Demand) -> MindieServing:
    """The serving parameters of a model. Raises BadRow."""
    spec = demand.spec
    return serving(parse_flags(spec.backend_parameters), spec.env, default_length(demand.facts.hyper))


def world_of(demand: Demand) -> Ranks:
    """Parallel sizes of a MindIE model, for selectors that only count cards. Raises BadRow."""
    spec, hyper = demand.spec, demand.facts.hyper
    length = default_length(hyper) if hyper else DEFAULT_LENGTH
    return ranks(serving(parse_flags(spec.backend_parameters), spec.env, length).sizes)
