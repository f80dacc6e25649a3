"""Networks that write text token by token: attention, then a feed-forward layer, over and over."""

from __future__ import annotations

from dataclasses import replace

from gpustackd.estimate.llama_cpp.graph.blocks import (
    attention,
    attention_without_cache,
    embed_tokens,
    keep_output_rows,
    logits,
    pool,
    project,
    queries_keys_values,
)
from gpustackd.estimate.llama_cpp.graph.feed_forward import (
    FUSED,
    GATED,
    PLAIN,
    dense,
    experts,
    router_logits,
    shared_expert,
)
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.styles import Style, style_of
from gpustackd.estimate.llama_cpp.graph.tape import Node, get_rows, pointwise, rope, view


def decoder(p: ForwardPass) -> None:
    """Llama and the many that follow it, each in its style."""
    style = style_of(p.facts)
    x = _beginning(p, style)
    for layer in p.order:
        x = block(p, style, layer, x)
    ending(p, style, x)


def _beginning(p: ForwardPass, style: Style) -> Node:
    x = embed_tokens(p, scaled=style.embedding_scaled)
    if style.places and (table := p.other("position_embd.weight", p.homes.host)) is not None:
        x = pointwise(x, get_rows(table, p.positions))
    if style.table_normed:
        first = p.homes.layers[0]
        weight, bias = (p.other(f"token_embd_norm.{end}", first) for end in ("weight", "bias"))
        x = p.norm(x, weight, bias, layer=0, rms=style.rms)
    return x


def ending(p: ForwardPass, style: Style, x: Node) -> None:
    """From the last layer to the scores."""
    capped = bool(p.facts.number("final_logit_softcapping"))
    if style.late_rows and not style.late_rows_normed:
        x.kept = True
        x = get_rows(x, p.output_ids)
    logits(
        p,
        x,
        capped=capped,
        scaled=style.logits_scaled,
        rms=style.rms,
        bare=style.bare_norms,
        late=style.late_rows_normed,
    )


def block(p: ForwardPass, style: Style, layer: int, x: Node) -> Node:
    """One layer: attention and feed-forward, one after the other or side by side."""
    before = x
    scores = router_logits(p, layer, x) if style.scores_first else None
    normed = _normed(p, style, layer, x, "attn_norm")
    source = normed
    if p.has(layer, "attn_norm_2.weight"):
        source = _normed(p, style, layer, x, "attn_norm_2")
    y = self_attention(p, style, layer, source)
    if style.parallel:
        y, before, normed = keep_output_rows(p, layer, y, before, normed)
        if style.own_norm:
            normed = _normed(p, style, layer, before, style.second_norm)
        parts = {"w": feed_forward(p, style, layer, normed), "a": y, "b": before}
        first, second, third = (parts[part] for part in style.parallel)
        return pointwise(pointwise(first, second), third)
    if not style.late_rows:
        y, before = keep_output_rows(p, layer, y, before)
        if scores is not None:
            (scores,) = keep_output_rows(p, layer, scores)
    if style.after_attention:
        y = _normed(p, style, layer, y, style.after_attention)
    if style.residual_scaled:
        y = pointwise(y)
    middle = pointwise(y, before)
    y = _normed(p, style, layer, middle, style.second_norm) if style.second_norm else middle
    y = feed_forward(p, style, layer, y, scores)
    if style.after_feed_forward:
        y = _normed(p, style, layer, y, style.after_feed_forward)
    if style.residual_scaled:
        y = pointwise(y)
    return pointwise(y, middle)


def self_attention(p: ForwardPass, style: Style, layer: int, x: Node) -> Node:
    """Queries, keys and values of a layer, prepared, and attention over them."""
    dims = p.dims
    if style.heads_after_norms:
        q, k, v = _normed_then_by_head(p, style, layer, x)
        style = replace(style, wide_norms=False)
    else:
        clamped = bool(p.facts.number("attention.clamp_kqv"))
        q, k, v = queries_keys_values(p, layer, x, dims.key_of(layer), clamped=clamped)
    rotary = style.rotary and not (style.rotary_in_windows_only and not dims.windowed[layer])
    if style.steps_without_rotary:
        rotary = (layer + 1) % style.steps_without_rotary != 0
    if not style.turned_then_normed and not style.heads_after_norms:
        q, k = (head_norm(p, style, layer, y, which) for y, which in ((q, "attn_q_norm"), (k, "attn_k_norm")))
    if rotary:
        factors = p.maybe_factors(layer)
        q, k = rope(q, p.positions, factors), rope(k, p.positions, factors)
    elif style.weigh_first:
        q = pointwise(q, p.temperatures)
    if style.turned_then_normed:
        q, k = (head_norm(p, style, layer, y, which) for y, which in ((q, "attn_q_norm"), (k, "attn_k_norm")))
    if style.scaled_queries:
        q = pointwise(q)
    if not dims.cached[layer]:
        return attention_without_cache(p, layer, q, k, v)
    sinks = p.maybe(layer, "attn_sinks.weight")
    return attention(p, layer, q, k, v, sinks=sinks, capped=style.capped)


