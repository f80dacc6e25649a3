"""Caches of sparse attention beside keys and values: keys by which cells are chosen, compressed cells.

Rules: estimate-gguf spec section 6.2 (attention with an indexer), and measured runs. Sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpustackd.domain.gguf_facts import F32, GgufFacts

if TYPE_CHECKING:
    from gpustackd.estimate.llama_cpp.architecture import Dimensions
    from gpustackd.estimate.llama_cpp.serving import LlamaServing

FINE, COARSE = 4, 128
"""Cells that one compressed cell stands for: where some of them are chosen, and where all are read."""
WITH_VALUES = frozenset({"minimax-m3", "qwen4exp"})
"""Make room for values beside these keys, which nobody reads."""
SHARING_FROM = 1_048_576
"""Trained context from which on GLM has layers that use the choice of the one before them."""


def indexed(facts: GgufFacts, all_layers: int, layers: int, recurrent: Sequence[bool]) -> tuple[bool, ...]:
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


def compression(facts: GgufFacts, all_layers: int) -> tuple[int, ...]:
    """Cells that one compressed cell of a layer stands for; 0 = it has none."""
    if facts.architecture != "deepseek4":
        return (0,) * all_layers
    return facts.per_layer("attention.compress_ratios", all_layers)


def sparse_bytes(dims: Dimensions, serving: LlamaServing, layer: int) -> tuple[int, ...]:
    """What the layer holds beside its keys and values, one size per buffer."""
    found: list[int] = []
    row = serving.cache_k.bytes_of(dims.index_key)
    if dims.indexed[layer]:
        cells = serving.sequence_cells * serving.streams
        found.append(row * cells)
        if dims.architecture in WITH_VALUES:
            found.append(serving.cache_v.bytes_of(dims.value) * cells)
    ratio = dims.compressed[layer]
    if ratio in {FINE, COARSE}:
        slots = serving.parallel
        cells = -(-max(1, -(-serving.sequence_cells // ratio)) // 256) * 256
        key = dims.key_of(layer)
        found.append(serving.cache_k.bytes_of(key) * cells * slots)
        # what is not compressed yet: two results of so many cells, both halves of a pair where cells overlap
        wide = 2 if ratio == FINE else 1
        found += [F32.size * wide * key * wide * ratio * slots] * 2
        if ratio == FINE:
            found.append(row * cells * slots)
            found += [F32.size * wide * dims.index_key * wide * ratio * slots] * 2
    return tuple(found)
