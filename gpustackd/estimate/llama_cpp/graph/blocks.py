"""Parts that most networks share: embeddings, attention over a cache, feed-forward layers, the output."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import F16, F32, I32, ElementType
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.tape import (
    Node,
    cast,
    copy_into,
    flash_attention,
    get_rows,
    make_contiguous,
    matmul,
    new_node,
    permute,
    pointwise,
    transpose,
    view,
)


def embed_tokens(p: ForwardPass, *, scaled: bool = False) -> Node:
    """Rows of the token table; room for ready embeddings is held beside it."""
    tokens = p.input("tokens", I32, p.tokens)
    ready = p.input("embeddings", F32, p.dims.embedding, p.tokens)
    x = get_rows(p.table, tokens)
    p.tape.run(x, ready)
    if scaled:
        x = pointwise(x)
    p.tape.run(x)
    return x


def project(p: ForwardPass, layer: int, x: Node, name: str) -> Node:
    """Product with a weight of a layer; its scale and its bias, where it has them."""
    x = matmul(p.weight(layer, f"{name}.weight"), x)
    if (scale := p.maybe(layer, f"{name}.scale")) is not None:
        x = pointwise(x, scale)
    if (bias := p.maybe(layer, f"{name}.bias")) is not None:
        x = pointwise(x, bias)
    return x


def queries_keys_values(
    p: ForwardPass, layer: int, x: Node, size: int, *, clamped: bool = False
) -> tuple[Node, Node, Node]:
    """Queries, keys and values by head, from one fused matrix or three."""
    heads, kv_heads, tokens = p.dims.heads[layer], p.dims.kv_heads[layer], p.tokens
    if p.has(layer, "attn_qkv.weight"):
        x = project(p, layer, x, "attn_qkv")
        if clamped:
            x = pointwise(x)
        step = size * x.elem.size
        nb = (x.elem.size, step, x.nb[1], x.nb[1] * tokens)
        return (
            view(x, size, heads, tokens, nb=nb),
            view(x, size, kv_heads, tokens, nb=nb),
            view(x, size, kv_heads, tokens, nb=nb),
        )
    found = []
    for name, count in (("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)):
        y = project(p, layer, x, name)
        if clamped:
            y = pointwise(y)
        found.append((y, count))
    q, k, v = (view(y, y.ne[0] // count if count else size, count, tokens) for y, count in found)
    return q, k, v


def rotation(p: ForwardPass, which: str, elem: ElementType, windowed: bool) -> Node | None:
    """The matrix that spreads outliers before keys or values are quantised; None where they are not."""
    if not elem.quantised:
        return None
    dims = p.dims
    of = dims.key_of if which == "k" else dims.value_of
    sizes = {of(i) for i in range(dims.all_layers) if dims.cached[i] and dims.windowed[i] == windowed}
    plain = dims.key if which == "k" else dims.value
    if len(sizes) != 1 or plain % 64:
        return None
    side = 64
    if which == "k":
        (size,) = sizes
        while size % (2 * side) == 0:
            side *= 2
    return p.input(f"{which} rotation {windowed}", F32, side, side)


def rotate(x: Node, matrix: Node | None) -> Node:
    """Multiplied by a rotation matrix, in pieces of its side."""
    if matrix is None:
        return x
    side = matrix.ne[0]
    count = x.ne[0] * x.ne[1] * x.ne[2] * x.ne[3] // side
    flat = view(x, side, count) if x.contiguous else make_contiguous(x, side, count)
    return view(matmul(matrix, flat), *x.ne)


def store_in_cache(p: ForwardPass, layer: int, k: Node | None, v: Node | None) -> tuple[Node, Node]:
    """Write keys and values into the cache of a layer; what attention reads of it."""
    load, dims = p.load, p.dims
    windowed = dims.windowed[layer]
    cells = load.window_cells if windowed else load.cells
    heads, key, value = dims.kv_heads[layer], dims.key_of(layer), dims.value_of(layer)
    streams = load.streams
    keys = p.cache("k", layer, load.cache_k, key * heads, cells, streams)
    if k is not None:
        flat = view(k, key * heads, p.tokens, nb=(k.nb[0], k.nb[2], k.nb[2] * p.tokens, k.nb[2] * p.tokens))
        target = view(keys, key * heads, cells * streams) if streams > 1 else keys
        p.tape.run(copy_into(target, flat, p.cell_ids("k", windowed, p.tokens)))
    wide = value * heads if load.flash else dims.widest_value
    values = p.cache("v", layer, load.cache_v, wide, cells, streams)
    if v is not None:
        _write_values(p, values, v, value * heads, wide, windowed)
    row = load.cache_k.bytes_of(key)
    looked = view(keys, key, heads, cells, streams, nb=(load.cache_k.size, row, keys.nb[1], keys.nb[2]))
    if load.flash:
        row = load.cache_v.bytes_of(value)
        nb = (load.cache_v.size, row, values.nb[1], values.nb[2])
        return looked, view(values, value, heads, cells, streams, nb=nb)
    row = load.cache_v.bytes_of(cells)
    nb = (load.cache_v.size, row * value, row, row * wide)
    return looked, view(values, cells, heads, value, streams, nb=nb)


def _write_values(p: ForwardPass, values: Node, v: Node, size: int, wide: int, windowed: bool) -> None:
    load = p.load
    if load.flash:
        flat = view(v, size, p.tokens, nb=(v.nb[0], v.nb[2], v.nb[2] * p.tokens, v.nb[2] * p.tokens))
        target = view(values, size, values.ne[1] * load.streams) if load.streams > 1 else values
        p.tape.run(copy_into(target, flat, p.cell_ids("v", windowed, p.tokens)))
        return
    # without the fused kernel values lie transposed, and every element has a place of its own
    together = v.nb[2] == size * v.elem.size
    flat = view(v, size, p.tokens) if together else make_contiguous(v, size, p.tokens)
    if size < wide:
        flat = new_node(flat.elem, (wide, p.tokens), flat)
    each = view(flat, 1, wide * p.tokens)
    target = view(values, 1, values.ne[0] * values.ne[1] * load.streams)
    p.tape.run(copy_into(target, each, p.cell_ids("v", windowed, p.tokens * p.dims.widest_value)))


def attend(
    p: ForwardPass,
    q: Node,
    k: Node,
    v: Node,
    mask: Node,
    *,
    sinks: Node | None = None,
    unfold: Node | None = None,
    bias: Node | None = None,
    capped: bool = False,
) -> Node:
    """Attention itself. `unfold`: the matrix that turns compressed values into real ones (MLA)."""
    load = p.load
    v_turned = v.nb[1] > v.nb[2]
    streams = k.ne[3]
    q = view(q, q.ne[0], q.ne[1], q.ne[2] // streams, streams, nb=(*q.nb[:3], q.nb[3] // streams))
    q, k, v = (permute(x, 0, 2, 1, 3) for x in (q, k, v))
    if load.flash and bias is None:
        if v_turned:
            v = transpose(v)
        if k.elem is F32:
            k = cast(k, F16)
        if v.elem is F32:
            v = cast(v, F16)
        x = flash_attention(q, k, v, mask, sinks)
        if unfold is not None:
            x = permute(matmul(unfold, permute(x, 0, 2, 1, 3)), 0, 2, 1, 3)
            x = make_contiguous(x)
        x = view(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
    else:
        scores = matmul(k, q)
        if capped:
            scores = pointwise(pointwise(pointwise(scores)))
        if bias is not None:
            scores = pointwise(scores, bias)
        scores = pointwise(scores, mask) if sinks is None else pointwise(scores, mask, sinks)
        if not v_turned:
            v = make_contiguous(transpose(v))
        x = matmul(v, scores)
        if unfold is not None:
            x = matmul(unfold, x)
        x = permute(x, 0, 2, 1, 3)
        x = make_contiguous(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
        if p.homes.cache_on_host:
            x.pin = p.homes.host  # everything between the cache and here runs where the cache is
    p.tape.run(x)
    return x


def attention(
    p: ForwardPass,
    layer: int,
    q: Node,
    k: Node | None,
    v: Node | None,
    *,
    sinks: Node | None = None,
    capped: bool = False,
    out: str | None = "attn_output",
) -> Node:
    """Attention over the cache of a layer, and its output projection."""
    load, windowed = p.load, p.dims.windowed[layer]
    k_matrix = rotation(p, "k", load.cache_k, windowed)
    v_matrix = rotation(p, "v", load.cache_v, windowed)
    q = rotate(q, k_matrix)
    k = rotate(k, k_matrix) if k is not None else None
    v = rotate(v, v_matrix) if v is not None else None
    p.tape.run(q)
    if any(p.dims.windowed):
        p.tape.run(*(x for x in (k, v) if x is not None))
    else:
        p.tape.run(*(x for x in (v, k) if x is not None))
    keys, values = store_in_cache(p, layer, k, v)
    x = attend(p, q, keys, values, p.mask(windowed), sinks=sinks, capped=capped)
    x = rotate(x, v_matrix)
    return project(p, layer, x, out) if out is not None else x


def attention_without_cache(
    p: ForwardPass, layer: int, q: Node, k: Node, v: Node, out: str = "attn_output"
) -> Node:
    """Attention of all tokens of the batch to each other."""
    p.tape.run(q, k, v)
    elem = F16 if p.load.flash else F32
    mask = p.input(f"mask {p.dims.windowed[layer]}", elem, p.tokens, p.tokens)
    x = attend(p, q, k, v, mask)
    return project(p, layer, x, out) if p.has(layer, f"{out}.weight") else x


def keep_output_rows(p: ForwardPass, layer: int, *xs: Node) -> tuple[Node, ...]:
    """In the last layer only the rows whose output is asked for go on."""
    if layer != p.last:
        return xs
    return tuple(get_rows(x, p.output_ids) for x in xs)


def logits(
    p: ForwardPass,
    x: Node,
    *,
    capped: bool = False,
    scaled: bool = False,
    rms: bool = True,
    bare: bool = False,
    late: bool = False,
    weight: Node | None = None,
) -> None:
    """The last norm and the scores of all tokens of the vocabulary, which the host reads. `late`: rows are
    picked after the norm."""
    home = p.homes.output
    if not bare:
        weight = weight or p.other("output_norm.weight", home)
    x = p.norm(x, weight, None if bare else p.other("output_norm.bias", home), rms=rms)
    if late:
        x.kept = True
        x = get_rows(x, p.output_ids)
    states = x
    x = matmul(p.head, x)
    if (shift := p.other("output.bias", home)) is not None:
        x = pointwise(x, shift)
    if scaled:
        x = pointwise(x)
    if capped:
        x = pointwise(pointwise(pointwise(x)))
    x.kept = True
    states.kept = True
    p.tape.run(x)
    if p.load.embeddings:
        pool(p, states)


def pool(p: ForwardPass, x: Node) -> None:
    """One vector per sequence, as the header asks for it."""
    kind = p.facts.integer("pooling_type")
    if kind == 1:  # the mean
        weights = p.input("means", F32, p.tokens, p.load.sequences)
        x = matmul(make_contiguous(transpose(x)), weights)
    elif kind in {2, 3, 4}:
        x = get_rows(x, p.input("rows of sequences", I32, p.load.sequences))
        if kind == 4:
            x = _ranked(p, x)
    x.kept = True
    p.tape.run(x)


def _ranked(p: ForwardPass, x: Node) -> Node:
    for name, act in (("cls", True), ("cls.output", False)):
        weight = p.other(f"{name}.weight", p.homes.output)
        if weight is None:
            continue
        x = matmul(weight, x)
        if (bias := p.other(f"{name}.bias", p.homes.output)) is not None:
            x = pointwise(x, bias)
        if act:
            x = pointwise(x)
    if p.facts.architecture in {"qwen3", "qwen3vl"}:
        x = pointwise(x)
    return x
