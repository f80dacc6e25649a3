"""Layers with a state of constant size in place of a cache: Mamba and its successor."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import F32, I32
from gpustackd.estimate.llama_cpp.graph.blocks import (
    attention,
    embed_tokens,
    keep_output_rows,
    logits,
    project,
    queries_keys_values,
)
from gpustackd.estimate.llama_cpp.graph.feed_forward import dense
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.tape import (
    Node,
    concatenate,
    copy_into,
    get_rows,
    make_contiguous,
    new_like,
    new_node,
    pointwise,
    rope,
    transpose,
    view,
)


def mamba(p: ForwardPass) -> None:
    """Mamba of either generation: nothing but such layers."""
    x = embed_tokens(p)
    second = p.dims.architecture == "mamba2"
    for layer in p.order:
        before = x
        y = p.layer_norm(x, layer, "attn_norm")
        y = mamba2_layer(p, layer, y) if second else mamba_layer(p, layer, y)
        y, before = keep_output_rows(p, layer, y, before)
        x = pointwise(y, before)
    logits(p, x)


def state_cache(p: ForwardPass, layer: int, which: str, size: int) -> Node:
    """All states of one kind of a layer, one row per slot."""
    return p.cache(which, layer, F32, size, p.load.slots)


def state_ids(p: ForwardPass) -> tuple[Node, Node]:
    """Which slots the sequences of this pass use, and which others have to be copied."""
    ids = p.input("states", I32, p.load.slots)
    if "main" not in p.looks:
        p.looks["main"] = view(ids, p.load.sequences)
        p.looks["extra"] = view(ids, p.load.slots - p.load.sequences)
    return p.looks["main"], p.looks["extra"]


def load_state(p: ForwardPass, held: Node, size: int) -> Node:
    """The states of this pass's sequences, copied out; fresh ones are cleared on the way."""
    main, _ = state_ids(p)
    flat = clear_state(p, held, size)
    out = get_rows(flat, main)
    p.tape.run(out)
    store_state(p, held, flat, size)
    return out


def clear_state(p: ForwardPass, held: Node, size: int) -> Node:
    """All states as rows, after the first has been cleared."""
    flat = view(held, size, held.ne[1])
    first = view(flat, 0)
    p.tape.run(Node(first.elem, first.ne, (first,), 0, held, first.nb))
    return flat


def store_state(p: ForwardPass, held: Node, flat: Node, size: int) -> None:
    """States that no sequence of this pass uses move behind those that are used."""
    _, extra = state_ids(p)
    others = p.load.slots - p.load.sequences
    p.tape.run(copy_into(view(held, size, others), get_rows(flat, extra)))


def mamba_layer(p: ForwardPass, layer: int, x: Node) -> Node:
    """One layer of the first generation."""
    facts, seqs = p.facts, p.load.sequences
    steps = p.tokens // seqs
    inner, state = facts.integer("ssm.inner_size"), facts.integer("ssm.state_size")
    rank, kernel = facts.integer("ssm.time_step_rank"), facts.integer("ssm.conv_kernel")
    conv_all = state_cache(p, layer, "r", p.dims.state_r)
    state_all = state_cache(p, layer, "s", p.dims.state_s)
    conv = view(load_state(p, conv_all, p.dims.state_r), kernel - 1, inner, seqs)
    x = view(x, x.ne[0], steps, seqs)
    xz = project(p, layer, x, "ssm_in")
    x = view(xz, inner, steps, seqs, nb=xz.nb)
    z = view(xz, inner, steps, seqs, nb=xz.nb)
    wide = concatenate(conv, transpose(x), 0)
    tail = view(wide, kernel - 1, inner, seqs, nb=wide.nb)
    p.tape.run(copy_into(view(conv_all, (kernel - 1) * inner * seqs), tail))
    x = new_node(F32, (inner, steps, seqs), wide, p.weight(layer, "ssm_conv1d.weight"))
    x = pointwise(pointwise(x, p.weight(layer, "ssm_conv1d.bias")))
    mixed = project(p, layer, x, "ssm_x")
    dt = view(mixed, rank, steps, seqs, nb=mixed.nb)
    nb = (mixed.nb[0], state * mixed.nb[0], mixed.nb[1], mixed.nb[2])
    b, c = (view(mixed, state, 1, steps, seqs, nb=nb) for _ in range(2))
    if facts.value("ssm.dt_b_c_rms") or p.has(layer, "ssm_dt_norm.weight"):
        dt, b, c = (
            p.norm(y, p.maybe(layer, f"ssm_{name}_norm.weight"), layer=layer)
            for y, name in ((dt, "dt"), (b, "b"), (c, "c"))
        )
    dt = project(p, layer, dt, "ssm_dt")
    each = view(x, 1, inner, steps, seqs)
    y = _scanned(p, layer, state_all, p.dims.state_s, (state, 1, inner), each, dt, b, c)
    p.tape.run(copy_into(view(state_all, state * inner * seqs), view(y, state * inner * seqs)))
    out = view(y, inner, steps, seqs)
    out = pointwise(out, pointwise(x, p.weight(layer, "ssm_d")))
    out = new_like(make_contiguous(z), out)
    out = project(p, layer, out, "ssm_out")
    return view(out, out.ne[0], steps * seqs)


