"""What an architecture implies for its layers: which keep a cache, how long, of which size.

Rules are those of llama.cpp (https://github.com/ggml-org/llama.cpp, src/llama-model.cpp). What a header
says by itself goes before what the name implies; a name that is not known counts as plain attention on
every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.engines.llama_cpp.flags import ENCODERS

DIFFUSION = frozenset({"dream", "llada", "llada-moe", "rnd1"})
"""Language models that refine all tokens at once, without a cache."""
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
"""Every layer has a state of constant size in place of a cache."""
INTERVAL = frozenset({"qwen3next", "qwen35", "qwen35moe", "qwen4exp", "minimax-01"})
"""Hybrids in which every n-th layer is full attention."""
HYBRID = INTERVAL | frozenset({
    "jamba", "falcon-h1", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe",
    "kimi-linear", "kimi-k3", "bailingmoe3",
})  # fmt: skip
"""Some layers have a state, some a cache; no heads for keys means a state."""
MTP_LAST = frozenset({
    "step35", "hy_v3", "glm-dsa", "mimo2", "deepseek32", "dots3note", "deepseek4", "nemotron_h_moe",
    *INTERVAL,
})  # fmt: skip
"""Keep no cache for the layers that predict further tokens, which are not loaded for ordinary serving."""
WITH_VALUES = frozenset({"minimax-m3", "qwen4exp"})
"""Make room for values beside these keys, which nobody reads."""
SHARING_FROM = 1_048_576
"""Trained context from which on GLM has layers that use the choice of the one before them."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Which layers look at a window only: `period` 0 = none unless the header lists them."""

    period: int
    dense_first: bool = False
    default: int = 0
    """Tokens of the window where the header is silent; 0 = no window then."""
    fixed: int = 0
    """Tokens of the window whatever the header says, if it is not 0 there."""


