"""Picked GPUs that cannot be looked at, and what is in the way of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpustackd.domain.model_spec import GpuId
from gpustackd.domain.outcome import Reason
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.diagnostics.wording import some
from gpustackd.placement.selectors.base.picked_gpus import Selection

SHOWN = 8
TELLING = ("backend", "local_path")
"""Filters whose reasons say more than their names."""


def unreachable(context: PlacementContext, selection: Selection) -> list[Reason]:
    """Selected GPUs that cannot be looked at, and what is in the way of each."""
    fleet = context.fleet
    reasons: list[Reason] = []
    for w, gpus in selection.dropped.items():
        row = fleet.row(w)
        bits = int(context.bits[w])
        failing = [f.name for n, f in enumerate(context.filters) if bits >> n & 1]
        why = f"is {row.state}" if not fleet.ready[w] else f"fails {', '.join(failing)}"
        text = f"selected GPU{_s(gpus)} {_names(gpus)}: worker {row.name} {why}"
        reasons.append(picked_reason("worker_out", text, worker=row.name, state=row.state, failing=failing,
                               count=len(gpus)))  # fmt: skip
        for n, f in enumerate(context.filters):
            if bits >> n & 1 and f.name in TELLING:
                reasons.extend(f.reasons(fleet, np.array([w]), 0, 1))
    unusable = (
        ("absent", selection.absent, "unknown worker or GPU"),
        ("shut", selection.shut, "closed, over-committed, or with unknown memory"),
        ("wrong_type", selection.foreign, f"{context.demand.spec.effective_backend} does not run there"),
    )
    for code, gpus, why in unusable:
        if gpus:
            text = f"selected GPU{_s(gpus)} {_names(gpus)}: {why}"
            reasons.append(
                picked_reason(code, text, gpus=[gpu_label(g) for g in gpus[:SHOWN]], count=len(gpus))
            )
    return reasons


def gpu_label(gpu: GpuId) -> str:
    """`worker:type:index`, as people write it."""
    return f"{gpu.worker}:{gpu.type}:{gpu.index}"


def picked_reason(code: str, text: str, **params: Any) -> Reason:
    """A reason about GPUs that the user picked."""
    return Reason(f"gpu_selector.{code}", "gpu_selector", text, params)


def _names(gpus: Sequence[GpuId]) -> str:
    return some([gpu_label(g) for g in gpus], 4)


def _s(gpus: Sequence[GpuId]) -> str:
    return "s" if len(gpus) > 1 else ""