def mamba2_layer(p: ForwardPass, layer: int, x: Node) -> Node:
    """One layer of the second generation: heads, groups, one matrix for everything."""
    facts, seqs = p.facts, p.load.sequences
    steps = p.tokens // seqs
    inner, state = facts.integer("ssm.inner_size"), facts.integer("ssm.state_size")
    heads, groups = facts.integer("ssm.time_step_rank"), facts.integer("ssm.group_count")
    kernel = facts.integer("ssm.conv_kernel")
    wide = inner + 2 * groups * state
    conv_all = state_cache(p, layer, "r", p.dims.state_r)
    state_all = state_cache(p, layer, "s", p.dims.state_s)
    conv = view(load_state(p, conv_all, p.dims.state_r), kernel - 1, wide, seqs)
    all_in = project(p, layer, x, "ssm_in")
    all_in = view(all_in, all_in.ne[0], steps, seqs)
    unit = all_in.nb[0]
    z = view(all_in, inner // heads, heads, steps, seqs, nb=(unit, inner // heads * unit, *all_in.nb[1:3]))
    xbc = view(all_in, wide, steps, seqs, nb=all_in.nb)
    dt = view(all_in, heads, steps, seqs, nb=all_in.nb)
    longer = concatenate(conv, transpose(xbc), 0)
    tail = view(longer, kernel - 1, wide, seqs, nb=longer.nb)
    p.tape.run(copy_into(view(conv_all, (kernel - 1) * wide, seqs), tail))
    xbc = new_node(F32, (wide, steps, seqs), longer, p.weight(layer, "ssm_conv1d.weight"))
    if (bias := p.maybe(layer, "ssm_conv1d.bias")) is not None:
        xbc = pointwise(xbc, bias)
    xbc = pointwise(xbc)
    nb = (unit, inner // heads * unit, *xbc.nb[1:3])
    values = view(xbc, inner // heads, heads, steps, seqs, nb=nb)
    b, c = (view(xbc, state, groups, steps, seqs, nb=(unit, state * unit, *xbc.nb[1:3])) for _ in range(2))
    dt = pointwise(make_contiguous(dt), p.weight(layer, "ssm_dt.bias"))
    y = _scanned(p, layer, state_all, p.dims.state_s, (state, inner // heads, heads), values, dt, b, c)
    p.tape.run(copy_into(view(state_all, state * inner, seqs), view(y, state * inner, seqs)))
    out = view(y, inner // heads, heads, steps, seqs)
    out = pointwise(out, pointwise(values, p.weight(layer, "ssm_d")))
    out = new_like(make_contiguous(z), out)
    if (weight := p.maybe(layer, "ssm_norm.weight")) is not None:
        out = p.norm(view(out, inner // groups, groups, steps, seqs), weight, layer=layer)
    return project(p, layer, view(out, inner, steps * seqs), "ssm_out")


def _scanned(
    p: ForwardPass,
    layer: int,
    held: Node,
    size: int,
    each: tuple[int, int, int],
    x: Node,
    dt: Node,
    b: Node,
    c: Node,
) -> Node:
    """The scan over all steps: its results and the states at the end, in one piece."""
    main, _ = state_ids(p)
    flat = clear_state(p, held, size)
    state = view(flat, *each, held.ne[1])
    count = x.ne[0] * x.ne[1] * x.ne[2] * x.ne[3]
    total = count + each[0] * each[1] * each[2] * main.ne[0]
    y = new_node(F32, (total,), state, x, dt, p.weight(layer, "ssm_a"), b, c, main)
    p.tape.run(y)
    store_state(p, held, flat, size)
    return y


def falcon_h1(p: ForwardPass) -> None:
    """Falcon-H1: every layer has attention and a state, side by side."""
    x = embed_tokens(p)
    for layer in p.order:
        before = x
        y = p.layer_norm(x, layer, "attn_norm")
        q, k, v = queries_keys_values(p, layer, y, p.dims.key_of(layer))
        q, k = rope(q, p.positions), rope(k, p.positions)
        read = attention(p, layer, q, k, v)
        scanned = mamba2_layer(p, layer, p.layer_norm(x, layer, "attn_norm"))
        both = pointwise(read, scanned)
        middle = pointwise(both, before)
        _, middle = keep_output_rows(p, layer, both, middle)
        weight = p.maybe(layer, "ffn_norm") or p.maybe(layer, "ffn_norm.weight")
        y = dense(p, layer, p.norm(middle, weight, layer=layer))
        x = pointwise(y, middle)
    logits(p, x)
