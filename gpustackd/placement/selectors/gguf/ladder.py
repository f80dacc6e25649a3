"""The ladder for GGUF models: one GPU, several GPUs of one worker, several workers, partial offload, CPU.

Hand-picked GPUs have one step for all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpustackd.errors import BadRow
from gpustackd.placement.selectors.gguf.layer_split import LayerSplitter
from gpustackd.placement.selectors.gguf.manual import GgufManualSelector
from gpustackd.placement.selectors.gguf.multi_gpu import GgufMultiGpuSelector
from gpustackd.placement.selectors.gguf.partial_offload import PartialOffloadSelector
from gpustackd.placement.selectors.gguf.rpc import RpcSelector
from gpustackd.placement.selectors.gguf.single_gpu import GgufCpuSelector, GgufSingleGpuSelector

if TYPE_CHECKING:
    from gpustackd.placement.context.search import PlacementContext
    from gpustackd.placement.selectors.registry import EngineSelector


def gguf_ladder(search: PlacementContext) -> tuple[EngineSelector, ...]:
    """The steps for one demand, in the order of the spec; those that its flags rule out are left out."""
    asked = search.rules.gguf
    if asked is None:
        raise BadRow("source", "is no GGUF model")
    planner = LayerSplitter(asked)
    if search.demand.spec.gpu_ids:
        return (GgufManualSelector(search, planner),)
    steps: list[EngineSelector] = []
    if asked.whole and not asked.split:
        steps.append(GgufSingleGpuSelector(search, planner))
    if asked.whole and not asked.image:
        steps.append(GgufMultiGpuSelector(search, planner))
    if search.rules.distributed and not asked.image and asked.layers != 0:
        steps.append(RpcSelector(search, planner))
    if asked.partial:
        steps.append(PartialOffloadSelector(search, planner))
    if asked.host_only:
        steps.append(GgufCpuSelector(search, planner))
    return tuple(steps)
