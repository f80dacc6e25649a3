"""Compute buffers of a network whose pass is not known: an upper bound from its dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.estimate.llama_cpp.architecture import WITH_VALUES, Dimensions
from gpustackd.estimate.llama_cpp.graph.forward_pass import Workload
from gpustackd.estimate.llama_cpp.tensors import ModelTensors, has_head

ROOM = 1.5
"""By how much the sum of a layer's results is raised."""


def bounded_buffers(
    facts: GgufFacts,
    dims: Dimensions,
    tensors: ModelTensors,
    load: Workload,
    layers: Sequence[Sequence[int]],
    output: int,
    *,
    copies: int,
    cache_on_host: bool = False,
) -> tuple[int, ...]:
    """Bytes on each device and, last, on the host. `layers`: those of each device, the host's last; `output`:
    the device of the output. `copies`: how often inputs are held. `cache_on_host`: attention runs there."""
    rows = 4 * load.tokens
    # positions, indexes and a mask for each length of cache; where values lie by column, their indexes too
    given = 64 * load.tokens + (2 if load.flash else 4) * load.cells * load.tokens
    if any(dims.windowed):
        given += (2 if load.flash else 4) * load.window_cells * load.tokens
    if facts.integer("attention.indexer.head_count"):  # a mask of its own
        given += 2 * load.cells * load.tokens
    if facts.architecture == "minimax-01":  # how much each token fades for each later one, by head
        given += 4 * load.tokens**2 * (max(dims.heads, default=0) + 2)
    if not load.flash:
        given += 2 * rows * max(h * dims.value_of(i) for i, h in enumerate(dims.kv_heads))
    # embeddings of every layer, and several states side by side that travel from device to device
    beside = tensors.others.get("altup_proj.weight")
    states = beside.shape[2] if beside is not None and len(beside.shape) > 2 else 0
    travels = 3 * facts.integer("embedding_length_per_layer_input") * dims.layers
    travels += 2 * states * dims.embedding
    writes = has_head(facts)
    found = []
    for device, some in enumerate(layers):
        peak = max((_layer(facts, dims, tensors, load, i) for i in some), default=0)
        if device == output:
            width = dims.embedding + (dims.vocabulary if writes else 0)
            peak = max(peak, 4 * load.outputs * width)
        if some or device == output:
            peak += copies * (given + rows * (2 * dims.embedding + travels))
        found.append(int(peak))
    host = given + 4 * rows * dims.embedding
    if cache_on_host:
        every = [i for some in layers for i in some]
        host += max((_layer(facts, dims, tensors, load, i) for i in every), default=0)
    found[-1] = max(found[-1], copies * host)
    return tuple(found)


def _layer(facts: GgufFacts, dims: Dimensions, tensors: ModelTensors, load: Workload, layer: int) -> int:
    """The wider half of a layer: its attention, or its feed-forward results."""
    rows = 4 * load.tokens
    named = tensors.layers[layer]
    used = facts.per_layer("expert_used_count", dims.all_layers)[layer] or 1
    matrices = [(name, t.shape) for name, t in named.items()]
    wide = max((s[1] for n, s in matrices if n.startswith("ffn_") and len(s) == 2), default=0)
    expert = max((s[1] for n, s in matrices if "_exps" in n and len(s) == 3), default=0)
    other = max((s[1] for n, s in matrices if not n.startswith("ffn_") and len(s) == 2), default=0)
    heads = dims.heads[layer]
    forward = rows * (3 * wide + 4 * dims.embedding) + rows * used * (3 * expert + 2 * dims.embedding)
    head = max(dims.key_of(layer), dims.value_of(layer))
    attend = rows * (4 * other + 4 * dims.embedding + 2 * heads * head)
    if not load.flash:
        attend += rows * heads * load.cells
    if scoring := facts.integer("attention.indexer.head_count"):  # cells are scored and chosen first
        apart = facts.architecture in WITH_VALUES  # by every head; others do it in one step
        attend += rows * load.cells * (2 + (scoring // 2 if apart else 0))
    return int(ROOM * max(forward, attend))
