"""Which layers keep a full cache: each family of models says it in keys of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

WINDOWED = frozenset({"sliding_attention", "chunked_attention", "local_attention"})
WITHOUT_CACHE = frozenset(
    {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe", "lightning"}
)

FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                    "num_hidden_layers": 26, "hidden_size": 2304, "vocab_size": 262208,
                    "sliding_window": 4096, "sliding_window_pattern": 6},
    "gemma3n_text": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
    "gemma2": {"sliding_window_pattern": 2},
    "llama": {"num_attention_heads": 32, "num_hidden_layers": 32, "hidden_size": 4096,
              "intermediate_size": 11008, "vocab_size": 32000},
    "mistral": {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
                "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000},
    "qwen2": {"num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32,
              "hidden_size": 4096, "intermediate_size": 22016, "vocab_size": 151936},
})  # fmt: skip
"""What a configuration of these types means where it is silent. Published multimodal repositories leave out
what equals their library's default (Gemma 3, Llava), so that the figures stand nowhere in their files."""


def with_defaults(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a configuration with its family's defaults below what it states; a stated null stays null."""
    defaults = FAMILY_DEFAULTS.get(str(part.get("model_type")))
    return {**defaults, **part} if defaults else part


def window_size(text: Mapping[str, Any]) -> int:
    """Tokens that a windowed layer keeps; 0 = no window in this model."""
    for key in ("sliding_window", "attention_chunk_size"):
        raw = text.get(key)
        if isinstance(raw, int) and not isinstance(raw, bool) and 0 < raw < 2**40:
            return raw
    return 0


def layer_kinds(text: Mapping[str, Any], layers: int | None) -> tuple[int, int]:
    """Layers that keep a window only, and layers without a growing cache (state space, linear attention).

    `layers` None: a list of kinds still tells; patterns do not.
    """
    window = window_size(text)
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(kinds, list):
        sliding = sum(isinstance(k, str) and k in WINDOWED for k in kinds) if window else 0
        return sliding, sum(isinstance(k, str) and k in WITHOUT_CACHE for k in kinds)
    if not layers:
        return 0, 0
    states = min(_without_cache(text, layers), layers)
    if not window or text.get("use_sliding_window") is False:
        return 0, states
    if (every := _positive(text, "sliding_window_pattern")) > 1:  # each such layer sees everything
        return layers - layers // every, states
    if text.get("use_sliding_window") is True:  # Qwen2: from this layer on
        return max(layers - _positive(text, "max_window_layers"), 0), states
    return layers - states, states


def _without_cache(text: Mapping[str, Any], layers: int) -> int:
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, str):  # Nemotron-H: `*` is attention, the rest is Mamba or a plain MLP
        return len(pattern) - pattern.count("*")
    if isinstance(listed := text.get("attn_layer_indices"), list):  # Bamba
        return max(layers - len(listed), 0)
    if isinstance(listed := text.get("attn_type_list"), list):  # MiniMax: 1 = full attention
        return sum(kind == 0 for kind in listed)
    for key in ("full_attention_interval", "attn_layer_period"):  # Qwen3-Next, Jamba
        if (every := _positive(text, key)) > 1:
            return layers - layers // every
    return 0


def _positive(text: Mapping[str, Any], key: str) -> int:
    raw = text.get(key)
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and raw > 0 else 0
