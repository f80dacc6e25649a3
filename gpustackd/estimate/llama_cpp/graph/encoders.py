"""Networks that read whole texts at once and answer with vectors: BERT and its kin. No cache."""

from __future__ import annotations

from gpustackd.estimate.llama_cpp.graph.blocks import (
    attention_without_cache,
    embed_tokens,
    keep_output_rows,
    pool,
    queries_keys_values,
)
from gpustackd.estimate.llama_cpp.graph.feed_forward import FUSED, GATED, PLAIN, dense, experts
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.tape import Node, get_rows, pointwise, rope, view

TURNED = frozenset({"nomic-bert", "nomic-bert-moe", "jina-bert-v3"})


def bert(p: ForwardPass) -> None:
    """BERT, Nomic and Jina: norms after each part."""
    name, host = p.dims.architecture, p.homes.host
    x = embed_tokens(p)
    if (types := p.other("token_types.weight", host)) is not None:
        x = pointwise(x, view(types, p.dims.embedding))
    if name == "bert" and (table := p.other("position_embd.weight", host)) is not None:
        x = pointwise(get_rows(table, p.positions), x)
    first = p.homes.layers[0]
    weight, bias = (p.other(f"token_embd_norm.{end}", first) for end in ("weight", "bias"))
    x = p.norm(x, weight, bias, layer=0, rms=False)
    for layer in p.order:
        x = _block(p, layer, x)
    x.kept = True
    p.tape.run(x)
    if p.load.embeddings:
        pool(p, x)


def _block(p: ForwardPass, layer: int, x: Node) -> Node:
    name = p.dims.architecture
    q, k, v = queries_keys_values(p, layer, x, p.dims.key)
    q, k = (_normed(p, layer, y, which) for y, which in ((q, "attn_q_norm"), (k, "attn_k_norm")))
    if name in TURNED:
        q, k = rope(q, p.positions), rope(k, p.positions)
    y = attention_without_cache(p, layer, q, k, v)
    y, x = keep_output_rows(p, layer, y, x)
    y = p.layer_norm(pointwise(y, x), layer, "attn_output_norm", rms=False)
    if p.has(layer, "attn_norm_2.weight"):
        y = p.layer_norm(pointwise(y, x), layer, "attn_norm_2", rms=False)
    middle = y
    if p.has(layer, "ffn_gate_inp.weight"):
        y = experts(p, layer, y, act=PLAIN)
    elif p.has(layer, "ffn_gate.weight"):
        y = dense(p, layer, y, GATED)
    else:
        wide = p.weight(layer, "ffn_up.weight").ne[1] != p.weight(layer, "ffn_down.weight").ne[0]
        y = dense(p, layer, y, FUSED if wide else PLAIN)
    y = pointwise(y, middle)
    return p.layer_norm(y, layer, "layer_output_norm", rms=False)


def _normed(p: ForwardPass, layer: int, x: Node, name: str) -> Node:
    if not p.has(layer, f"{name}.weight"):
        return x
    flat = view(x, x.ne[0] * x.ne[1], p.tokens)
    return view(p.layer_norm(flat, layer, name, rms=False), *x.ne)
