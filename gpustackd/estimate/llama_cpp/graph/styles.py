"""In what the many decoders differ from Llama: one row per architecture, everything else is read off the
tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.estimate.llama_cpp.graph.feed_forward import GATED


@dataclass(frozen=True, slots=True)
class Style:
    """What cannot be seen from the tensors of a file."""

    rms: bool = True
    """Norms by squares alone; False: also centred, which never works in place."""
    bare_norms: bool = False
    """Norms without weights."""
    rotary: bool = True
    """Queries and keys are rotated by position."""
    turned_then_normed: bool = False
    wide_norms: bool = False
    """Queries and keys are normalised over all heads at once."""
    scaled_queries: bool = False
    heads_after_norms: bool = False
    """… before they are told apart by head."""
    parallel: str = ""
    """The feed-forward layer reads what attention reads, and both are added to what the layer was given, in
    this order: w(ide), a(ttention), b(efore)."""
    own_norm: bool = False
    """… through a norm of its own."""
    embedding_scaled: bool = False
    table_normed: bool = False
    places: bool = False
    """Positions are rows of a table."""
    residual_scaled: bool = False
    second_norm: str = "ffn_norm"
    """Name of the norm before the feed-forward layer."""
    after_attention: str = "post_attention_norm"
    """Name of the norm on what attention gives; none where the layer has no such tensor."""
    after_feed_forward: str = "post_ffw_norm"
    experts_normed: bool | None = True
    """Weights of the chosen experts add up to 1; None: as the header says."""
    gating: str = "softmax"
    experts_act: str = GATED
    late_rows: bool = False
    """Rows whose output is asked for are picked after the last layer."""
    late_rows_normed: bool = False
    """… and after the last norm."""
    logits_scaled: bool = False
    capped: bool = False
    """Scores are capped before the soft-max where the fused kernel is off."""
    scores_first: bool = False
    """Experts are chosen by what the layer is given."""
    steps_without_rotary: int = 0
    """Every n-th layer is not rotated."""
    weigh_first: bool = False
    rotary_in_windows_only: bool = False


LLAMA = Style()

_LAYER_NORMED = Style(rms=False)
_PLACED = Style(rms=False, rotary=False, places=True)
_AS_LLAMA = (
    "llama", "arcee", "arctic", "chatglm", "cogvlm", "deci", "dream", "ernie4_5", "ernie4_5-moe", "exaone",
    "glm4", "grovemoe", "hunyuan_vl", "internlm2", "llada", "llada-moe", "maincoder", "mistral3", "nanbeige",
    "openelm", "paddleocr", "pangu-embedded", "qwen", "qwen2", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl",
    "qwen3vlmoe", "rnd1", "seed_oss", "smollm3", "talkie", "xverse",
)  # fmt: skip
STYLES: Mapping[str, Style] = MappingProxyType({
    **dict.fromkeys(_AS_LLAMA, LLAMA),
    "baichuan": Style(rotary=False),
    "bloom": Style(rms=False, rotary=False, table_normed=True),
    "cohere2": Style(rms=False, parallel="wba", logits_scaled=True, rotary_in_windows_only=True),
    "command-r": Style(rms=False, parallel="wba", logits_scaled=True),
    "bailingmoe": Style(experts_normed=None),
    "bailingmoe2": Style(experts_normed=None),
    "dots1": Style(experts_normed=None),
    "afmoe": Style(experts_normed=None),
    "codeshell": _LAYER_NORMED,
    "dbrx": Style(rms=False, second_norm="attn_output_norm"),
    "deepseek": Style(experts_normed=False),
    "exaone4": Style(second_norm=""),
    "falcon": Style(rms=False, parallel="wab"),
    "gemma": Style(embedding_scaled=True, scaled_queries=True),
    "glm4moe": Style(experts_normed=None, second_norm="post_attention_norm", after_attention=""),
    "gpt-oss": Style(second_norm="post_attention_norm", after_attention="", gating="late",
                     experts_normed=False, late_rows=True),
    "gpt2": _PLACED,
    "gptneox": Style(rms=False, parallel="wba", own_norm=True),
    "granite": Style(logits_scaled=True),
    "granitemoe": Style(logits_scaled=True),
    "grok": Style(embedding_scaled=True, capped=True, after_attention="attn_output_norm",
                  after_feed_forward="layer_output_norm", logits_scaled=True),
    "hunyuan-moe": Style(turned_then_normed=True),
    "hunyuan-dense": Style(turned_then_normed=True),
    "hy_v3": Style(experts_normed=None, late_rows=True, late_rows_normed=True),
    "jais2": _LAYER_NORMED,
    "pockettts": _LAYER_NORMED,
    "jais": Style(rms=False, rotary=False),
    "llama4": Style(steps_without_rotary=4, weigh_first=True, experts_normed=False, gating="sigmoid"),
    "minicpm": Style(embedding_scaled=True, residual_scaled=True, logits_scaled=True),
    "minimax-m2": Style(wide_norms=True, heads_after_norms=True),
    "mpt": Style(rms=False, rotary=False, wide_norms=True, places=True),
    "nemotron": _LAYER_NORMED,
    "olmo": Style(rms=False, bare_norms=True),
    "olmo2": Style(second_norm="", wide_norms=True, heads_after_norms=True),
    "olmoe": Style(wide_norms=True, heads_after_norms=True, experts_normed=False),
    "orion": _LAYER_NORMED,
    "phi2": Style(rms=False, parallel="awb", scaled_queries=True),
    "phi3": Style(scaled_queries=True),
    "phimoe": Style(scaled_queries=True),
    "plamo": Style(parallel="wab"),
    "qwen2moe": Style(experts_normed=False),
    "refact": Style(rotary=False),
    "smallthinker": Style(scores_first=True),
    "stablelm": _LAYER_NORMED,
    "starcoder": _PLACED,
    "starcoder2": _LAYER_NORMED,
})  # fmt: skip


def style_of(facts: GgufFacts) -> Style:
    """The style of an architecture; of an unknown one, by what its header says of its norms."""
    found = STYLES.get(facts.architecture)
    if found is not None:
        if facts.architecture == "gptneox" and facts.value("use_parallel_residual") is False:
            found = _LAYER_NORMED
        return replace(
            found,
            embedding_scaled=found.embedding_scaled or bool(facts.number("embedding_scale")),
            residual_scaled=found.residual_scaled or bool(facts.number("residual_scale")),
        )
    centred = facts.value("attention.layer_norm_epsilon") is not None
    squared = facts.value("attention.layer_norm_rms_epsilon") is not None
    return _LAYER_NORMED if centred and not squared else LLAMA
