"""Rules of vLLM: flags, share of a card, executor (selectors spec sections 9.1 and 9.2)."""

from __future__ import annotations

import json
import re
from typing import Any

from gpustackd.domain.demand import Demand, Engine
from gpustackd.engines.flags import COLUMN, BackendParameters, parse_flags
from gpustackd.engines.vllm_topology import ParallelSizes
from gpustackd.errors import BadRow
from gpustackd.placement.context.resource_rules import (
    ClaimPolicy,
    ResourceRules,
    WorldSize,
    divisors,
    gpu_count,
    positive,
    world,
)

TP = ("tensor-parallel-size", "tp")
PP = ("pipeline-parallel-size", "pp")
PCP = ("prefill-context-parallel-size", "pcp")
DP = ("data-parallel-size", "dp")
DPL = ("data-parallel-size-local", "dpl")
SHARE = "gpu-memory-utilization"
DEFAULT_SHARE = 0.9

POOLING_LANGUAGE_MODELS = frozenset(
    {
        "Qwen3ForCausalLM",
        "Qwen3ForSequenceClassification",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLForSequenceClassification",
    }
)
"""Architectures that reserve their share of the card even as embedding or reranker models."""

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def rules(demand: Demand) -> ResourceRules:
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
        topology = ParallelSizes(tp, *(positive(parameters, f) for f in (PP, PCP, DP, DPL)))
        if topology.dp and topology.dpl and topology.dp % topology.dpl:
            raise BadRow(COLUMN, f"--{DP[0]} {topology.dp} is no multiple of --{DPL[0]} {topology.dpl}")
    u = share(demand, parameters)
    return ResourceRules(
        engine=Engine.VLLM,
        vram=need.vram or 0,
        taking=ClaimPolicy.SHARE if u > 0 else ClaimPolicy.SPLIT,
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


def world_size(parameters: BackendParameters) -> WorldSize | None:
    """Product of tp, pp, pcp and dp as given; with a hybrid load balancer the local dp takes dp's place."""
    positive(parameters, DPL)
    if not parameters.flag("data-parallel-hybrid-lb"):
        return world(parameters, (("tp", TP), ("pp", PP), ("pcp", PCP), ("dp", DP)))
    if positive(parameters, DPL) is None:
        world(parameters, (("tp", TP), ("pp", PP), ("pcp", PCP), ("dp", DP)))
        return None
    return world(parameters, (("tp", TP), ("pp", PP), ("pcp", PCP), ("dpl", DPL)))


def splits_vision(demand: Demand, parameters: BackendParameters) -> bool:
    """Whether the vision tower is split with the rest. A tower with an odd number of heads (25 in InternViT)
    splits by no size that is in use: vLLM then keeps it whole on every GPU, as it does when told to."""
    if parameters.flag("language-model-only"):
        return False
    heads = (demand.facts.hyper.vision_heads or 0) if demand.facts.hyper else 0
    return heads % 2 == 0 and parameters.text("mm-encoder-tp-mode") != "data"


def share(demand: Demand, parameters: BackendParameters) -> float:
    """u: the share of every card that vLLM takes; 0 = it takes what the model needs (section 9.2)."""
    named = architectures(demand, parameters)  # unreadable overrides stop the engine in any case
    given = parameters.number(SHARE)
    if given is not None:
        if not 0 < given <= 1:
            raise BadRow(COLUMN, f"--{SHARE} is {given:g}, it must be above 0 and at most 1")
        return given
    categories = demand.categories
    if not categories or "llm" in categories or "speech_to_text" in categories:
        return DEFAULT_SHARE
    if POOLING_LANGUAGE_MODELS & set(named):
        return DEFAULT_SHARE
    return 0.0


def architectures(demand: Demand, parameters: BackendParameters) -> tuple[str, ...]:
    """The model's architectures, or those that `--hf-overrides` puts in their place."""
    own = demand.facts.hyper.architectures if demand.facts.hyper else ()
    raw = parameters.last_text("hf-overrides")
    if raw is None:
        return own
    try:
        overrides: Any = json.loads(raw)
    except (ValueError, RecursionError):
        raise BadRow(COLUMN, f"--hf-overrides is {raw[:60]!r}, not JSON") from None
    named = overrides.get("architectures") if isinstance(overrides, dict) else None
    return tuple(str(a) for a in named) if isinstance(named, list) and named else own


def executor(demand: Demand, parameters: BackendParameters) -> str:
    """`mp` or `ray`: who brings the ranks up on several workers."""
    given = parameters.text("distributed-executor-backend")
    if given is not None:
        return "mp" if given == "mp" else "ray"
    if demand.spec.image_name:
        return "mp"
    version = demand.spec.backend_version or ""
    found = _VERSION.match(version)
    if "-custom" in version and found and (int(found[1]), int(found[2])) >= (0, 18):
        return "mp"
    return "ray"
