"""Published models with a backend and flags, as demands: judged, filled in and sized as daemons do it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from gpustackd.domain.demand import Demand
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import filled
from gpustackd.errors import BadRow
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.evaluate import evaluate
from tests import specs
from tests.fleets import GIB

BACKENDS = ("vLLM", "vLLM", "SGLang", "MindIE", "VoxBox", "Custom")
FLAGS = (
    "--max-model-len=8192", "--gpu-memory-utilization=0.4", "--tensor-parallel-size=2",
    "--kv-cache-dtype=fp8", "--mem-fraction-static=0.7", "--trust-remote-code", "--max-num-seqs=16",
    "--quantization=awq",
)  # fmt: skip


def models() -> Iterator[tuple[str, Demand]]:
    """Every published model with the backends that make a difference, by a name."""
    for n, name in enumerate(sorted(specs.known_models())):
        for backend in ("vLLM", "MindIE", ("SGLang", "Custom")[n % 2]):
            if (made := _demand(name, 1, backend=backend)) is not None:
                yield f"{name}/{backend}", made


def published(chance: Random, n: int) -> Demand | None:
    """One of them with random columns; None where its flags cannot be read."""
    flags = [f for f in FLAGS if chance.random() < 0.15]
    more: dict[str, Any] = {}
    if chance.random() < 0.2:
        more["extended_kv_cache"] = {"enabled": True, "ram_size": chance.choice((4, 40))}
    if chance.random() < 0.2:
        more["cpu_offloading"] = True
    if chance.random() < 0.1:
        more["env"] = {"GPUSTACK_MODEL_VRAM_CLAIM": str(20 * GIB)}
    name = chance.choice(sorted(specs.known_models()))
    return _demand(name, n, backend=chance.choice(BACKENDS), backend_parameters=flags, **more)


def _demand(name: str, n: int, **columns: Any) -> Demand | None:
    spec = specs.a_model(id=n, name=f"model-{n}", huggingface_repo_id=name, **columns)
    facts = _facts(name)
    judged = evaluate(spec, facts)
    if judged.writes:
        spec = filled(spec, judged.writes)
    try:
        return build_demand(spec, replace(facts, categories=judged.categories))
    except BadRow:
        return None


@lru_cache(maxsize=64)
def _facts(name: str) -> ModelFacts:
    known = specs.known_models()[name]
    weights = known.get("weight_bytes", known.get("diffusion_weight_bytes"))
    more = {} if weights is not None else {"unknown_because": "not stated"}
    return specs.facts(weights, known["hf_config"], is_diffusers=bool(known.get("diffusers")), **more)
