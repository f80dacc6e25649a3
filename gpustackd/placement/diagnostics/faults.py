"""Filters and scorers that failed: a decision goes on without them, and says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from gpustackd.domain.outcome import Reason
from gpustackd.errors import BadRow

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StageFault:
    """One stage that failed: `filter.labels`, `scorer.locality`, … with what it raised."""

    stage: str
    error: str
    """Type and text of the exception, cut short."""

    def as_reason(self) -> Reason:
        """For people and as data; a warning, since the decision was made all the same."""
        kind, _, name = self.stage.partition(".")
        text = f"the {kind} {name} failed and was left out of this decision: {self.error}"
        return Reason(f"{kind}.failed", name, text, {"stage": self.stage, "error": self.error}, "warning")


class StageFaults:
    """What failed in one search. What was worked out while something failed is not to be kept."""

    def __init__(self) -> None:
        self._found: dict[str, StageFault] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def note(self, stage: str, error: Exception) -> None:
        """Remember a failure, once per stage. BadRow is no failure of ours: it is raised again."""
        if isinstance(error, BadRow):
            raise error
        self._found.setdefault(stage, StageFault(stage, f"{type(error).__name__}: {error}"[:300]))

    def tried(self, stage: str, call: Callable[[], T], otherwise: T) -> T:
        """What `call` gives, or `otherwise` where it fails."""
        try:
            return call()
        except Exception as error:
            self.note(stage, error)
            return otherwise

    def clear(self) -> None:
        self._found.clear()

    def noted(self) -> tuple[StageFault, ...]:
        """Everything noted since the last `clear`."""
        return tuple(self._found.values())
