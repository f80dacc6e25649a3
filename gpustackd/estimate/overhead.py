"""What a GPU holds besides weights and cache: the step's activations, graphs, the runtime itself.

Both figures are approximations for people who look at an estimate; no placement depends on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.serving import ServingFlags
from gpustackd.estimate.claim import MIB

RUNTIME = 512 * MIB
"""Context, kernels and library workspaces of a process on a GPU."""
GRAPHS = 512 * MIB
"""Captured graphs of the usual batch sizes."""
COMMUNICATION = 256 * MIB
"""Buffers of collective operations, where several GPUs work together."""
LOGIT_BYTES = 12
"""Per logit of a sampled sequence: a 16-bit result, its float32 copy and a sorted or masked one."""


def activation(hyper: HyperParameters, config: Mapping[str, Any], flags: ServingFlags, tp: int = 1) -> int:
    """Peak bytes of one step on one GPU; 0 where the dimensions are not stated.

    Per token: residual and normed input, queries, keys and values, and the widest layer, the gate and up
    halves of the MLP (for experts: of all that a token goes to). 16-bit values. Then the logits of every
    sequence that is sampled.
    """
    hidden, heads = hyper.hidden_size, hyper.num_attention_heads
    if not hidden:
        return 0
    head_dim = hyper.head_dim or (hidden // heads if heads else hidden)
    attention = (heads or 1) * head_dim // tp + 2 * hyper.num_key_value_heads * head_dim
    wide = 2 * (hyper.intermediate_size or 4 * hidden) // tp
    if hyper.moe_num_experts and hyper.moe_intermediate_size:
        chosen = _chosen_experts(config)
        wide = chosen * (2 * hyper.moe_intermediate_size // tp + hidden)
    per_token = 2 * hidden + attention + wide
    return 2 * per_token * flags.batched_tokens + LOGIT_BYTES * flags.sequences * (hyper.vocab_size or 0)


def runtime_overhead(world: int, *, graphs: bool) -> int:
    """Bytes on each GPU of an instance on `world` GPUs."""
    return RUNTIME + (GRAPHS if graphs else 0) + (COMMUNICATION if world > 1 else 0)


def _chosen_experts(config: Mapping[str, Any]) -> int:
    nested = config.get("text_config")
    for part in (nested if isinstance(nested, Mapping) else {}, config):
        for key in ("num_experts_per_tok", "num_experts_per_token", "moe_topk"):
            raw = part.get(key)
            if isinstance(raw, int) and not isinstance(raw, bool) and 0 < raw <= 1024:
                return raw
    return 2
