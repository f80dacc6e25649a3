"""What the flags of a model say, by the name of its backend."""

from __future__ import annotations

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines import sglang, vllm
from gpustackd.engines.flags import BackendParameters
from gpustackd.engines.mindie import flags as mindie_flags
from gpustackd.engines.mindie import parallelism as mindie_parallelism
from gpustackd.engines.parallelism import Parallel, positive
from gpustackd.engines.serving import ServingFlags

_DIVIDING = {"vLLM": vllm, "SGLang": sglang}
_SERVING = {
    "SGLang": sglang.serving_flags,
    "MindIE": mindie_flags.serving_flags,
}


def parallel_of(backend: str, flags: BackendParameters) -> Parallel:
    """Sizes that estimates divide a model by: one GPU where the backend has no sizes that are known here.

    Raise BadRow for a size that the engine does not take.
    """
    if backend == "MindIE":
        return mindie_parallelism.parallel(flags)
    engine = _DIVIDING.get(backend)
    if engine is None:
        return Parallel()
    world = engine.world_size(flags)
    tp, pp = positive(flags, engine.TP), positive(flags, engine.PP)
    return Parallel(tp or 1, pp or 1, world.size if world else None)


def serving_flags(backend: str, flags: BackendParameters, hyper: HyperParameters) -> ServingFlags:
    """Lengths, batch and cache type; a backend that is not known is read as vLLM.

    Raise BadRow for a value out of the limits that MindIE sets; what vLLM or SGLang could not read counts as
    absent, and is refused by the search.
    """
    return _SERVING.get(backend, vllm.serving_flags)(flags, hyper)
