"""Steps of engines whose search is their own: layers of GGUF models, MindIE's NPUs, pools of cards.

Such a step chooses as every other one does, and says itself what is missing, since its words are not
those of GPUs that are picked one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.selectors.ascend.search import npu_ladder
from gpustackd.placement.selectors.gguf.ladder import gguf_ladder
from gpustackd.placement.selectors.pool.search import pool_ladder

if TYPE_CHECKING:
    from gpustackd.placement.context.search import PlacementContext


@runtime_checkable
class EngineSelector(Protocol):
    """A step with refusals of its own."""

    @property
    def step(self) -> str:
        """Its name in answers."""

    def choose(self, turn: int) -> Candidate | None:
        """The best place that this step finds."""

    def lacking(self, rows: Ints) -> tuple[list[Reason], Cure]:
        """What these positions, which passed all filters, lack, and what could cure it."""


def engine_selectors(search: PlacementContext) -> tuple[EngineSelector, ...]:
    """The ladder of an engine with steps of its own; empty for the others."""
    engine = search.rules.engine
    if engine is Engine.GGUF:
        return gguf_ladder(search)
    if engine is Engine.MINDIE:
        return npu_ladder(search)
    if engine in (Engine.VGPU, Engine.WHOLE_CARD):
        return pool_ladder(search)
    return ()
