"""Selectors over the whole fleet: columns per worker position hold the best that each worker offers.

A selector is brought up to date only when the ladder reaches it, and then only for workers that changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.rules.resource_rules import ResourceRules
from gpustackd.placement.scoring.ranker import BEST, Floats, Ranker
from gpustackd.placement.scoring.ranking_cache import KeptRanking, kept_ranking
from gpustackd.placement.scoring.soft_scores import Part
from gpustackd.placement.scoring.strategies import Scorer


class FleetSelector(ABC):
    """Columns per worker position, refreshed by need."""

    kind: ClassVar[str] = ""
    cut = False

    def __init__(self, context: PlacementContext, ranker: Ranker) -> None:
        self.context = context
        self.ranker = ranker
        self.fleet: Fleet = context.fleet
        self.rules: ResourceRules = context.rules
        self.scorer: Scorer = ranker.scorer
        self.tick = -1
        self.shape = (0, 0)
        """Positions and slots that the columns are made for."""

    @property
    def size(self) -> int:
        return self.shape[0]

    def is_hopeless(self) -> bool:
        """Whether no worker could ever offer anything, however empty: then nothing is looked at."""
        return False

    def continue_ranking(self, tie_break: int) -> Candidate | None:
        """The next place out of the last ranking; None where none is kept."""
        return None

    @abstractmethod
    def allocate(self, size: int) -> None:
        """Make empty columns for so many worker positions."""

    @abstractmethod
    def compute(self, rows: Ints, passing: Ints) -> None:
        """Fill the columns for changed positions `rows`, of which `passing` pass the filters."""

    @abstractmethod
    def select(self, tie_break: int) -> Candidate | None:
        """The best place of this kind, even scores broken by `tie_break`."""

    def refresh(self) -> None:
        """Bring the columns up to date."""
        fleet = self.fleet
        if self.shape != fleet.gpu_id.shape:
            self.shape = (len(fleet.alive), fleet.slots)
            self.allocate(self.size)
            self.tick = -1
        if self.tick == fleet.tick:
            return
        rows = (fleet.touched[: fleet.count] > self.tick).nonzero()[0]
        self.tick = fleet.tick
        if len(rows):
            self.compute(rows, rows[self.context.bits[rows] == 0])


class SingleWorkerSelector(FleetSelector):
    """Placements that stay on one worker: one best offer per worker."""

    kept: KeptRanking | None = None
    """The last ranking, where the next equal instance may take one of its ties."""

    def allocate(self, size: int) -> None:
        self.count = np.zeros(size, np.int16)
        """GPUs of the offer; 0 = none."""
        self.value = np.zeros(size)
        """What the strategy thinks of the offer's cards."""
        self.booked = np.zeros(size, np.float32)
        """Bytes that the offer books, near enough to break ties."""
        self._offering: Ints | None = None

    def compute(self, rows: Ints, passing: Ints) -> None:
        before = self.count[rows]
        self.count[rows] = 0
        if len(passing):
            self.look(passing)
        if self._offering is not None and not np.array_equal(before, self.count[rows]):
            self._offering = None

    @abstractmethod
    def look(self, rows: Ints) -> None:
        """Fill the columns for these positions; `count` is 0 there."""

    @abstractmethod
    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        """What the offer of this worker takes."""

    @property
    def offering(self) -> Ints:
        """Positions with an offer (of the fewest GPUs that anyone offers, where that counts)."""
        if self._offering is None:
            idx = self.count.nonzero()[0]
            if len(idx) and self.rules.fewest:
                counts = self.count[idx]
                idx = idx[counts == counts.min()]
            self._offering = idx
        return self._offering

    def select(self, tie_break: int) -> Candidate | None:
        if self.is_hopeless():
            return None
        self.refresh()
        idx = self.offering
        if not len(idx):
            return None
        scores, parts = self.rank(idx)
        ties = self.ranker.ties(idx, scores, self.booked[idx])
        self.kept = kept_ranking(self.ranker, idx, scores, parts, ties)
        if self.kept is not None:
            return self._next_of(self.kept, tie_break)
        return self._candidate(idx, scores, parts, int(ties[tie_break % len(ties)]), ties, tie_break)

    def continue_ranking(self, tie_break: int) -> Candidate | None:
        if self.kept is None or not self.kept.holds(self.context):
            return None
        return self._next_of(self.kept, tie_break)

    def _next_of(self, kept: KeptRanking, tie_break: int) -> Candidate:
        ties = kept.ties
        return self._candidate(kept.idx, kept.scores, kept.parts, kept.take(tie_break), ties, tie_break)

    def _candidate(
        self, idx: Ints, scores: Floats, parts: Mapping[str, Part], at: int, ties: Ints, tie_break: int
    ) -> Candidate:
        return Candidate(
            (self.allocation(int(idx[at]), tie_break // len(ties)),),
            self.kind,
            float(scores[at]),
            {k: float(v[at]) for k, v in parts.items()},
            also=self._best(idx, scores, parts, at, ties),
        )

    def rank(self, idx: Ints) -> tuple[Floats, Mapping[str, Part]]:
        """Total scores of these positions' offers, and their parts."""
        return self.ranker.rank(idx, self.value[idx])

    def _best(
        self, idx: Ints, scores: Floats, parts: Mapping[str, Part], first: int, ties: Ints
    ) -> tuple[Mapping[str, object], ...]:
        """Records of the choice and of the next best ones."""
        if len(ties) >= BEST:
            rest = ties[:BEST].tolist()
        elif len(idx) <= BEST:
            rest = list(range(len(idx)))
        else:
            rest = np.argpartition(-scores, BEST - 1)[:BEST].tolist()
        score = {i: float(scores[i]) for i in (first, *rest)}
        order = [first, *sorted((i for i in rest if i != first), key=lambda i: (-score[i], i))[: BEST - 1]]
        rows = self.fleet.worker_rows
        found: list[Mapping[str, object]] = []
        for i in order:
            row = rows[int(idx[i])]
            found.append(
                {
                    "worker": row.name if row else "",
                    "gpus": int(self.count[idx[i]]),
                    "score": round(score[i], 4),
                    "parts": {k: round(float(v[i]), 4) for k, v in parts.items()},
                }
            )
        return tuple(found)
