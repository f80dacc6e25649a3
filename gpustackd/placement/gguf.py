"""The ladder for GGUF models: one GPU, several GPUs of one worker, several workers, partial offload, CPU.

Hand-picked GPUs have one step for all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpustackd.errors import BadRow
from gpustackd.placement.fit.gguf_plan import Planner
from gpustackd.placement.gguf_over_workers import LayersOverWorkers
from gpustackd.placement.gguf_partial import SomeOnOneWorker
from gpustackd.placement.gguf_picked import PickedGpus
from gpustackd.placement.gguf_several import AllOnOneWorker
from gpustackd.placement.gguf_tiers import AllOnOneGpu, NoneOnGpus

if TYPE_CHECKING:
    from gpustackd.placement.engine_steps import EngineStep
    from gpustackd.placement.search import Search


def ladder(search: Search) -> tuple[EngineStep, ...]:
    """The steps for one demand, in the order of the spec; those that its flags rule out are left out."""
    asked = search.rules.gguf
    if asked is None:
        raise BadRow("source", "is no GGUF model")
    planner = Planner(asked)
    if search.demand.spec.gpu_ids:
        return (PickedGpus(search, planner),)
    steps: list[EngineStep] = []
    if asked.whole and not asked.split:
        steps.append(AllOnOneGpu(search, planner))
    if asked.whole and not asked.image:
        steps.append(AllOnOneWorker(search, planner))
    if search.rules.distributed and not asked.image and asked.layers != 0:
        steps.append(LayersOverWorkers(search, planner))
    if asked.partial:
        steps.append(SomeOnOneWorker(search, planner))
    if asked.host_only:
        steps.append(NoneOnGpus(search, planner))
    return tuple(steps)
