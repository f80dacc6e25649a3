"""What adds to the strategy's score: locality of files and preferred labels, kept for one search.

Whatever fails here is left out of the decision and noted (`Faults`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.placement.diagnostics.faults import StageFaults
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.policy import Policy
from gpustackd.placement.scoring.locality import NOTHING, Known, known, missing, shares

Floats = NDArray[np.float64]
LOCALITY, PREFERRED = "locality", "preferred"


class At:
    """A column at some positions, looked up when asked: of thousands of candidates five are told of."""

    __slots__ = ("_column", "_idx")

    def __init__(self, column: Floats, idx: Ints) -> None:
        self._column = column
        self._idx = idx

    def __getitem__(self, at: Any) -> Any:
        return self._column[self._idx[at]]


Part = Floats | At
"""One part of the score of each candidate, by index."""


class SoftScores:
    """Parts of the score by worker position. `begin` before every decision."""

    def __init__(self, fleet: Fleet, demand: Demand, labels: LabelFilter | None, faults: StageFaults) -> None:
        self.fleet = fleet
        self.demand = demand
        self.labels = labels
        self.faults = faults
        self.files: Known = NOTHING
        self._maximum = 0.0
        self._from: tuple[object, float] | None = None
        self._kept: tuple[Known, int, tuple[Floats, Ints]] | None = None
        self._sum: tuple[object, Floats, dict[str, Floats]] | None = None
        self.gain: Floats | None = None
        """Weight of the preferred labels per worker position."""

    def begin(self, policy: Policy) -> None:
        """Take over what is known of files now."""
        source = (policy.ready_files, policy.locality_max)
        if self._from is not None and self._from[0] is source[0] and self._from[1] == source[1]:
            return
        self._from = source
        self._maximum, self._sum = policy.locality_max, None
        found = self.faults.tried("scorer.locality", lambda: known(self.demand, policy), NOTHING)
        if found != self.files:  # most news are of other models' files
            self.files = found
        if self.faults:
            self._from = None

    def allocate(self, size: int) -> None:
        """Make room for so many worker positions."""
        self._sum = None
        self.gain = np.zeros(size) if self.labels is not None else None

    def describe(self, rows: Ints) -> None:
        """Look anew at the labels of these workers."""
        if self.labels is None or self.gain is None:
            return
        self._sum = None
        nobody = np.zeros(len(rows))
        labels = self.labels
        self.gain[rows] = self.faults.tried(
            "scorer.preferred", lambda: labels.preference(self.fleet, rows), nobody
        )

    # -- one worker each -----------------------------------------------------------------------------------

    def of_workers(self, idx: Ints) -> tuple[Floats, dict[str, Part]] | None:
        """What placements that each lie on one of these worker positions get on top, (K,), and the parts that
        it is made of; None where nobody gets anything."""
        columns = self._columns()
        if columns is None and self.gain is None:
            return None
        if self._sum is None or self._sum[0] is not columns:
            parts = {} if columns is None else {LOCALITY: self._maximum * columns[0]}
            if self.gain is not None:
                parts[PREFERRED] = self.gain
            self._sum = (columns, sum(parts.values(), np.zeros(len(self.fleet.alive))), parts)
        return self._sum[1][idx], {name: At(column, idx) for name, column in self._sum[2].items()}

    def to_download(self, idx: Ints) -> Ints | None:
        """(K,) bytes that these workers lack; None where nobody has anything, or nobody asks."""
        columns = self._columns()
        return None if columns is None else columns[1][idx]

    def _columns(self) -> tuple[Floats, Ints] | None:
        files, fleet = self.files, self.fleet
        if not files.wanted:
            return None
        kept = self._kept
        if kept is not None and kept[0] is files and kept[1] == fleet.roster:
            return kept[2]
        size = len(fleet.alive)
        found = self.faults.tried(
            "scorer.locality", lambda: (shares(fleet, files.warm, size), missing(fleet, files, size)), None
        )
        if found is not None:
            self._kept = (files, fleet.roster, found)
        return found

    # -- several workers -----------------------------------------------------------------------------------

    def of_choices(self, choices: Sequence[Sequence[int]]) -> dict[str, Floats]:
        """Parts for placements that each lie on all of some worker positions; (K,)."""
        parts: dict[str, Floats] = {}
        if self.files.warm.main or self.files.warm.draft:
            share = self.faults.tried("scorer.locality", lambda: [self._share(ws) for ws in choices], None)
            if share is not None:
                parts[LOCALITY] = self._maximum * np.array(share)
        if self.gain is not None:
            parts[PREFERRED] = np.array([self.gain[list(ws)].mean() for ws in choices])
        return parts

    def lacking(self, positions: Sequence[int]) -> int:
        """Bytes that all of these workers together would have to download."""
        ids = [int(self.fleet.worker_id[w]) for w in positions]
        return self.faults.tried("scorer.locality", lambda: self.files.to_download(ids), 0)

    def _share(self, positions: Sequence[int]) -> float:
        return self.files.warm.share(int(self.fleet.worker_id[w]) for w in positions)
