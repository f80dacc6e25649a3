"""Networks in which some layers attend and others carry a state: Jamba, Granite, Nemotron-H, LFM2,
Qwen3-Next."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import F32
from gpustackd.estimate.llama_cpp.graph.blocks import (
    attention,
    embed_tokens,
    keep_output_rows,
    logits,
    project,
)
from gpustackd.estimate.llama_cpp.graph.decoders import ending, feed_forward, self_attention
from gpustackd.estimate.llama_cpp.graph.feed_forward import (
    SQUARED,
    dense,
    experts,
    router_logits,
    weights_normed,
    weights_scaled,
)
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.recurrent import load_state, mamba2_layer, mamba_layer, state_cache
from gpustackd.estimate.llama_cpp.graph.styles import Style
from gpustackd.estimate.llama_cpp.graph.tape import (
    Node,
    concatenate,
    copy_into,
    make_contiguous,
    matmul,
    new_like,
    new_node,
    pointwise,
    rope,
    transpose,
    view,
)

_STYLES = {
    "jamba": Style(rotary=False, experts_normed=False),
    "granitehybrid": Style(logits_scaled=True),
    "lfm2": Style(),
    "lfm2moe": Style(),
    "qwen3next": Style(second_norm="post_attention_norm", late_rows=True, late_rows_normed=True),
    "qwen35": Style(second_norm="post_attention_norm", late_rows=True, late_rows_normed=True),
    "qwen35moe": Style(second_norm="post_attention_norm", late_rows=True, late_rows_normed=True),
}


def hybrid(p: ForwardPass) -> None:
    """Attention or a state, then a feed-forward layer."""
    name = p.dims.architecture
    style = _STYLES[name]
    x = embed_tokens(p, scaled=bool(p.facts.number("embedding_scale")))
    residual_scaled = bool(p.facts.number("residual_scale"))
    for layer in p.order:
        before = x
        y = p.layer_norm(x, layer, "attn_norm")
        if name.startswith("qwen3"):
            p.tape.run(y)
        y = _mixed(p, style, layer, y)
        if not style.late_rows:
            y, before = keep_output_rows(p, layer, y, before)
        if residual_scaled:
            y = pointwise(y)
        first, second = (before, y) if name in {"jamba", "lfm2", "lfm2moe"} else (y, before)
        middle = pointwise(first, second)
        y = feed_forward(p, style, layer, p.layer_norm(middle, layer, style.second_norm))
        if residual_scaled:
            y = pointwise(y)
        x = pointwise(middle, y) if name in {"jamba", "lfm2", "lfm2moe"} else pointwise(y, middle)
    if name.startswith("lfm2"):
        weight = p.other("token_embd_norm.weight", p.homes.output)
        logits(p, x, weight=weight)
    else:
        ending(p, style, x)


def _mixed(p: ForwardPass, style: Style, layer: int, x: Node) -> Node:
    """The part of a layer that looks at other tokens."""
    name = p.dims.architecture
    if not p.dims.recurrent[layer]:
        return (
            gated_attention(p, layer, x) if name.startswith("qwen3") else self_attention(p, style, layer, x)
        )
    if name == "jamba":
        return mamba_layer(p, layer, x)
    if name.startswith("lfm2"):
        return short_convolution(p, layer, x)
    if name.startswith("qwen3"):
        return delta_net(p, layer, x)
    return mamba2_layer(p, layer, x)


def gated_attention(p: ForwardPass, layer: int, x: Node) -> Node:
    """Attention whose result is gated by the other half of the queries."""
    dims, tokens = p.dims, p.tokens
    size, heads = dims.key_of(layer), dims.heads[layer]
    both = project(p, layer, x, "attn_q")
    both = view(both, 2 * size, heads, tokens)
    q, gate = (view(both, size, heads, tokens, nb=both.nb) for _ in range(2))
    k, v = (
        view(project(p, layer, x, name), size, dims.kv_heads[layer], tokens) for name in ("attn_k", "attn_v")
    )
    q = rope(p.layer_norm(q, layer, "attn_q_norm"), p.positions)
    k = rope(p.layer_norm(k, layer, "attn_k_norm"), p.positions)
    y = attention(p, layer, q, k, v, out=None)
    y = pointwise(y, pointwise(make_contiguous(gate, size * heads, tokens)))
    return project(p, layer, y, "attn_output")


def delta_net(p: ForwardPass, layer: int, x: Node) -> Node:
    """A gated delta rule over a state per head, in one fused step."""
    facts, seqs = p.facts, p.load.sequences
    steps = p.tokens // seqs
    inner, size = facts.integer("ssm.inner_size"), facts.integer("ssm.state_size")
    groups, heads = facts.integer("ssm.group_count"), facts.integer("ssm.time_step_rank")
    width = inner // heads
    mixed, z = _qkvz(p, layer, x, groups, heads, size, width)
    gate, beta = _gates(p, layer, x, groups, heads)
    conv_all = state_cache(p, layer, "r", p.dims.state_r)
    state_all = state_cache(p, layer, "s", p.dims.state_s)
    kernel = p.weight(layer, "ssm_conv1d.weight")
    channels = inner + 2 * groups * size
    conv = view(load_state(p, conv_all, p.dims.state_r), kernel.ne[0] - 1, channels, seqs)
    longer = concatenate(conv, transpose(mixed), 0)
    tail = view(longer, kernel.ne[0] - 1, channels, seqs, nb=longer.nb)
    p.tape.run(copy_into(view(conv_all, (kernel.ne[0] - 1) * channels, seqs), tail))
    state = view(load_state(p, state_all, p.dims.state_s), width, width, heads, seqs)
    y = pointwise(new_node(F32, (channels, steps, seqs), longer, kernel))
    unit = y.nb[0]
    q, k = (view(y, size, groups, steps, seqs, nb=(unit, size * unit, y.nb[1], y.nb[2])) for _ in range(2))
    v = view(y, width, heads, steps, seqs, nb=(unit, width * unit, y.nb[1], y.nb[2]))
    q, k = new_like(q), new_like(k)
    if groups != heads and p.dims.architecture == "qwen3next":
        q, k = (_repeated(n, size, groups, heads, steps, seqs) for n in (q, k))
    rows_of_state = width * seqs
    out = new_node(F32, (width * heads, steps * seqs + rows_of_state), q, k, v, gate, beta, state)
    p.tape.run(copy_into(view(state_all, p.dims.state_s, seqs), view(out, width, width, heads, seqs)))
    out = view(out, width, heads, steps, seqs)
    out = p.norm(out, p.maybe(layer, "ssm_norm.weight"), layer=layer)
    out = pointwise(out, pointwise(view(z, width, heads, steps, seqs)))
    out = project(p, layer, view(out, width * heads, steps, seqs), "ssm_out")
    return view(out, out.ne[0], steps * seqs)


def _qkvz(
    p: ForwardPass, layer: int, x: Node, groups: int, heads: int, size: int, width: int
) -> tuple[Node, Node]:
    """Queries, keys and values before the convolution, and the gate of the result."""
    seqs = p.load.sequences
    steps = p.tokens // seqs
    if p.has(layer, "attn_qkv.weight"):
        mixed = project(p, layer, x, "attn_qkv")
        return view(mixed, mixed.ne[0], steps, seqs), project(p, layer, x, "attn_gate")
    each = heads // groups
    all_in = project(p, layer, x, "ssm_in")
    all_in = view(all_in, 2 * size + 2 * width * each, groups, steps, seqs)
    q, k = (view(all_in, size, groups, steps, seqs, nb=all_in.nb) for _ in range(2))
    v, z = (view(all_in, width * each, groups, steps, seqs, nb=all_in.nb) for _ in range(2))
    z = make_contiguous(z)
    q, k, v = (make_contiguous(n, n.ne[0] * groups, steps, seqs) for n in (q, k, v))
    return concatenate(concatenate(q, k, 0), v, 0), z


def _gates(p: ForwardPass, layer: int, x: Node, groups: int, heads: int) -> tuple[Node, Node]:
    seqs = p.load.sequences
    steps = p.tokens // seqs
    if p.has(layer, "ssm_ba.weight"):
        both = project(p, layer, x, "ssm_ba")
        both = view(both, 2 * heads // groups, groups, steps, seqs)
        b, a = (view(both, heads // groups, groups, steps, seqs, nb=both.nb) for _ in range(2))
        beta = pointwise(make_contiguous(b))
        alpha = make_contiguous(a, heads, steps, seqs)
    else:
        beta = pointwise(view(project(p, layer, x, "ssm_beta"), 1, heads, steps, seqs))
        alpha = view(project(p, layer, x, "ssm_alpha"), heads, steps, seqs)
    bias = p.maybe(layer, "ssm_dt.bias") or p.weight(layer, "ssm_dt")
    gate = pointwise(pointwise(pointwise(alpha, bias)), p.weight(layer, "ssm_a"))
    return view(gate, 1, heads, steps, seqs), view(beta, 1, heads, steps, seqs)


def _repeated(x: Node, size: int, groups: int, heads: int, steps: int, seqs: int) -> Node:
    flat = view(x, size, 1, groups, steps * seqs)
    return view(new_node(F32, (size, heads // groups, groups, steps * seqs), flat), size, heads, steps, seqs)


def short_convolution(p: ForwardPass, layer: int, x: Node) -> Node:
    """A gated convolution over the last few tokens (LFM2)."""
    seqs = p.load.sequences
    steps = p.tokens // seqs
    kept, embedding = p.facts.integer("shortconv.l_cache") - 1, p.dims.embedding
    x = view(x, x.ne[0], steps, seqs)
    parts = project(p, layer, x, "shortconv.in_proj")
    third = parts.ne[0] // 3
    b, c, y = (view(parts, third, steps, seqs, nb=parts.nb) for _ in range(3))
    bx = transpose(pointwise(b, y))
    held = state_cache(p, layer, "r", p.dims.state_r)
    conv = view(load_state(p, held, p.dims.state_r), kept, embedding, seqs)
    longer = concatenate(conv, bx, 0)
    tail = view(longer, kept, embedding, seqs, nb=longer.nb)
    p.tape.run(copy_into(view(held, kept * embedding, seqs), tail))
    y = new_node(F32, (third, steps, seqs), longer, p.weight(layer, "shortconv.conv.weight"))
    y = project(p, layer, pointwise(c, y), "shortconv.out_proj")
    return view(y, y.ne[0], steps * seqs)


def nemotron_h(p: ForwardPass) -> None:
    """Nemotron-H: each layer is one thing only: a state, attention, or a feed-forward layer."""
    style = Style(rotary=False)
    x = embed_tokens(p)
    for layer in p.order:
        y = p.layer_norm(x, layer, "attn_norm")
        if p.dims.recurrent[layer]:
            y = mamba2_layer(p, layer, y)
        elif p.dims.cached[layer]:
            y = self_attention(p, style, layer, y)
        elif p.has(layer, "ffn_up_exps.weight"):
            y = _latent_experts(p, layer, y)
        else:
            y = dense(p, layer, y, SQUARED)
        x = pointwise(y, x)
    logits(p, x, late=True)


def _latent_experts(p: ForwardPass, layer: int, x: Node) -> Node:
    inside = (
        matmul(p.weight(layer, "ffn_latent_down.weight"), x) if p.has(layer, "ffn_latent_down.weight") else x
    )
    y = experts(
        p,
        layer,
        inside,
        act=SQUARED,
        gating="sigmoid",
        normed=weights_normed(p),
        scaled=weights_scaled(p),
        scores=router_logits(p, layer, x),
    )
    if p.has(layer, "ffn_latent_up.weight"):
        y = matmul(p.weight(layer, "ffn_latent_up.weight"), y)
    return pointwise(y, dense(p, layer, x, SQUARED, part="_shexp"))
