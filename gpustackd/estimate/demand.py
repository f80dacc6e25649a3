"""From a model and its facts to the demand that a decision looks at: which engine searches, for how much."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import Any

from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines import custom
from gpustackd.estimate.categories import is_omni
from gpustackd.estimate.claim import kv_cache_ram, vram_claim
from gpustackd.estimate.kv_cache import sequence_bytes
from gpustackd.estimate.llama_cpp.need import gguf_need
from gpustackd.estimate.mindie import mindie_claim


def build_demand(
    spec: ModelSpec,
    facts: ModelFacts,
    *,
    takes_accelerator: bool = True,
    role_memory: int | None = None,
    count_draft: bool = False,
) -> Demand:
    """Choose the engine and size the need.

    `takes_accelerator` False: a router role, which needs `role_memory` bytes of RAM (2 GiB where it says
    none) and no weights are sized. `count_draft` is a preference (`claim.vram_claim`). Raise BadRow where
    flags that the need depends on cannot be read.
    """
    categories = spec.categories or facts.categories
    engine = choose_engine(spec, categories, takes_accelerator=takes_accelerator)
    gguf = None
    if engine is Engine.ROUTER:
        ram = role_memory or custom.RAM_LEAST
        need = Need(vram=0, ram=ram, ram_static=ram)
    elif engine is Engine.GGUF:
        need, gguf = gguf_need(spec, facts)
    elif engine is Engine.MINDIE:
        need = _mindie_need(spec, facts)
    else:
        need = _common_need(spec, facts, categories, engine, count_draft=count_draft)
    if engine in {Engine.VLLM, Engine.SGLANG, Engine.MINDIE}:
        need = replace(need, sequence=sequence_bytes(spec, facts, categories))
    if facts.warnings:
        need = replace(need, warnings=tuple(dict.fromkeys(facts.warnings + need.warnings)))
    digest = sha256(f"{facts.digest}|{engine}|{need}".encode()).hexdigest()
    return Demand(spec=spec, facts=facts, need=need, engine=engine, digest=digest, gguf=gguf)


def choose_engine(spec: ModelSpec, categories: Collection[str], *, takes_accelerator: bool = True) -> Engine:
    """The engine whose selector searches: the first that matches, by the backend in effect."""
    if not takes_accelerator:
        return Engine.ROUTER
    if spec.gpu_type_selector is not None:
        return Engine.WHOLE_CARD if is_whole_card(spec.gpu_type_selector) else Engine.VGPU
    if spec.is_gguf:
        return Engine.GGUF
    backend = spec.effective_backend
    if backend == "MindIE":
        return Engine.MINDIE
    if backend == "vLLM" and not is_omni(spec, categories):
        return Engine.VLLM
    return Engine.SGLANG if backend == "SGLang" else Engine.CUSTOM


def is_whole_card(selector: Mapping[str, Any]) -> bool:
    """No hardware partition and no share of a card asked for."""
    return not (
        selector.get("accelerator_partitioned_profile")
        or selector.get("accelerator_sliced_memory_percentage")
        or selector.get("accelerator_sliced_cores_percentage")
    )


def reads_dimensions(spec: ModelSpec, categories: Collection[str]) -> bool:
    """Whether the search needs `config.json`: vLLM, SGLang and MindIE on language-like models."""
    if choose_engine(spec, categories) not in {Engine.VLLM, Engine.SGLANG, Engine.MINDIE}:
        return False
    return not is_omni(spec, categories)


def _mindie_need(spec: ModelSpec, facts: ModelFacts) -> Need:
    claim = mindie_claim(spec, facts)
    return Need(
        vram=claim.vram,
        ram=claim.ram,
        ram_static=claim.ram or None,
        unknown_because=claim.unknown_because,
        warnings=claim.warnings,
    )


def _common_need(
    spec: ModelSpec,
    facts: ModelFacts,
    categories: Collection[str],
    engine: Engine,
    *,
    count_draft: bool,
) -> Need:
    claim = vram_claim(spec, facts, categories, count_draft=count_draft)
    ram, warnings = kv_cache_ram(spec.extended_kv_cache)
    need = Need(
        vram=claim.vram,
        ram=ram.check,
        ram_static=ram.static,
        ram_ratio=ram.ratio,
        unknown_because=claim.unknown_because,
        warnings=claim.warnings + warnings,
    )
    if engine is not Engine.CUSTOM:
        return need
    # the engine's own RAM; a local KV cache comes on top
    own = custom.host_ram(claim.vram)
    total = own if ram.static is None else own + ram.static
    return replace(need, ram=total, ram_static=total, ram_ratio=None)
