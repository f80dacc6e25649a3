"""The strategy's scorer, guarded: where it fails all places are worth the same, and the decision goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.placement.diagnostics.faults import StageFaults
from gpustackd.placement.scoring.strategies import CardView, Floats, Scorer

STAGE = "scorer.placement"


@dataclass(frozen=True, slots=True)
class FaultTolerantScorer(Scorer):
    """Answers as a `Scorer` does; a failure is noted in `faults`, and the answer is 0."""

    faults: StageFaults = field(default_factory=StageFaults, compare=False)

    def cards(self, s: CardView) -> Floats:
        return self._tried(lambda: Scorer.cards(self, s), np.shape(s.claim))

    def together(self, values: Floats, taken: NDArray[np.bool_]) -> Floats:
        return self._tried(lambda: Scorer.together(self, values, taken), (len(values),))

    def taken(self, s: CardView, taken: NDArray[np.bool_]) -> Floats:
        return self._tried(lambda: Scorer.taken(self, s, taken), (len(taken),))

    def worker(self, value: Floats, mine: Any, others: Any) -> Floats:
        return self._tried(lambda: Scorer.worker(self, value, mine, others), np.shape(value))

    def without_cards(self, ram_claim: Any, ram_free: Any, mine: Any, others: Any) -> Floats:
        return self._tried(
            lambda: Scorer.without_cards(self, ram_claim, ram_free, mine, others), np.shape(ram_free)
        )

    def several_workers(self, main: float, subordinates: list[float]) -> float:
        return self.faults.tried(STAGE, lambda: Scorer.several_workers(self, main, subordinates), main)

    def _tried(self, call: Callable[[], Floats], shape: tuple[int, ...]) -> Floats:
        try:
            return call()
        except Exception as error:
            self.faults.note(STAGE, error)
            return np.zeros(shape)
