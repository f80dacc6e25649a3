"""`config.json` as data: the dimensions of a language model, wherever the repository nests them.

Keys are those of Hugging Face configurations (https://huggingface.co/docs/transformers). `dtype` counts as
`torch_dtype`, and a stated `kv_lora_rank` is enough for latent attention. No class of a model library is
built and no code of a repository runs; an unknown model type is no error here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gpustackd.domain.facts import HyperParameters
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats.layer_kinds import layer_kinds, window_size, with_defaults

Config = Mapping[str, Any]

TEXT_PARTS = ("llm_config", "text_config", "language_config")
"""Where multimodal repositories keep the language model."""
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "head_dim": ("head_dim", "kv_channels", "d_kv"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff"),
})  # fmt: skip
"""Names of the same dimension in older families (GPT-2, MPT, Falcon, ChatGLM, T5)."""
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts")
LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
DEFAULT_LENGTH = 2048
KEEPS_LENGTH = {"su", "longrope", "llama3"}
"""Rope scalings whose stated length is already the scaled one."""
LARGEST = 2**40
"""Far above any dimension or length of a real model; keeps later products inside 64 bits."""


def hyper_parameters(config: Config, name: str = "config.json") -> HyperParameters:
    """Dimensions of the language part. Raise ModelUnreadable (`bad_config`) naming the key at fault: a stated
    dimension that is no positive number (an absent one is unknown, not an error)."""
    text = text_part(config)
    read = _Reader(text, name)
    heads = attention_heads(config, name)
    hidden = read.size("hidden_size")
    layers = read.size("num_hidden_layers")
    stated_kv = read.size("num_key_value_heads") or _nested_kv_heads(text)
    experts = next((n for key in EXPERTS if (n := read.count(key))), None)
    shared = next((n for key in SHARED_EXPERTS if (n := read.count(key))), None)
    quantization = _object(config, "quantization_config")
    windows, states = layer_kinds(text, layers)
    vision = _object(config, "vision_config") or _object(_object(config, "thinker_config"), "vision_config")
    return HyperParameters(
        architectures=architectures(config),
        is_multimodal=bool(vision),
        vision_config=vision or None,
        vision_heads=vision_heads(vision),
        num_hidden_layers=layers,
        hidden_size=hidden,
        vocab_size=read.size("vocab_size"),
        num_attention_heads=heads,
        num_key_value_heads=stated_kv or 1,
        kv_heads_stated=stated_kv is not None,
        head_dim=read.size("head_dim") or (hidden // heads if hidden and heads else None),
        n_group=read.count("n_group"),
        q_lora_rank=read.count("q_lora_rank"),
        kv_lora_rank=read.count("kv_lora_rank"),
        qk_rope_head_dim=read.count("qk_rope_head_dim"),
        qk_nope_head_dim=read.count("qk_nope_head_dim"),
        v_head_dim=read.count("v_head_dim"),
        sliding_window=window_size(text) if windows else None,
        window_layers=windows,
        state_layers=states,
        shared_layers=min(read.count("num_kv_shared_layers") or 0, layers or 0),
        intermediate_size=read.size("intermediate_size"),
        quantize=_text(text, "quantize"),
        quantization_config=_object(text, "quantization_config") or quantization or None,
        moe_intermediate_size=read.count("moe_intermediate_size"),
        moe_num_experts=experts,
        moe_num_shared_experts=shared if experts else None,
        torch_dtype=dtype(text) or dtype(config) or "bfloat16",
        max_sequence_length=max_sequence_length(text),
    )  # fmt: skip


def architectures(config: Config) -> tuple[str, ...]:
    """`architectures` of a `text_config`, else those of the root."""
    return root_architectures(_object(config, "text_config")) or root_architectures(config)


def root_architectures(config: Config) -> tuple[str, ...]:
    """`architectures` of the root alone: what names the category of a model."""
    raw = config.get("architectures")
    if isinstance(raw, str):
        return (raw,) if raw else ()
    return tuple(x for x in raw[:64] if isinstance(x, str)) if isinstance(raw, list) else ()


def text_part(config: Config) -> Config:
    """The object that holds the language model's dimensions: a nested one that states attention heads (or
    whose family's default is known), then the root, then the thinker of a model that speaks."""
    parts = [with_defaults(_object(config, key)) for key in TEXT_PARTS]
    thinker = _object(config, "thinker_config")
    parts += [config, with_defaults(_object(thinker, "text_config")), with_defaults(thinker)]
    return next((p for p in parts if _first(p, ALIASES["num_attention_heads"])), with_defaults(config))


