"""Which rules an engine's demand follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.errors import BadRow
from gpustackd.placement.rules.engines import custom_rules, mindie_rules, sglang_rules, vllm_rules
from gpustackd.placement.rules.gguf import gguf_rules
from gpustackd.placement.rules.pool import pool_rules
from gpustackd.placement.rules.resource_rules import ResourceRules

BY_ENGINE: Mapping[Engine, Callable[[Demand], ResourceRules]] = {
    Engine.VLLM: vllm_rules,
    Engine.SGLANG: sglang_rules,
    Engine.CUSTOM: custom_rules,
    Engine.ROUTER: custom_rules,
    Engine.GGUF: gguf_rules,
    Engine.MINDIE: mindie_rules,
    Engine.VGPU: pool_rules,
    Engine.WHOLE_CARD: pool_rules,
}


def rules_of(demand: Demand) -> ResourceRules:
    """What the search for this demand must hold.

    Raises BadRow where flags or selectors cannot be used, or where the engine has no rules here.
    """
    make = BY_ENGINE.get(demand.engine)
    if make is None:
        raise BadRow("backend", f"models for {demand.engine} cannot be placed by this version")
    made = make(demand)
    if not made.fixed_world:
        _enough_picked(demand.spec)
    return made


def _enough_picked(spec: ModelSpec) -> None:
    """Raises BadRow where there are fewer hand-picked GPUs than replicas, and nothing says how many each
    takes."""
    ids, replicas = len(spec.gpu_ids), spec.replicas or 0
    if 0 < ids < replicas and spec.gpu_selector is not None and not spec.gpu_selector.gpus_per_replica:
        raise BadRow(
            "gpu_selector.gpu_ids",
            f"{ids} GPU{'s are' if ids > 1 else ' is'} selected for {replicas} replicas",
            "select more of them, or set gpus_per_replica",
        )
