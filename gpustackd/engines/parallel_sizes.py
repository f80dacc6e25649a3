"""Parallel sizes of an instance, whichever engine runs it: what estimates look at."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.engines import sglang, vllm
from gpustackd.engines.flags import BackendParameters
from gpustackd.engines.parallelism import positive


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel sizes of one engine; `world` None = not stated, free choice."""

    tp: int = 1
    pp: int = 1
    world: int | None = None


def parallel_of(backend: str, flags: BackendParameters) -> Parallel:
    """Sizes that estimates look at. Raises BadRow for a size that no engine takes."""
    if backend == "MindIE":
        return _mindie(flags)
    engine = {"vLLM": vllm, "SGLang": sglang}.get(backend)
    if engine is None:
        return Parallel()
    world = engine.world_size(flags)
    tp, pp = positive(flags, engine.TP), positive(flags, engine.PP)
    return Parallel(tp or 1, pp or 1, world.size if world else None)


def _mindie(flags: BackendParameters) -> Parallel:
    """The leading cases; what is not positive counts as unset."""

    def size(*names: str) -> int:
        return max(flags.integer(*names) or 0, 0)

    pp, tp = size("pipeline-parallel-size", "pp") or 1, size("tensor-parallel-size", "tp")
    dp, cp = size("data-parallel-size", "dp"), size("context-parallel-size", "cp")
    ep, etp = size("moe-expert-parallel-size", "moe-ep"), size("moe-tensor-parallel-size", "moe-tp")
    if pp > 1:
        return Parallel(tp or 1, pp, pp * (tp or 1))
    world = tp
    if dp > 1 or cp > 1:
        tp = tp or 1
        world = (dp if dp > 1 else cp) * tp
    if ep > 1:
        tp, world = tp or etp or 1, ep * (etp or 1)
    return Parallel(tp or 1, 1, world or None)
