"""Which rules an engine's demand follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpustackd.domain.demand import Demand, Engine
from gpustackd.errors import BadRow
from gpustackd.placement.fit import custom, gguf, mindie, pool, sglang, vllm
from gpustackd.placement.fit.rules import Rules

BY_ENGINE: Mapping[Engine, Callable[[Demand, bool], Rules]] = {
    Engine.VLLM: vllm.rules,
    Engine.SGLANG: sglang.rules,
    Engine.CUSTOM: custom.rules,
    Engine.ROUTER: custom.rules,
    Engine.GGUF: gguf.rules,
    Engine.MINDIE: mindie.rules,
    Engine.VGPU: pool.rules,
    Engine.WHOLE_CARD: pool.rules,
}


def rules_of(demand: Demand, compat: bool = False) -> Rules:
    """What the search for this demand must hold.

    Raises BadRow where flags or selectors cannot be used, or where the engine has no rules here.
    """
    make = BY_ENGINE.get(demand.engine)
    if make is None:
        raise BadRow("backend", f"models for {demand.engine} cannot be placed by this version")
    return make(demand, compat)
