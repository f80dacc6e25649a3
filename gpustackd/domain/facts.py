"""What is known of a model's files: sizes and configuration, read once per (source, revision)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """Dimensions of a language-model-like network; None = not stated."""

    architectures: tuple[str, ...] = ()
    is_multimodal: bool = False
    vision_config: Mapping[str, Any] | None = None
    vision_heads: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int = 1
    kv_heads_stated: bool = True
    """False where the configuration does not state it and the 1 above is a placeholder; engines then give
    every attention head its own keys and values."""
    head_dim: int | None = None
    n_group: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None
    sliding_window: int | None = None
    """Tokens that a sliding-window layer caches; None = no layer has a window."""
    window_layers: int = 0
    """Number of sliding-window layers."""
    state_layers: int = 0
    """Number of layers with a state of constant size instead of a cache (Mamba, linear attention)."""
    shared_layers: int = 0
    """Number of layers that use the cache of an earlier layer."""
    intermediate_size: int | None = None
    quantize: str | None = None
    quantization_config: Mapping[str, Any] | None = None
    moe_intermediate_size: int | None = None
    moe_num_experts: int | None = None
    moe_num_shared_experts: int | None = None
    torch_dtype: str = "bfloat16"
    max_sequence_length: int = 2048


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of one model. Sizes in bytes."""

    weight_bytes: int | None
    """Size on disk of the one format that the engine loads; None = unknown (see `unknown_because`)."""
    unknown_because: str = ""
    listed_bytes: int | None = None
    """Size of all files that the source lists, in any format; None = it has no listing."""
    on_this_host: bool = False
    """This process can read the files locally."""
    lora_bytes: int = 0
    draft_bytes: int = 0
    config: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    hyper: HyperParameters | None = None
    categories: tuple[str, ...] = ()
    """Categories of the model, else the detected ones."""
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    is_diffusers: bool = False
    gguf: Any = None
    """Header facts of a GGUF file where the source is one."""
    warnings: tuple[str, ...] = ()
    """What was assumed while reading: parts left out, unknown sizes."""
    digest: str = ""
    """Changes whenever anything above changes; part of the key of cached results."""
