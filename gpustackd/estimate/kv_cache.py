"""What the attention of a model keeps: bytes per token, and of one sequence of the longest length accepted.

Per token and layer a cache holds keys and values of every KV head, `2 * heads * head_dim` elements; latent
attention (MLA) holds one compressed vector of `kv_lora_rank + qk_rope_head_dim` elements for all heads
(DeepSeek-V2, arXiv 2405.04434, section 2.1). Layers with a sliding window hold the window at most.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.parallelism import Parallel
from gpustackd.engines.registry import parallel_of, serving_flags
from gpustackd.engines.serving import ServingFlags
from gpustackd.errors import BadRow
from gpustackd.estimate.categories import EMBEDDING, RERANKER, is_llm

BLOCK = 16
"""Tokens that a paged cache reserves at a time."""
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "int8": 1,
}  # fmt: skip


class Attention(StrEnum):
    """How heads share keys and values."""

    MHA = "mha"
    GQA = "gqa"
    MQA = "mqa"
    MLA = "mla"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KvCache:
    """The cache of one GPU. Elements are counted; bytes come with the type."""

    token_elements: int
    """Elements that one more token takes in all layers that keep every token."""
    window_elements: int = 0
    """The same in layers that keep a window only."""
    window: int | None = None
    element_bytes: int = 2

    @property
    def per_token(self) -> int:
        """Bytes of one token while no window is full."""
        return (self.token_elements + self.window_elements) * self.element_bytes

    def sequence(self, tokens: int) -> int:
        """Bytes of one sequence of that many tokens, rounded up to whole blocks."""
        whole = ceil(tokens / BLOCK) * BLOCK
        kept = whole if self.window is None else min(whole, ceil(self.window / BLOCK) * BLOCK + BLOCK)
        return (whole * self.token_elements + kept * self.window_elements) * self.element_bytes


def attention_of(hyper: HyperParameters) -> Attention:
    """Kind of attention. A stated `kv_lora_rank` is latent attention, and a configuration that is silent
    about KV heads has one for each head."""
    heads, kv = hyper.num_attention_heads, hyper.num_key_value_heads
    if not heads:
        return Attention.UNKNOWN
    if hyper.kv_lora_rank:
        return Attention.MLA
    if not hyper.kv_heads_stated:
        return Attention.MHA
    if kv == 1:
        return Attention.MQA
    if kv == heads:
        return Attention.MHA
    return Attention.GQA if kv < heads and heads % kv == 0 else Attention.UNKNOWN


def kv_cache(hyper: HyperParameters, *, tp: int = 1, pp: int = 1, dtype: str | None = None) -> KvCache | None:
    """The cache on one of `tp * pp` GPUs; None where the dimensions are not stated.

    KV heads are split over `tp` and repeated once there are fewer of them; a latent cache is whole on each.
    The layers of the fullest pipeline stage count. `dtype` is an engine's cache type (`fp8`, …).
    """
    layers = hyper.num_hidden_layers
    if layers is None:
        return None
    attention = attention_of(hyper)
    cached = max(layers - hyper.state_layers - hyper.shared_layers, 0)
    if attention is Attention.MLA:
        per_layer = (hyper.kv_lora_rank or 0) + (hyper.qk_rope_head_dim or 0)
    else:
        kv = hyper.num_key_value_heads if hyper.kv_heads_stated else hyper.num_attention_heads
        if not kv or not hyper.head_dim:
            return KvCache(0) if cached == 0 else None
        per_layer = 2 * ceil(kv / tp) * hyper.head_dim
    windowed = min(hyper.window_layers, cached) if hyper.sliding_window else 0
    full = cached - windowed
    return KvCache(
        token_elements=ceil(full / pp) * per_layer,
        window_elements=ceil(windowed / pp) * per_layer,
        window=hyper.sliding_window if windowed else None,
        element_bytes=cache_element_bytes(hyper, dtype),
    )


def cache_element_bytes(hyper: HyperParameters, dtype: str | None = None) -> int:
    """Bytes of a cached element: the engine's choice, else the quantisation's, else the model's own type
    (quantised weights keep a cache of 16 bits)."""
    if dtype and dtype != "auto":
        return DTYPE_BYTES.get(dtype.lower(), 2)
    quantization = hyper.quantization_config or {}
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return 1
    if str(quantization.get("kv_cache_quant_algo") or "").upper() == "FP8":
        return 1
    # engines run float32 checkpoints of language models in 16 bits only when told to
    return DTYPE_BYTES.get(hyper.torch_dtype.lower(), 2)


def is_encoder(hyper: HyperParameters, categories: Collection[str]) -> bool:
    """Whether nothing is cached between steps: embedding models and rerankers of the BERT kind, whose
    configurations know no KV heads."""
    pooled = EMBEDDING in categories or RERANKER in categories
    return pooled and not is_llm(categories) and not hyper.kv_heads_stated


def cache_of(
    facts: ModelFacts, categories: Collection[str], serving: ServingFlags, parallel: Parallel
) -> KvCache | None:
    """The cache on one GPU; None where the model keeps none or its dimensions are not stated."""
    if facts.hyper is None or is_encoder(facts.hyper, categories):
        return None
    return kv_cache(facts.hyper, tp=parallel.tp, pp=parallel.pp, dtype=serving.kv_dtype)


def sequence_bytes(spec: ModelSpec, facts: ModelFacts, categories: Collection[str]) -> int | None:
    """Bytes over all GPUs of one copy of the model; None = not known, or no cache at all."""
    try:
        flags = parse_flags(spec.backend_parameters)
        parallel = parallel_of(spec.effective_backend, flags)
        serving = serving_flags(spec.effective_backend, flags, facts.hyper or HyperParameters())
    except BadRow:
        return None  # the search names the flag at fault
    cache = cache_of(facts, categories, serving, parallel)
    return None if cache is None else cache.sequence(serving.max_len) * parallel.tp * parallel.pp
