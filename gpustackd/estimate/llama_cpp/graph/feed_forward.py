"""Feed-forward layers: one wide layer for all tokens, or the best few of many experts for each."""

from __future__ import annotations

from gpustackd.domain.gguf_facts import F32
from gpustackd.estimate.llama_cpp.graph.blocks import project
from gpustackd.estimate.llama_cpp.graph.forward_pass import ForwardPass
from gpustackd.estimate.llama_cpp.graph.tape import (
    Node,
    copy_into,
    get_rows,
    make_contiguous,
    matmul,
    matmul_by_id,
    new_like,
    new_node,
    pointwise,
    sum_rows,
    top_k,
    view,
)

GATED = "gated"
"""Two products, one gates the other."""
FUSED = "fused"
"""One product of double width, one half gates the other."""
PLAIN = "plain"
"""One product and an activation."""
SQUARED = "squared"
"""A rectified one, squared."""


def dense(p: ForwardPass, layer: int, x: Node, act: str = GATED, *, part: str = "") -> Node:
    """The feed-forward layer; `part` is the end of the tensor names (`_shexp` for the experts that all
    share)."""
    up = project(p, layer, x, f"ffn_up{part}")
    if act == GATED and p.has(layer, f"ffn_gate{part}.weight"):
        gate = project(p, layer, x, f"ffn_gate{part}")
        y = new_like(gate, up)
    elif act == FUSED:
        y = new_node(F32, (up.ne[0] // 2, *up.ne[1:]), up)
    else:
        y = pointwise(up)
        if act == SQUARED:
            y = pointwise(y)
    return project(p, layer, y, f"ffn_down{part}")


def experts(
    p: ForwardPass,
    layer: int,
    x: Node,
    *,
    act: str = GATED,
    gating: str = "softmax",
    normed: bool = False,
    scaled: bool = False,
    scores: Node | None = None,
    weigh_first: bool = False,
) -> Node:
    """The chosen experts of every token, weighed and added. `gating`: softmax, sigmoid, or `late` for a
    softmax over the chosen ones only. `normed`: the weights add up to 1; `scaled`: they are multiplied."""
    facts, tokens, embedding = p.facts, x.ne[1], x.ne[0]
    count = facts.integer("expert_count")
    used = facts.per_layer("expert_used_count", p.dims.all_layers)[layer]
    logits = router_logits(p, layer, x) if scores is None else scores
    probabilities = logits if gating == "late" else pointwise(logits)
    selection = probabilities
    if (bias := p.maybe(layer, "exp_probs_b.bias")) is not None:
        selection = pointwise(probabilities, bias)
    if weigh_first:
        selection = logits
    groups = facts.integer("expert_group_count")
    if groups > 1:
        selection = _grouped(p, selection, count, groups, facts.integer("expert_group_used_count"))
    chosen = top_k(selection, used)
    weights = get_rows(view(probabilities, 1, count, tokens), chosen)
    if gating == "late":
        weights = view(pointwise(view(weights, used, tokens)), 1, used, tokens)
    if normed:
        flat = view(weights, used, tokens)
        weights = view(pointwise(flat, pointwise(sum_rows(flat))), 1, used, tokens)
    if scaled:
        weights = pointwise(weights)
    p.tape.run(weights)
    x = view(x, embedding, 1, tokens)
    if weigh_first:
        x = pointwise(new_node(F32, (embedding, used, tokens), x), weights)
    x = _through(p, layer, x, chosen, act)
    if not weigh_first:
        x = pointwise(x, weights)
    p.tape.run(x)
    return _added(p, x, embedding, tokens, used)


def weights_normed(p: ForwardPass) -> bool:
    """Whether the header says that the weights of the chosen experts add up to 1."""
    return bool(p.facts.value("expert_weights_norm"))


def weights_scaled(p: ForwardPass) -> bool:
    """Whether the header gives a factor for the weights of experts."""
    return p.facts.number("expert_weights_scale") not in {0.0, 1.0}


def router_logits(p: ForwardPass, layer: int, x: Node) -> Node:
    """How well each expert suits each token."""
    return project(p, layer, x, "ffn_gate_inp")


def shared_expert(p: ForwardPass, layer: int, x: Node, *, gated: bool = False, act: str = GATED) -> Node:
    """The experts that all tokens pass; `gated` by a number per token."""
    y = dense(p, layer, x, act, part="_shexp")
    if gated and p.has(layer, "ffn_gate_inp_shexp.weight"):
        gate = matmul(p.weight(layer, "ffn_gate_inp_shexp.weight"), x)
        act_of = pointwise(gate)
        # qwen2moe makes its sigmoid of two steps
        gate = pointwise(act_of, gate) if p.dims.architecture == "qwen2moe" else act_of
        y = pointwise(y, gate)
    return y


def _through(p: ForwardPass, layer: int, x: Node, chosen: Node, act: str) -> Node:
    def expert(name: str, y: Node) -> Node:
        y = matmul_by_id(p.weight(layer, f"{name}.weight"), y, chosen)
        if (scale := p.maybe(layer, f"{name}.scale")) is not None:
            spread = new_node(F32, (1, scale.ne[0], p.tokens), view(scale, 1, scale.ne[0]))
            y = pointwise(y, get_rows(spread, chosen))
        if (bias := p.maybe(layer, f"{name}.bias")) is not None:
            y = pointwise(y, bias, chosen)
        return y

    if p.has(layer, "ffn_gate_up_exps.weight"):
        both = expert("ffn_gate_up_exps", x)
        half = both.ne[0] // 2
        gate, up = (view(both, half, both.ne[1], both.ne[2], nb=both.nb) for _ in range(2))
        y = new_node(F32, gate.ne, gate, up)
    else:
        up = expert("ffn_up_exps", x)
        if act == GATED and p.has(layer, "ffn_gate_exps.weight"):
            y = new_node(F32, up.ne, expert("ffn_gate_exps", x), up)
        else:
            y = pointwise(up)
            if act == SQUARED:
                y = pointwise(y)
    return expert("ffn_down_exps", y)


def _added(p: ForwardPass, x: Node, embedding: int, tokens: int, used: int) -> Node:
    """The sum over the experts of each token, one after the other."""
    nb = (x.nb[0], x.nb[2], x.nb[2] * tokens, x.nb[2] * tokens)
    each = [view(x, embedding, tokens, nb=nb) for _ in range(used)]
    p.tape.run(*each)
    total = each[0]
    for y in each[1:]:
        total = pointwise(total, y)
        p.tape.run(total)
    return make_contiguous(total) if used == 1 else total


def _grouped(p: ForwardPass, scores: Node, count: int, groups: int, used: int) -> Node:
    """Scores with only the best groups of experts left (DeepSeek-V3)."""
    tokens = scores.ne[1]
    grouped = view(scores, count // groups, groups, tokens)
    two = top_k(grouped, 2)
    tops = get_rows(view(grouped, 1, *grouped.ne[:3]), two)
    sums = sum_rows(view(tops, tops.ne[1], tops.ne[2], tops.ne[3]))
    order = top_k(view(sums, sums.ne[1], sums.ne[2]), used)
    kept = get_rows(grouped, order)
    masked = copy_into(pointwise(grouped), kept, order)
    return view(masked, count, tokens)
