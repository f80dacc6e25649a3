"""MindIE's own formula: footprint + weights + KV cache + computation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.model_spec import RAM_CLAIM, ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.mindie.flags import MindieMemory, default_length, memory_flags
from gpustackd.estimate.categories import is_multimodal
from gpustackd.estimate.claim import GIB, LARGEST, MIB, override
from gpustackd.estimate.kv_cache import Attention, attention_of

FOOTPRINT = 3 * GIB
RAM_BASE = 512 * MIB
RESERVED = "RESERVED_MEMORY_GB"


@dataclass(frozen=True, slots=True)
class MindieClaim:
    """Bytes part by part. `vram` None = the size of the weights is unknown."""

    vram: int | None
    ram: int
    footprint: int = 0
    kv_cache: int = 0
    computation: int = 0
    overridden: bool = False
    unknown_because: str = ""
    warnings: tuple[str, ...] = ()


def mindie_claim(spec: ModelSpec, facts: ModelFacts) -> MindieClaim:
    """Bytes of VRAM over all NPUs, and of RAM per worker. Raise BadRow for a parameter out of its limits.

    VRAM is the footprint (3 GiB, or `RESERVED_MEMORY_GB`), weights and adapters, the cache of one sequence,
    `heads * head_dim * layers * max_seq_len * element bytes`, and computation, the same for
    `max_batch_size * cache_block_size` tokens. An amount set in the model's env takes the place of all.
    """
    forced, warnings = override(spec.env)
    if forced:
        ram, more = override(spec.env, RAM_CLAIM)
        return MindieClaim(forced, ram or 0, overridden=True, warnings=warnings + more)
    hyper = facts.hyper or HyperParameters()
    serving = memory_flags(parse_flags(spec.backend_parameters), default_length(facts.hyper))
    ram = RAM_BASE + serving.swap_gib * GIB
    kv, computation = _cache_and_computation(spec, hyper, serving)
    footprint, more = _footprint(spec)
    warnings += more
    if facts.weight_bytes is None:
        because = facts.unknown_because or "the size of its weights is not known"
        return MindieClaim(None, ram, footprint, kv, computation, unknown_because=because, warnings=warnings)
    total = footprint + facts.weight_bytes + facts.lora_bytes + kv + computation
    if total > LARGEST:
        return MindieClaim(None, ram, unknown_because="its parameters ask for more than any memory")
    return MindieClaim(total, ram, footprint, kv, computation, warnings=warnings)


def _cache_and_computation(spec: ModelSpec, hyper: HyperParameters, serving: MindieMemory) -> tuple[int, int]:
    layers, head_dim = hyper.num_hidden_layers or 0, hyper.head_dim or 0
    if is_multimodal(hyper.architectures) and _corrects_multimodal(spec.backend_version):
        return (
            serving.max_prefill_tokens * layers * head_dim * 4,
            serving.max_batch_size * serving.max_iter_times * layers * head_dim * 4,
        )
    attention = attention_of(hyper)
    heads = {
        Attention.MHA: 2 * (hyper.num_attention_heads or 0),
        Attention.GQA: 2 * hyper.num_key_value_heads,
        Attention.MQA: 2,
        Attention.MLA: 1,
        Attention.UNKNOWN: 1,
    }[attention]
    if attention is Attention.MLA:
        head_dim = (hyper.kv_lora_rank or 0) + (hyper.qk_rope_head_dim or 0)
    named = None if serving.dtype in {None, "auto"} else serving.dtype
    size = 4 if (named or hyper.torch_dtype) in {"float32", "float"} else 2
    kv_quant = str((hyper.quantization_config or {}).get("kv_quant_type") or "")
    kv_size = 1 if kv_quant.lower() == "c8" else size
    activation = 1 if (hyper.quantize or "").lower().startswith("w8a8") else size
    cache = heads * head_dim * layers * serving.max_seq_len * kv_size
    return cache, serving.max_batch_size * serving.cache_block_size * (layers * heads * head_dim * activation)


def _footprint(spec: ModelSpec) -> tuple[int, tuple[str, ...]]:
    raw = str(spec.env.get(RESERVED, "")).strip()
    if not raw:
        return FOOTPRINT, ()
    if raw.isascii() and raw.isdigit() and int(raw[:9]) > 0 and len(raw) < 10:
        return int(raw) * GIB, ()
    return FOOTPRINT, (f"{RESERVED} is {raw[:40]!r}, not a number of GiB; it is not used",)


def _corrects_multimodal(version: str | None) -> bool:
    """From 2.2.rc1 on. An unset version is the installed default, which is newer."""
    if not version:
        return True
    found = re.match(r"v?(\d{1,6})\.(\d{1,6})", version)
    return found is not None and (int(found[1]), int(found[2])) >= (2, 2)
