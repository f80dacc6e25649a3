"""Says in the record of a candidate how many layers it holds, and what keeps the next one out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.diagnostics.wording import gib
from gpustackd.placement.rules.resource_rules import GgufRules
from gpustackd.placement.selectors.gguf.layer_split import LayerSplitter


def with_limit(fleet: Fleet, asked: GgufRules, splitter: LayerSplitter, found: Candidate) -> Candidate:
    """The choice with its record saying how many layers it holds, and what keeps the next one out."""
    offload = found.allocations[0].offload
    if offload is None or not found.also:
        return found
    first = dict(found.also[0]) | {"offload_layers": offload.layers, "total_layers": offload.total}
    if offload.layers < offload.total and asked.layers is None:
        rows = np.array([s.position for s in found.allocations])
        left = fleet.free_vram(rows)
        spare = [
            int(left[n, slot]) - claim
            for n, allocation in enumerate(found.allocations)
            for slot, claim in zip(allocation.slots, allocation.claims, strict=True)
        ]
        layers = splitter.layers
        at = offload.total - offload.layers
        need = layers.held(at - 1, at) if at else 0
        first["limit"] = (
            f"{offload.layers} of {offload.total} layers on GPUs: the next one takes {gib(need)}, "
            f"and no more than {gib(max(spare))} is left on any of them"
        )
    return replace(found, also=(first, *found.also[1:]))
