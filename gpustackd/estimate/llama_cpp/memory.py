"""Bytes of weights and cache of every layer, and of what lies outside the layers.

Rules are those of llama.cpp (src/llama-model.cpp, src/llama-kv-cache.cpp). Each tensor is counted in the
steps in which buffers hand out memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.gguf_facts import F32, GgufFacts, GgufTensor
from gpustackd.engines.llama_cpp.flags import LlamaServing
from gpustackd.estimate.llama_cpp.architecture import WITH_VALUES, Dimensions
from gpustackd.estimate.llama_cpp.tensors import ModelTensors, has_head, is_output, padded

Bytes = NDArray[np.int64]

INPUTS = frozenset({
    "token_embd.weight", "position_embd.weight", "token_types.weight", "per_layer_token_embd.weight",
    "masked_embd_centroids.weight", "masked_embd_ordering.weight",
})  # fmt: skip
"""Tables that rows are looked up in: they stay on the host."""
ON_EVERY_DEVICE = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""Small tables of which every device with layers has a copy."""
LOADED_TWICE = frozenset({"gemma3n"})
"""Keep the token table twice where there is no output matrix, on the host too."""


FINE, COARSE = 4, 128
"""Cells that one compressed cell stands for: where some of them are chosen, and where all are read."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, arrays with one entry per layer (those that predict further tokens included)."""

    layers: Bytes
    """Weights that go where the layer goes."""
    kept: Bytes
    """Weights of layers that a flag keeps on the host."""
    cache: Bytes
    """Keys and values, or states."""
    everywhere: int
    """Weights of which each device with layers has a copy, the host included."""
    first: int
    """Weights that go with the first layer."""
    inputs: int
    output: int
    """Weights of the output, a second copy of the token table where there is no output matrix."""
    tied: int
    """Bytes of that second copy that the host does not need."""
    overrides: dict[int, int]
    """Weights that a flag puts on one device: device -> bytes."""


def memory_of(facts: GgufFacts, dims: Dimensions, tensors: ModelTensors, serving: LlamaServing) -> Memory:
    """Count all tensors, and the cache of every layer."""
    count = dims.all_layers
    layers, kept = np.zeros(count, np.int64), np.zeros(count, np.int64)
    patterns = [(re.compile(o.pattern), o.device) for o in serving.overrides]
    overrides: dict[int, int] = {}
    for i in range(dims.layers):
        for tensor in tensors.layers[i].values():
            size = padded(tensor.size)
            device = next((d for p, d in patterns if p.search(tensor.name)), -1)
            if device == -1:
                layers[i] += size
            elif device is None:
                kept[i] += size
            else:
                overrides[device] = overrides.get(device, 0) + size
    everywhere = first = inputs = output = 0
    names = set(tensors.others)
    for name, tensor in tensors.others.items():
        size = padded(tensor.size)
        if name in ON_EVERY_DEVICE:
            everywhere += size
        elif name in INPUTS:
            inputs += size
        elif is_output(name) or (name == "token_embd_norm.weight" and facts.architecture.startswith("lfm2")):
            output += size
        elif not _unused(tensor):
            first += size
    tied = 0
    if "output.weight" not in names and has_head(facts):
        tied = next((padded(t.size) for n, t in tensors.others.items() if n == "token_embd.weight"), 0)
    return Memory(
        layers=layers,
        kept=kept,
        cache=cache_of(dims, serving),
        everywhere=everywhere,
        first=first,
        inputs=inputs,
        output=output + tied,
        tied=0 if facts.architecture in LOADED_TWICE else tied,
        overrides=overrides,
    )


def _unused(tensor: GgufTensor) -> bool:
    """Layers beyond those that are run have their names in the list of others."""
    return tensor.name.startswith("blk.")


def cache_of(dims: Dimensions, serving: LlamaServing) -> Bytes:
    """Keys and values, or states, of every layer."""
    found = np.zeros(dims.all_layers, np.int64)
    streams, cells = serving.streams, serving.sequence_cells
    if dims.architecture == "deepseek4":
        streams = serving.parallel  # one each, even where slots share the rest
    window = window_cells(dims, serving)
    flash = serving.flash_attention != "off"
    for i in range(dims.all_layers):
        if dims.cached[i]:
            held = (window if dims.windowed[i] else cells) * streams
            found[i] += sum(map(padded, _sparse_bytes(dims, serving, i)))
            heads = dims.kv_heads[i]
            found[i] += padded(serving.cache_k.bytes_of(dims.key_of(i) * heads) * held)
            if not dims.keys_alone:
                wide = dims.value_of(i) * heads if flash else dims.widest_value
                found[i] += padded(serving.cache_v.bytes_of(wide) * held)
        if dims.recurrent[i] and i < dims.layers:
            slots = serving.parallel
            found[i] += padded(dims.state_r * slots * F32.size) + padded(dims.state_s * slots * F32.size)
    return found


def _sparse_bytes(dims: Dimensions, serving: LlamaServing, layer: int) -> tuple[int, ...]:
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


def window_cells(dims: Dimensions, serving: LlamaServing) -> int:
    """Cells of one stream in the layers that look at a window only."""
    cells = serving.sequence_cells
    if serving.full_windows:
        return cells
    shared = serving.unified and dims.architecture != "deepseek4"
    wanted = dims.window * (serving.parallel if shared else 1) + ubatch_of(dims, serving)
    return -(-min(cells, wanted) // 256) * 256


def ubatch_of(dims: Dimensions, serving: LlamaServing) -> int:
    """Tokens of one pass at most."""
    batch = min(serving.cells, serving.batch) if dims.causal else serving.batch
    return min(batch, serving.ubatch)
