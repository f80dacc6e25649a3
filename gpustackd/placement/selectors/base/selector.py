"""What a selector does, and a ladder of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.context.gpu_allocation import Candidate
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.selectors.base.needs import needs

S = TypeVar("S")


class Selector(Protocol):
    """Looks for a place of one kind."""

    cut: bool
    """Whether the last search ended for its budget."""

    @property
    def kind(self) -> str:
        """Its name in answers."""

    def select(self, tie_break: int) -> Candidate | None:
        """The best place of this kind; even ones by `tie_break`."""

    def is_hopeless(self) -> bool:
        """Whether no worker could ever offer such a place, however empty."""

    def continue_ranking(self, tie_break: int) -> Candidate | None:
        """The next place out of the last ranking, while nothing happened that would rank another first."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why no selector of a ladder found a place."""

    reasons: list[Reason]
    cures: Cure
    replaces_filters: bool = False
    """Whether workers that the filters dropped are no news: the user named the only ones that count."""


@dataclass(frozen=True, slots=True)
class Ladder:
    """The selectors for one demand, in the order in which they are asked, and their common diagnosis."""

    name: str
    """Of the package whose selectors these are: `generic`, `gguf`, `ascend`, `pool` or `manual`."""
    selectors: tuple[Selector, ...]
    diagnose: Callable[[Ints], Diagnosis]
    """Of worker positions that passed all filters."""

    @property
    def kinds(self) -> set[str]:
        """Kinds of its selectors."""
        return {s.kind for s in self.selectors}

    @property
    def is_engines_own(self) -> bool:
        """Whether the engine takes cards by rules of its own: no sum over cards says what is missing."""
        return self.name in ("gguf", "ascend", "pool")


class Uncached:
    """Defaults of selectors that keep nothing between two decisions."""

    cut = False

    def is_hopeless(self) -> bool:
        return False

    def continue_ranking(self, tie_break: int) -> Candidate | None:
        return None


def diagnose_each(
    context: PlacementContext,
    selectors: Sequence[S],
    diagnose: Callable[[S, Ints], tuple[list[Reason], Cure]],
) -> Callable[[Ints], Diagnosis]:
    """The diagnosis of a ladder whose selectors each say what they lack, after what the model needs."""

    def diagnosis(rows: Ints) -> Diagnosis:
        reasons = [needs(context.demand, context.rules)] if len(rows) else []
        cures = Cure.NONE
        for selector in selectors:
            lacks, cure = diagnose(selector, rows)
            reasons.extend(lacks)
            cures |= cure
        return Diagnosis(reasons, cures, replaces_filters=bool(context.demand.spec.gpu_ids))

    return diagnosis
