"""The last ranking of one demand, for as long as it stands: the next equal instance takes one of its ties.

Under `spread` an instance lowers the score of the worker that it goes to. The score of the others stays as it
was, as long as they hold none of the model: it then depends on how crowded workers are with other models
alone. So where nothing changed but workers that were chosen from this ranking, what is left of its ties is
just what a new ranking of the whole fleet would find.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.policy import Policy
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.scoring.soft_scores import Part

FEWEST = 6
"""Ties below which the whole fleet is ranked anew, so that the next best are told as ever."""
BURST = 8
"""Workers that may have changed between two decisions of one burst."""


@dataclass(slots=True)
class KeptRanking:
    """Offers of one selector at one moment."""

    tick: int
    """Of the fleet, when it was found to stand."""
    size: int
    policy: Policy
    idx: Ints
    """Positions of workers with an offer."""
    scores: NDArray[np.float64]
    parts: Mapping[str, Part]
    ties: Ints
    """Where in `idx` the best ones are, without those taken since."""
    others: int
    """Instances of other models on each of them."""
    taken: set[int] = field(default_factory=set)
    """Worker positions chosen from this ranking."""
    last: int = -1
    """The one chosen last."""

    def holds(self, context: PlacementContext) -> bool:
        """Whether nothing happened since that would rank another worker first."""
        fleet = context.fleet
        if len(self.ties) < FEWEST or self.size != len(fleet.alive) or self.policy is not context.policy:
            return False
        changed = (fleet.touched[: fleet.count] > self.tick).nonzero()[0].tolist()
        if self.last not in changed:  # what was chosen was not taken after all
            return False
        mine = fleet.occupancy.model_on_worker.get(context.model_id, {})
        for w in changed:
            here = mine.get(w, 0)
            if w not in self.taken or not here or fleet.occupancy.occupants[w] - here != self.others:
                return False
            if fleet.described[w] > self.tick:
                return False
        self.tick = fleet.tick
        return True

    def take(self, tie_break: int) -> int:
        """Where in `idx` the choice for `tie_break` is; it is no tie any more."""
        n = tie_break % len(self.ties)
        at = int(self.ties[n])
        self.ties = np.delete(self.ties, n)
        self.last = int(self.idx[at])
        self.taken.add(self.last)
        return at


def kept_ranking(
    ranker: Ranker,
    idx: Ints,
    scores: NDArray[np.float64],
    parts: Mapping[str, Part],
    ties: Ints,
) -> KeptRanking | None:
    """A ranking to go on from; None where choosing one of its ties may change what others are worth, or where
    so much changed since the last decision on this demand that no burst of it seems to be under way."""
    context = ranker.context
    if ranker.scorer.strategy is not Strategy.SPREAD or len(ties) < FEWEST or context.faults:
        return None
    if context.news > BURST:
        return None
    best = idx[ties]
    others = context.fleet.occupancy.occupants[best]
    if context.mine[best].any() or others.min() != others.max():
        return None
    fleet = context.fleet
    return KeptRanking(fleet.tick, len(fleet.alive), context.policy, idx, scores, parts, ties, int(others[0]))