def attention_heads(config: Config, name: str = "config.json") -> int | None:
    """Heads of the language part; the root's own figure only where no nested language part has one."""
    return _Reader(text_part(config), name).size("num_attention_heads", zero_is_absent=True) or _Reader(
        config, name
    ).size("num_attention_heads", zero_is_absent=True)


def vision_heads(vision: Config) -> int | None:
    """Heads of the vision tower with the dummy heads that pad them; None for anything but a positive
    integer."""
    for key in ("num_attention_heads", "num_heads"):
        heads = vision.get(key)
        if isinstance(heads, int) and not isinstance(heads, bool):
            if not 0 < heads < LARGEST:
                return None
            dummy = vision.get("num_dummy_heads")
            padded = dummy if isinstance(dummy, int) and not isinstance(dummy, bool) else 0
            return heads + min(max(padded, 0), LARGEST)
    return None


def dtype(part: Config) -> str | None:
    """`torch_dtype` or `dtype`, as a bare name (`torch.float16` and `float16` are one)."""
    for key in ("torch_dtype", "dtype"):
        if isinstance(raw := part.get(key), str) and raw and raw != "auto":
            return raw.removeprefix("torch.")
    return None


def max_sequence_length(text: Config) -> int:
    """Tokens of the longest sequence: the smallest stated length, times the factor of a rope scaling that
    stretches it (for `yarn` counted from the original length, arXiv 2309.00071)."""
    stated = [n for key in LENGTHS if (n := _number(text.get(key))) is not None and n > 0]
    length = min(stated, default=float(DEFAULT_LENGTH))
    rope = _object(text, "rope_scaling") or _object(text, "rope_parameters")
    kind = rope.get("type") or rope.get("rope_type")
    if isinstance(kind, str) and kind not in KEEPS_LENGTH:
        factor = _number(rope.get("factor"))
        original = _number(rope.get("original_max_position_embeddings")) if kind == "yarn" else None
        length = (original if original and original > 0 else length) * (
            factor if factor and factor > 0 else 1.0
        )
    return int(min(length, float(LARGEST)))


class _Reader:
    """Typed access to one part of a configuration, errors name file and key."""

    def __init__(self, part: Config, name: str) -> None:
        self._part = part
        self._name = name

    def size(self, dimension: str, *, zero_is_absent: bool = False) -> int | None:
        """A dimension that must be positive where it is stated; per-layer lists count as unknown."""
        keys = ALIASES.get(dimension, (dimension,))
        key = next((k for k in keys if self._part.get(k) is not None), None)
        if key is None:
            return None
        raw = self._part[key]
        if isinstance(raw, list):
            return None
        number = _whole(raw)
        if number == 0 and zero_is_absent:
            return None
        if number is None or not 0 < number <= LARGEST:
            raise ModelUnreadable(
                "bad_config", f"{self._name}: {key} is {_shown(raw)}, not a positive number", "fix the file"
            )
        return number

    def count(self, key: str) -> int | None:
        """Like `size`, for figures that may be 0 or null, meaning "none"."""
        raw = self._part.get(key)
        if raw is None or isinstance(raw, list) or raw is False:
            return None
        number = _whole(raw)
        if number is None or not 0 <= number <= LARGEST:
            raise ModelUnreadable(
                "bad_config", f"{self._name}: {key} is {_shown(raw)}, not a number", "fix the file"
            )
        return number


def _nested_kv_heads(text: Config) -> int | None:
    """MPT keeps it in `attn_config`; Falcon says `multi_query` for one head."""
    nested = _whole(_object(text, "attn_config").get("kv_n_heads"))
    if nested and 0 < nested <= LARGEST:
        return nested
    return 1 if text.get("multi_query") is True else None


def _first(part: Config, keys: Sequence[str]) -> Any:
    return next((part[k] for k in keys if part.get(k)), None)


def _object(part: Config, key: str) -> Config:
    value = part.get(key)
    return value if isinstance(value, Mapping) else {}


def _text(part: Config, key: str) -> str | None:
    value = part.get(key)
    return value if isinstance(value, str) and value else None


def _number(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, (int, float)) or abs(raw) > 1e300:
        return None
    number = float(raw)
    return number if number == number else None


def _whole(raw: Any) -> int | None:
    if isinstance(raw, bool):
        return None
    if isinstance(raw, int):
        return raw
    return int(raw) if isinstance(raw, float) and raw.is_integer() else None


def _shown(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 40 else text[:37] + "..."