def _normed_then_by_head(p: ForwardPass, style: Style, layer: int, x: Node) -> tuple[Node, Node, Node]:
    q, k, v = (project(p, layer, x, f"attn_{which}") for which in "qkv")
    q = p.layer_norm(q, layer, "attn_q_norm", rms=style.rms)
    k = p.layer_norm(k, layer, "attn_k_norm", rms=style.rms)
    size, heads, kv_heads = p.dims.key_of(layer), p.dims.heads[layer], p.dims.kv_heads[layer]
    return (
        view(q, size, heads, p.tokens),
        view(k, size, kv_heads, p.tokens),
        view(v, v.ne[0] // max(kv_heads, 1), kv_heads, p.tokens),
    )


def head_norm(p: ForwardPass, style: Style, layer: int, x: Node, name: str) -> Node:
    """Norm of queries or keys, per head or over all heads; nothing where the layer has no such tensor."""
    if not p.has(layer, f"{name}.weight"):
        return x
    if not style.wide_norms:
        return p.layer_norm(x, layer, name, rms=style.rms)
    flat = view(x, x.ne[0] * x.ne[1], p.tokens, nb=(x.nb[0], x.nb[2], x.nb[3], x.nb[3]))
    return view(p.layer_norm(flat, layer, name, rms=style.rms), *x.ne)


def feed_forward(p: ForwardPass, style: Style, layer: int, x: Node, scores: Node | None = None) -> Node:
    """The feed-forward part of a layer: one wide layer, or experts and what all tokens share."""
    facts = p.facts
    if not p.has(layer, "ffn_up_exps.weight") and not p.has(layer, "ffn_gate_up_exps.weight"):
        return dense(p, layer, x, dense_act(p, layer))
    stated = facts.value("expert_weights_norm")
    weight_scale = facts.number("expert_weights_scale")
    y = experts(
        p,
        layer,
        x,
        act=style.experts_act,
        gating=style.gating,
        normed=bool(stated) if style.experts_normed is None else style.experts_normed,
        scaled=weight_scale not in {0.0, 1.0},
        scores=scores,
        weigh_first=style.weigh_first,
    )
    if p.has(layer, "ffn_up_shexp.weight"):
        y = pointwise(y, shared_expert(p, layer, x, gated=True))
    return y


def dense_act(p: ForwardPass, layer: int) -> str:
    """Whether the feed-forward layer is gated by a second matrix, by half of the first, or not at all."""
    if p.has(layer, "ffn_gate.weight"):
        return GATED
    up, down = p.weight(layer, "ffn_up.weight"), p.weight(layer, "ffn_down.weight")
    return FUSED if up.ne[1] == 2 * down.ne[0] else PLAIN


def _normed(p: ForwardPass, style: Style, layer: int, x: Node, name: str) -> Node:
    if style.bare_norms:
        return p.norm(x, None, layer=layer, rms=style.rms)
    return p.layer_norm(x, layer, name, rms=style.rms)


def gemma(p: ForwardPass) -> None:
    """Gemma 2 and 3: text in, text out."""
    logits(p, gemma_layers(p), capped=bool(p.facts.number("final_logit_softcapping")))


def gemma_embedding(p: ForwardPass) -> None:
    """The same layers without a cache: text in, vectors out."""
    x = p.norm(gemma_layers(p), p.other("output_norm.weight", p.homes.output))
    x.kept = True
    p.tape.run(x)
    if p.load.embeddings:
        pool(p, x)


def gemma_layers(p: ForwardPass) -> Node:
    """Norms before and after each part, some layers with a window."""
    x = pointwise(embed_tokens(p))
    for layer in p.order:
        before = x
        y = p.layer_norm(x, layer, "attn_norm")
        q, k, v = queries_keys_values(p, layer, y, p.dims.key_of(layer))
        q = rope(p.layer_norm(q, layer, "attn_q_norm"), p.positions)
        k = rope(p.layer_norm(k, layer, "attn_k_norm"), p.positions)
        q = pointwise(q)
        if p.dims.cached[layer]:
            y = attention(p, layer, q, k, v, capped=p.dims.architecture == "gemma2")
        else:
            y = attention_without_cache(p, layer, q, k, v)
        y, before = keep_output_rows(p, layer, y, before)
        y = p.layer_norm(y, layer, "post_attention_norm")
        middle = pointwise(y, before)
        y = dense(p, layer, p.layer_norm(middle, layer, "ffn_norm"))
        y = p.norm(y, p.weight(layer, "post_ffw_norm.weight"))
        x = pointwise(y, middle)
    return x