_WINDOWS: Mapping[str, Windows] = MappingProxyType({
    "gemma2": Windows(2, default=4096),
    "gemma3": Windows(6),
    "gemma-embedding": Windows(6),
    "gemma3n": Windows(5),
    "gemma4": Windows(0),
    "llama4": Windows(4, default=8192, fixed=8192),
    "cohere2": Windows(4),
    "cohere2moe": Windows(4, dense_first=True),
    "gpt-oss": Windows(2),
    "olmo2": Windows(4),
    "exaone4": Windows(4, default=4096),
    "exaone-moe": Windows(4, default=128),
    "plamo3": Windows(8),
    "smallthinker": Windows(4, dense_first=True, fixed=4096),
    "laguna": Windows(4, dense_first=True),
    "modern-bert": Windows(3, dense_first=True),
    "afmoe": Windows(4),
    "mellum": Windows(4),
    "muse-glimmer": Windows(4),
    "mimo2": Windows(0),
    "step35": Windows(0),
    "granite_swa": Windows(0),
    "dots3note": Windows(0),
    "deepseek4": Windows(1),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dimensions:
    """Sizes of the network, one entry per layer where they differ. Numbers of elements."""

    architecture: str
    layers: int
    """That are run, without those that predict further tokens."""
    all_layers: int
    embedding: int
    vocabulary: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    feed_forward: tuple[int, ...]
    key: int
    value: int
    key_window: int
    value_window: int
    key_mla: int
    value_mla: int
    window: int
    """Tokens of the sliding window; 0 = no layer has one."""
    windowed: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    cached: tuple[bool, ...]
    """Whether the layer owns keys and values."""
    state_r: int
    """Elements of the convolution (or token shift) state of one sequence in one recurrent layer."""
    state_s: int
    rope: int
    index_key: int
    """Elements of a key by which cells are chosen (sparse attention)."""
    indexed: tuple[bool, ...]
    """Whether the layer keeps such keys."""
    compressed: tuple[int, ...]
    """Cells that one compressed cell of the layer stands for; 0 = none are compressed."""
    positions: int
    """Position numbers of a token: 4 where images have rows and columns."""
    causal: bool

    @property
    def keys_alone(self) -> bool:
        """Whether the keys are the values, so that one cache does for both."""
        return self.mla or self.architecture == "deepseek4"

    @property
    def mla(self) -> bool:
        """Whether keys and values are kept as one compressed vector."""
        return self.key_mla > 0 and self.value_mla > 0

    def key_of(self, layer: int) -> int:
        """Elements of one head's key."""
        return self.key_window if self.windowed[layer] else self.key

    def value_of(self, layer: int) -> int:
        """Elements of one head's value."""
        return self.value_window if self.windowed[layer] else self.value

    @property
    def widest_value(self) -> int:
        """Elements of all heads' values in the layer that has most."""
        return max((self.value_of(i) * self.kv_heads[i] for i in range(self.all_layers)), default=0)


def is_causal(facts: GgufFacts) -> bool:
    """Whether tokens see only those before them."""
    return facts.value("attention.causal") is not False and facts.architecture not in {"bert", "t5encoder"}


def dimensions(facts: GgufFacts) -> Dimensions:
    """Read the header. A header without a number of layers has as many as its tensors name."""
    name = facts.architecture
    all_layers = facts.integer("block_count") or _blocks(facts)
    layers = max(all_layers - min(facts.integer("nextn_predict_layers"), all_layers), 0)
    heads = facts.per_layer("attention.head_count", all_layers)
    kv_heads = heads
    if facts.value("attention.head_count_kv") is not None:
        kv_heads = facts.per_layer("attention.head_count_kv", all_layers)
    embedding = facts.integer("embedding_length")
    first = heads[0] if heads else 0
    each = embedding // first if first else 0
    key = facts.integer("attention.key_length", each) if first else 0
    value = facts.integer("attention.value_length", each) if first else 0
    recurrent = _recurrent(facts, all_layers, layers, kv_heads)
    window, windowed = _windowed(facts, all_layers, layers, recurrent)
    r, s = _states(facts, first)
    return Dimensions(
        architecture=name,
        layers=layers,
        all_layers=all_layers,
        embedding=embedding,
        vocabulary=facts.vocabulary or _rows_of(facts, "token_embd.weight"),
        heads=heads,
        kv_heads=kv_heads,
        feed_forward=facts.per_layer("feed_forward_length", all_layers),
        key=key,
        value=value,
        key_window=facts.integer("attention.key_length_swa", key),
        value_window=facts.integer("attention.value_length_swa", value),
        key_mla=facts.integer("attention.key_length_mla"),
        value_mla=facts.integer("attention.value_length_mla"),
        window=window,
        windowed=windowed,
        recurrent=recurrent,
        cached=_cached(facts, all_layers, layers, recurrent),
        state_r=r,
        state_s=s,
        rope=facts.integer("rope.dimension_count", key),
        index_key=facts.integer("attention.indexer.key_length"),
        indexed=_indexed(facts, all_layers, layers, recurrent),
        compressed=_compression(facts, all_layers),
        positions=4 if _has_sections(facts) else 1,
        causal=is_causal(facts),
    )


def _blocks(facts: GgufFacts) -> int:
    found = 0
    for tensor in facts.tensors:
        head, _, rest = tensor.name.partition(".")
        number, dot, _ = rest.partition(".")
        if head == "blk" and dot and number.isdigit() and len(number) < 6:
            found = max(found, int(number) + 1)
    return found


def _rows_of(facts: GgufFacts, name: str) -> int:
    return next((t.shape[1] for t in facts.tensors if t.name == name and len(t.shape) > 1), 0)


def _windowed(
    facts: GgufFacts, all_layers: int, layers: int, recurrent: tuple[bool, ...]
) -> tuple[int, tuple[bool, ...]]:
    """Tokens of the window, and which layers have it."""
    none = (False,) * all_layers
    name = facts.architecture
    rule = _WINDOWS.get(name)
    stated = facts.value("attention.sliding_window") is not None
    window = facts.integer("attention.sliding_window")
    if name in {"lfm2", "lfm2moe"} and window:
        return window, tuple(not r for r in recurrent)
    if rule is None or (stated and not window) or (name == "exaone4" and layers != 64):
        return 0, none
    window = (rule.fixed if rule.fixed and (stated or rule.default) else window) or rule.default
    if not window:
        return 0, none
    pattern = facts.value("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        marks = [bool(x) for x in pattern[:all_layers]]
        return window, tuple(marks + [False] * (all_layers - len(marks)))
    period = int(pattern) if isinstance(pattern, (int, float)) else rule.period
    if rule.period == 1 and name == "deepseek4":
        return window, tuple(i < layers for i in range(all_layers))
    if period <= 0:
        return (0, none) if pattern is None else (window, tuple(i < layers for i in range(all_layers)))
    if rule.dense_first:
        marks = [i < layers and i % period != 0 for i in range(all_layers)]
    else:
        marks = [i < layers and i % period < period - 1 for i in range(all_layers)]
    return (window, tuple(marks)) if any(marks) else (0, none)


def _recurrent(facts: GgufFacts, all_layers: int, layers: int, kv_heads: tuple[int, ...]) -> tuple[bool, ...]:
    name = facts.architecture
    if name in RECURRENT or name == "falcon-h1":
        return (True,) * all_layers
    if name not in HYBRID:
        return (False,) * all_layers
    if name in INTERVAL:
        listed = facts.value("attention.recurrent_layers")
        if listed is not None:
            return tuple(bool(x) for x in facts.per_layer("attention.recurrent_layers", all_layers))
        every = facts.integer("full_attention_interval", 8 if name == "minimax-01" else 4) or 1
        return tuple(i < layers and (i + 1) % every != 0 for i in range(all_layers))
    if name.startswith("nemotron_h"):
        wide = facts.per_layer("feed_forward_length", all_layers)
        return tuple(
            i < layers and not h and not f for i, (h, f) in enumerate(zip(kv_heads, wide, strict=True))
        )
    return tuple(not h for h in kv_heads)


def _cached(facts: GgufFacts, all_layers: int, layers: int, recurrent: tuple[bool, ...]) -> tuple[bool, ...]:
    name = facts.architecture
    if name in RECURRENT or name in ENCODERS or name in DIFFUSION:
        return (False,) * all_layers
    own = all_layers
    if name == "gemma3n":
        own = 20
    elif name == "gemma4":
        own = all_layers - facts.integer("attention.shared_kv_layers")
    if name in MTP_LAST:
        own = min(own, layers)
    found = [i < own and (not recurrent[i] or name == "falcon-h1") for i in range(all_layers)]
    if name.startswith("nemotron_h"):
        wide = facts.per_layer("feed_forward_length", all_layers)
        found = [f and not w for f, w in zip(found, wide, strict=True)]
    return tuple(found)


def _indexed(facts: GgufFacts, all_layers: int, layers: int, recurrent: Sequence[bool]) -> tuple[bool, ...]:
    """Which layers keep a key per cell by which cells are chosen."""
    name = facts.architecture
    here = [False] * all_layers
    if not facts.integer("attention.indexer.key_length") or name == "deepseek4":
        return tuple(here)
    listed = facts.value("attention.indexer.types")
    if name == "minimax-m3":
        here = [i >= facts.integer("leading_dense_block_count") for i in range(all_layers)]
    elif name == "qwen4exp":
        here = [not r for r in recurrent]
    elif name in {"glm-dsa", "dots3note"} and listed is not None:
        here = [bool(x) for x in facts.per_layer("attention.indexer.types", all_layers)]
    elif name == "glm-dsa" and facts.integer("context_length") >= SHARING_FROM:
        here = [i < 3 or (i - 2) % 4 == 0 for i in range(all_layers)]
    elif name != "dots3note":
        own = {
            t.name.split(".")[1] for t in facts.tensors if t.name.startswith("blk.") and ".indexer." in t.name
        }
        here = [str(i) in own for i in range(all_layers)]
    return tuple(h and i < layers for i, h in enumerate(here))


def _compression(facts: GgufFacts, all_layers: int) -> tuple[int, ...]:
    """Cells that one compressed cell of a layer stands for; 0 = it has none."""
    if facts.architecture != "deepseek4":
        return (0,) * all_layers
    return facts.per_layer("attention.compress_ratios", all_layers)


def _states(facts: GgufFacts, heads: int) -> tuple[int, int]:
    """Elements of the two states of a recurrent layer for one sequence."""
    embedding = facts.integer("embedding_length")
    if (head := facts.integer("wkv.head_size")) > 0:
        return facts.integer("token_shift_count", 2) * embedding, head * embedding
    if (kept := facts.integer("shortconv.l_cache")) > 0:
        return embedding * (kept - 1), 0
    conv = max(facts.integer("ssm.conv_kernel") - 1, 0)
    if (head := facts.integer("kda.head_dim")) > 0:
        return 3 * (conv or 3) * heads * head, head * head * heads
    if facts.architecture == "minimax-01":
        head = facts.integer("attention.key_length", embedding // heads if heads else 0)
        return 0, head * head * heads
    inner, state = facts.integer("ssm.inner_size"), facts.integer("ssm.state_size")
    return conv * (inner + 2 * facts.integer("ssm.group_count") * state), state * inner


_SECTIONED = frozenset(
    {"qwen2vl", "paddleocr", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe", "qwen4exp", "qwen3tts"}
)
_MAYBE_SECTIONED = frozenset({"glm4", "glm4moe", "hunyuan_vl"})


def _has_sections(facts: GgufFacts) -> bool:
    if facts.architecture in _SECTIONED:
        return True
    sections = facts.value("rope.dimension_sections")
    return (
        facts.architecture in _MAYBE_SECTIONED
        and isinstance(sections, tuple)
        and len(sections) > 1
        and all(isinstance(s, (int, float)) and s > 0 for s in sections[:2])
    )
