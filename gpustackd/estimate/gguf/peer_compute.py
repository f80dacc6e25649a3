"""The peer's rules for buffers of a pass through the last layer (estimate-gguf spec section 8.1). Bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpustackd.domain.gguf_facts import GgufTensor

_PRIMES = (17, 37, 67, 131, 257, 521, 1031, 2053, 4099, 8209, 16411, 32771, 65537, 131101, 262147, 524309)
"""Sizes of a hash table, each more than twice the one before."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Dimensions that the rules use. `last`: tensors of the last layer by the end of their name."""

    tokens: int
    cells: int
    embedding: int
    heads: int
    kv_heads: int
    key: int
    value: int
    experts: int
    used: int
    slots: int
    flash: bool
    conv_state: int
    state: int
    inner: int
    recurrent: bool
    last: Mapping[str, GgufTensor]

    def first_of(self, *names: str) -> int:
        """Rows' length of a tensor, added up over those that are there."""
        return sum(self.last[n].shape[0] for n in names if n in self.last)

    def last_of(self, *names: str) -> int:
        """The last dimension, added up."""
        return sum(self.last[n].shape[-1] for n in names if n in self.last)


def graph_footprint(tensors: int, layers: int) -> int:
    """What the host holds to describe the graph."""
    nodes = max(1024, 8 * tensors)
    table = next(p for p in _PRIMES if p >= 2 * nodes or p == _PRIMES[-1])
    graph = 32 + _padded(80 + 24 * nodes + 8 * table + 4 * -(-table // 32), 16)
    return 400 * nodes + graph + 4 * 1024**2 + 800 * (tensors + 1 + 3 * layers)


def input_bytes(size: Sizing, *, host: bool) -> int:
    """Tokens, embeddings, positions and mask; states in place of a mask."""
    t, e, s = size.tokens, size.embedding, size.slots
    if size.recurrent:
        shared = 4 * e * t + 4 * s + 4 * s * t
        return shared + 4 * t + 4 * s + 4 * t if host else shared
    shared = 4 * e * t + 4 * t + 4 * size.cells * t
    return shared + 8 * t if host else shared


def attention(size: Sizing, cache: int, *, partly: bool) -> int:
    """Attention of one layer, whose cache takes so much. `partly`: some layers stay in RAM."""
    t, e = size.tokens, size.embedding
    if size.recurrent:
        return _recurrent(size)
    found = 4 * t * size.first_of("attn_norm")
    if size.flash:
        weights = sum(size.last[n].size for n in ("attn_q", "attn_qkv", "attn_q_b") if n in size.last)
        return found + 2 * size.cells * t + weights + cache
    scores = 4 * size.cells * t * size.heads
    extra = cache if partly else 0
    if "attn_q" in size.last:
        found += 8 * t * size.last["attn_q"].shape[0] + scores + extra
    if "attn_qkv" in size.last:
        found += 8 * t * size.last["attn_qkv"].shape[0] + scores + extra + 12 * e**2
    if "attn_q_b" in size.last:
        found += 8 * t * size.last["attn_q_b"].shape[-1] + scores
    return found


def feed_forward(size: Sizing) -> int:
    """The part of a layer after its attention."""
    t, e = size.tokens, size.embedding
    found = 4 * t * size.last_of("attn_norm", "ffn_norm", "ffn_gate", "ffn_up")
    if size.experts:
        found += 4 * size.experts * e + 4 * size.experts * t + 4 * e * size.used * t
    return found


def _recurrent(size: Sizing) -> int:
    t, s, e = size.tokens, size.slots, size.embedding
    if "time_mix_w2" in size.last:
        mixing = 0
        for name, tensor in size.last.items():
            if name.startswith("time_mix_w2"):
                mixing += 4 * e * t * tensor.shape[-1]
            elif name.startswith("time_mix_output"):
                mixing += 4 * e * (t + size.state // max(e, 1) * s)
            elif name.startswith("time_mix"):
                mixing += 4 * t * tensor.shape[-1]
        norms = sum(x.shape[0] for n, x in size.last.items() if n.startswith("attn_norm"))
        return 4 * t * norms + mixing
    kernel = size.conv_state // max(size.inner, 1) + 1
    found = 4 * size.conv_state * s + 4 * t * size.last_of("attn_norm", "ssm_in")
    found += 4 * size.inner * (t + kernel * s) + 4 * t * size.last_of("ssm_dt")
    return found + 4 * (size.inner * t + size.state * s)


def _padded(number: int, to: int) -> int:
    return -(-number // to) * to
