"""Steps of engines whose search is their own: layers of GGUF models, MindIE's NPUs, pools of cards.

Such a step chooses as every other one does, and says itself what is missing, since its words are not
those of GPUs that are picked one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.fleet import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement import gguf, npus, pooled
from gpustackd.placement.fit.seat import Choice

if TYPE_CHECKING:
    from gpustackd.placement.search import Search


@runtime_checkable
class EngineStep(Protocol):
    """A step with refusals of its own."""

    @property
    def step(self) -> str:
        """Its name in answers."""

    def choose(self, turn: int) -> Choice | None:
        """The best place that this step finds."""

    def lacking(self, rows: Ints) -> tuple[list[Reason], Cure]:
        """What these positions, which passed all filters, lack, and what could cure it."""


def engine_steps(search: Search) -> tuple[EngineStep, ...]:
    """The ladder of an engine with steps of its own; empty for the others."""
    engine = search.rules.engine
    if engine is Engine.GGUF:
        return gguf.ladder(search)
    if engine is Engine.MINDIE:
        return npus.ladder(search)
    if engine in (Engine.VGPU, Engine.WHOLE_CARD):
        return pooled.ladder(search)
    return ()
