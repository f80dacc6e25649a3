"""How many of the hand-picked GPUs one replica takes, where the row does not say."""

from __future__ import annotations

from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.registry import parallel_of
from gpustackd.errors import BadRow


def gpus_per_replica(spec: ModelSpec) -> int | None:
    """The figure to write, or None where there is nothing to fill in: no picked GPUs, or already stated.

    0 = fewer GPUs were picked than there are replicas; a caller should refuse instead of writing it.
    """
    selector = spec.gpu_selector
    if selector is None or not selector.gpu_ids or selector.gpus_per_replica:
        return None
    backend = spec.effective_backend
    if backend == "VoxBox":
        return 1
    base = len(selector.gpu_ids) // (spec.replicas or 1)
    if spec.skips_gpu_count_check:
        return base
    if spec.backend_parameters and (world := _world_size(spec)):
        return world
    return 1 << (base.bit_length() - 1) if base else 0


def _world_size(spec: ModelSpec) -> int | None:
    try:
        flags = parse_flags(spec.backend_parameters)
        return parallel_of(spec.effective_backend, flags).world
    except BadRow:
        return None  # the search names the flag at fault; filling in is no place to stop at it
