"""Attention over compressed keys and values (MLA): DeepSeek-V2 and what follows it."""

from __future__ import annotations

from gpustackd.estimate.llama_cpp.graph.blocks import (
    attend,
    attention,
    embed_tokens,
    keep_output_rows,
    logits,
    project,
)
from gpustackd.estimate.llama_cpp.graph.feed_forward import (
    dense,
    experts,
    shared_expert,
    weights_normed,
    weights_scaled,
)
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.tape import (
    Node,
    concatenate,
    copy_into,
    make_contiguous,
    matmul,
    new_node,
    permute,
    pointwise,
    rope,
    view,
)


def deepseek2(p: ForwardPass) -> None:
    """DeepSeek-V2, V3 and their kin: MLA, then a few dense layers, then experts."""
    x = embed_tokens(p)
    first = p.facts.integer("leading_dense_block_count")
    for layer in p.order:
        before = x
        y = p.layer_norm(x, layer, "attn_norm")
        y = latent_attention(p, layer, y)
        y, before = keep_output_rows(p, layer, y, before)
        middle = pointwise(y, before)
        y = p.layer_norm(middle, layer, "ffn_norm")
        if layer < first:
            y = dense(p, layer, y)
        else:
            routed = experts(p, layer, y, normed=weights_normed(p), scaled=weights_scaled(p))
            y = pointwise(routed, shared_expert(p, layer, y))
        x = pointwise(y, middle)
    logits(p, x)


def latent_attention(p: ForwardPass, layer: int, x: Node) -> Node:
    """Queries against compressed keys; where the file has no absorbing matrices, against unfolded ones."""
    dims, tokens = p.dims, p.tokens
    heads, turn = dims.heads[layer], dims.rope
    key = dims.key_mla or dims.key_of(layer)
    rank = p.facts.integer("attention.kv_lora_rank")
    if p.has(layer, "attn_q.weight"):
        q = matmul(p.weight(layer, "attn_q.weight"), x)
    else:
        q = matmul(p.weight(layer, "attn_q_a.weight"), x)
        q = p.layer_norm(q, layer, "attn_q_a_norm")
        q = matmul(p.weight(layer, "attn_q_b.weight"), q)
    q = view(q, key, heads, tokens)
    both = matmul(p.weight(layer, "attn_kv_a_mqa.weight"), x)
    squeezed = view(both, rank, tokens, nb=both.nb)
    k_turn = view(both, turn, 1, tokens, nb=(both.nb[0], both.nb[1], both.nb[1], both.nb[1] * tokens))
    k_turn = rope(k_turn, p.positions)
    squeezed = p.layer_norm(squeezed, layer, "attn_kv_a_norm")
    if not dims.mla:
        return _unfolded(p, layer, q, k_turn, squeezed)
    still = view(q, key - turn, heads, tokens, nb=q.nb)
    q_turn = rope(view(q, turn, heads, tokens, nb=q.nb), p.positions)
    absorbed = matmul(p.weight(layer, "attn_k_b.weight"), permute(still, 0, 2, 1, 3))
    q = concatenate(permute(absorbed, 0, 2, 1, 3), q_turn, 0)
    squeezed = view(squeezed, rank, 1, tokens)
    k = concatenate(squeezed, k_turn, 0)
    if p.facts.number("attention.temperature_scale"):
        q = pointwise(q, p.temperatures)
    return compressed_attention(p, layer, q, k, squeezed, p.weight(layer, "attn_v_b.weight"))


def compressed_attention(p: ForwardPass, layer: int, q: Node, k: Node, v: Node, unfold: Node) -> Node:
    """Attention of all heads over one compressed vector per token, which is key and value at once."""
    load = p.load
    p.tape.run(q, v, k)
    size = k.ne[0]
    keys = p.cache("k", layer, load.cache_k, size, load.cells, load.streams)
    flat = view(k, size, p.tokens, nb=(k.nb[0], k.nb[2], k.nb[2] * p.tokens, k.nb[2] * p.tokens))
    target = view(keys, size, load.cells * load.streams) if load.streams > 1 else keys
    p.tape.run(copy_into(target, flat, p.cell_ids("k", False, p.tokens)))
    row = load.cache_k.bytes_of(size)
    nb = (load.cache_k.size, row, keys.nb[1], keys.nb[2])
    looked = view(keys, size, 1, load.cells, load.streams, nb=nb)
    values = view(looked, v.ne[0], 1, load.cells, load.streams, nb=nb)
    y = attend(p, q, looked, values, p.mask(False), unfold=unfold)
    return project(p, layer, y, "attn_output")


def _unfolded(p: ForwardPass, layer: int, q: Node, k_turn: Node, squeezed: Node) -> Node:
    """Files without the absorbing matrices: every head's keys and values are made and kept."""
    dims, tokens = p.dims, p.tokens
    heads, turn = dims.heads[layer], dims.rope
    key, value = dims.key_of(layer), dims.value_of(layer)
    kv = matmul(p.weight(layer, "attn_kv_b.weight"), squeezed)
    unit = kv.nb[0]
    nb = (unit, (key - turn + value) * unit, (key - turn + value) * unit * heads, kv.nb[3])
    k_still = view(kv, key - turn, heads, tokens, nb=nb)
    v = make_contiguous(view(kv, value, heads, tokens, nb=nb))
    q = rope(q, p.positions)
    k = concatenate(k_still, new_node(k_turn.elem, (turn, heads, tokens), k_turn), 0)
    return attention(p, layer, q, k, v)
