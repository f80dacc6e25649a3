"""Which selectors look for a place, by engine and by what the model asks, and in which order."""

from __future__ import annotations

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Cure
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.selectors.ascend import diagnostics as ascend_diagnostics
from gpustackd.placement.selectors.ascend.search import npu_ladder
from gpustackd.placement.selectors.base.selector import Diagnosis, Ladder, Selector, diagnose_each
from gpustackd.placement.selectors.generic.diagnostics import shortfall
from gpustackd.placement.selectors.generic.multi_worker import MultiWorkerSelector
from gpustackd.placement.selectors.generic.single_worker import (
    CpuSelector,
    MultiGpuSelector,
    SingleGpuSelector,
)
from gpustackd.placement.selectors.gguf.ladder import gguf_ladder
from gpustackd.placement.selectors.manual import diagnostics as manual_diagnostics
from gpustackd.placement.selectors.manual.search import ManualSelector
from gpustackd.placement.selectors.pool import diagnostics as pool_diagnostics
from gpustackd.placement.selectors.pool.search import PoolSelector


def ladder(context: PlacementContext, ranker: Ranker) -> Ladder:
    """The selectors for one demand: the first that finds a place wins. Raises BadRow."""
    engine = context.rules.engine
    if engine is Engine.GGUF:
        by_layers = gguf_ladder(context, ranker)
        # flags may rule out every selector of layers; such a model is placed as one piece
        return by_layers if by_layers.selectors else _generic_ladder(context, ranker)
    if context.demand.spec.gpu_ids:
        picked = ManualSelector(context, ranker)
        return Ladder("manual", (picked,), lambda _rows: manual_diagnostics.diagnose(picked))
    if engine is Engine.MINDIE:
        npus = npu_ladder(context, ranker)
        return Ladder("ascend", npus, diagnose_each(context, npus, ascend_diagnostics.diagnose))
    if engine in (Engine.VGPU, Engine.WHOLE_CARD):
        pool = (PoolSelector(context, ranker),)
        return Ladder("pool", pool, diagnose_each(context, pool, pool_diagnostics.diagnose))
    return _generic_ladder(context, ranker)


def _generic_ladder(context: PlacementContext, ranker: Ranker) -> Ladder:
    """One GPU, several GPUs of one worker, several workers, no GPU: those that the rules allow."""
    rules = context.rules
    selectors: list[Selector] = []
    several = rules.gpu_count != 1
    if rules.cpu_only:
        selectors = [CpuSelector(context, ranker)]
    else:
        if rules.gpu_count <= 1:
            selectors.append(SingleGpuSelector(context, ranker))
        if several:
            selectors.append(MultiGpuSelector(context, ranker))
        if several and rules.distributed:
            selectors.append(MultiWorkerSelector(context, ranker))
        if rules.cpu:
            selectors.append(CpuSelector(context, ranker))

    def diagnose(rows: Ints) -> Diagnosis:
        if not len(rows):
            return Diagnosis([], Cure.NONE)
        return Diagnosis(shortfall(context, selectors, rows), Cure.CAPACITY)

    return Ladder("generic", tuple(selectors), diagnose)
