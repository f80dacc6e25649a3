"""How many GPUs an engine's own flags ask for: the product of its parallel sizes."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.engines.flags import BackendParameters
from gpustackd.errors import BadRow

TP = ("tensor-parallel-size", "tp")
SGLANG_TP = ("tp-size", "tensor-parallel-size", "tp")


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel sizes of one engine; `world` None = not stated, free choice."""

    tp: int = 1
    pp: int = 1
    world: int | None = None


def parallel_of(backend: str, flags: BackendParameters) -> Parallel:
    """Sizes that estimates look at (selectors spec 9.1, 10.1). Raise BadRow for a size below 1."""
    if backend == "vLLM":
        return _vllm(flags)
    if backend == "SGLang":
        return _sglang(flags)
    if backend == "MindIE":
        return _mindie(flags)
    return Parallel()


def _vllm(flags: BackendParameters) -> Parallel:
    tp = _size(flags, *TP)
    pp = _size(flags, "pipeline-parallel-size", "pp")
    pcp = _size(flags, "prefill-context-parallel-size", "pcp")
    dp = _size(flags, "data-parallel-size", "dp")
    if flags.flag("data-parallel-hybrid-lb"):
        dp = _size(flags, "data-parallel-size-local", "dpl")
        if dp is None:
            return Parallel(tp or 1, pp or 1)
    return Parallel(tp or 1, pp or 1, _product(tp, pp, pcp, dp))


def _sglang(flags: BackendParameters) -> Parallel:
    tp = _size(flags, *SGLANG_TP)
    pp = _size(flags, "pp-size", "pipeline-parallel-size")
    dp = None if flags.flag("enable-dp-attention") else _size(flags, "dp-size", "data-parallel-size", "dp")
    return Parallel(tp or 1, pp or 1, _product(tp, pp, dp))


def _mindie(flags: BackendParameters) -> Parallel:
    """The leading cases of the MindIE spec section 3; what is not positive counts as unset."""

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


def _size(flags: BackendParameters, *names: str) -> int | None:
    value = flags.integer(*names)
    if value is not None and not 0 < value <= 1_000_000:
        raise BadRow("backend_parameters", f"--{names[0]} is {value}; it must be at least 1")
    return value


def _product(*sizes: int | None) -> int | None:
    stated = [s for s in sizes if s is not None]
    if not stated:
        return None
    product = 1
    for s in stated:
        product *= s
    return product
