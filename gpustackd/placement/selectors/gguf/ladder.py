"""The ladder for GGUF models: one GPU, several GPUs of one worker, several workers, partial offload, CPU.

Picked GPUs have one selector for all of it.
"""

from __future__ import annotations

from gpustackd.errors import BadRow
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.selectors.base.selector import Ladder, Selector, diagnose_each
from gpustackd.placement.selectors.gguf.diagnostics import diagnose
from gpustackd.placement.selectors.gguf.layer_split import LayerSplitter
from gpustackd.placement.selectors.gguf.manual import GgufManualSelector
from gpustackd.placement.selectors.gguf.multi_gpu import GgufMultiGpuSelector
from gpustackd.placement.selectors.gguf.partial_offload import PartialOffloadSelector
from gpustackd.placement.selectors.gguf.rpc import RpcSelector
from gpustackd.placement.selectors.gguf.single_gpu import GgufCpuSelector, GgufSingleGpuSelector


def gguf_ladder(context: PlacementContext, ranker: Ranker) -> Ladder:
    """The selectors for one demand; those that its flags rule out are left out. Raises BadRow."""
    rules = context.rules
    asked = rules.gguf
    if asked is None:
        raise BadRow("source", "is no GGUF model")
    splitter = LayerSplitter(asked)
    if context.demand.spec.gpu_ids:
        return _ladder(context, (GgufManualSelector(context, ranker, splitter),))
    selectors: list[Selector] = []
    if asked.whole and not asked.split:
        selectors.append(GgufSingleGpuSelector(context, ranker, splitter))
    if asked.whole and not asked.image:
        selectors.append(GgufMultiGpuSelector(context, ranker, splitter))
    if rules.distributed and not asked.image and asked.layers != 0:
        selectors.append(RpcSelector(context, ranker, splitter))
    if asked.partial:
        selectors.append(PartialOffloadSelector(context, ranker, splitter))
    if asked.host_only:
        selectors.append(GgufCpuSelector(context, ranker, splitter))
    return _ladder(context, tuple(selectors))


def _ladder(context: PlacementContext, selectors: tuple[Selector, ...]) -> Ladder:
    return Ladder("gguf", selectors, diagnose_each(context, selectors, diagnose))
