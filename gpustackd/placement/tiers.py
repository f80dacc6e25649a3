"""Steps of the ladder over the whole fleet, each keeping per worker position the best that it offers.

A tier is brought up to date only when the ladder reaches it, and then only for workers that changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet import Fleet, Ints
from gpustackd.placement.fit.cards import Cards, alone, cards
from gpustackd.placement.fit.one_worker import Several, chosen, several
from gpustackd.placement.fit.rules import Rules
from gpustackd.placement.fit.seat import Choice, Seat, seat_of
from gpustackd.placement.score.strategy import Scorer

if TYPE_CHECKING:
    from gpustackd.placement.search import Search

Floats = NDArray[np.float64]
EPSILON = 1e-9
BEST = 5


class Tier:
    """What all steps share: columns per worker position, refreshed by need."""

    step: ClassVar[str] = ""

    def __init__(self, search: Search) -> None:
        self.search = search
        self.rules: Rules = search.rules
        self.scorer: Scorer = search.scorer
        self.tick = -1
        self.size = 0

    @property
    def fleet(self) -> Fleet:
        return self.search.fleet

    def allocate(self, size: int) -> None:
        """Make empty columns for so many worker positions."""
        raise NotImplementedError

    def compute(self, rows: Ints, passing: Ints) -> None:
        """Fill the columns for changed positions `rows`, of which `passing` pass the filters."""
        raise NotImplementedError

    def choose(self, turn: int) -> Choice | None:
        """The best place of this step, even scores broken by `turn`."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Bring the columns up to date."""
        fleet = self.fleet
        if self.size != len(fleet.alive):
            self.size = len(fleet.alive)
            self.allocate(self.size)
            self.tick = -1
        if self.tick == fleet.tick:
            return
        rows = np.flatnonzero(fleet.touched[: fleet.count] > self.tick)
        self.tick = fleet.tick
        if len(rows):
            self.compute(rows, rows[self.search.bits[rows] == 0])


class OneWorkerTier(Tier):
    """Steps whose placements stay on one worker: one best offer per worker."""

    def allocate(self, size: int) -> None:
        self.count = np.zeros(size, np.int16)
        """GPUs of the offer; 0 = none."""
        self.value = np.zeros(size)
        """What the strategy thinks of the offer's cards."""
        self.booked = np.zeros(size, np.int64)

    def choose(self, turn: int) -> Choice | None:
        self.refresh()
        idx = np.flatnonzero(self.count)
        if not len(idx):
            return None
        counts = self.count[idx]
        least = counts.min()
        if counts.max() != least:
            idx = idx[counts == least]
        scores, parts = self.search.rank(idx, self.value[idx])
        ties = self.search.ties(idx, scores, self.booked[idx])
        at = int(ties[turn % len(ties)])
        w = int(idx[at])
        return Choice(
            (self.seat(w, turn // len(ties)),),
            self.step,
            float(scores[at]),
            {k: float(v[at]) for k, v in parts.items()},
            also=self._best(idx, scores, parts, at),
        )

    def _best(
        self, idx: Ints, scores: Floats, parts: Mapping[str, Floats], first: int
    ) -> tuple[Mapping[str, object], ...]:
        n = len(idx)
        best = range(n) if n <= BEST else np.argpartition(-scores, BEST - 1)[:BEST].tolist()
        order = sorted((i for i in best if i != first), key=lambda i: (-scores[i], i))[: BEST - 1]
        return tuple(
            {
                "worker": self.fleet.row(int(idx[i])).name,
                "gpus": int(self.count[idx[i]]),
                "score": round(float(scores[i]), 4),
                "parts": {k: round(float(v[i]), 4) for k, v in parts.items()},
            }
            for i in [first, *order]
        )

    def seat(self, w: int, turn: int) -> Seat:
        """What the offer of this worker takes."""
        raise NotImplementedError


class OneGpu(OneWorkerTier):
    """One GPU that holds the model by itself."""

    step = "one_gpu"

    def _look(self, rows: Ints) -> tuple[Cards, NDArray[np.bool_], Ints, Floats]:
        found = cards(self.fleet, rows, self.rules)
        fits, claim = alone(found, self.rules)
        values = self.scorer.cards(self.search.seats(found, claim, claim))
        return found, fits, claim, values

    def compute(self, rows: Ints, passing: Ints) -> None:
        self.count[rows] = 0
        if not len(passing):
            return
        _, fits, claim, values = self._look(passing)
        values = np.where(fits, values, -np.inf)
        best = np.argmax(values, axis=1)[:, None]
        self.count[passing] = fits.any(axis=1)
        self.value[passing] = np.take_along_axis(values, best, axis=1)[:, 0]
        self.booked[passing] = np.take_along_axis(claim, best, axis=1)[:, 0]

    def seat(self, w: int, turn: int) -> Seat:
        _, fits, claim, values = self._look(np.array([w]))
        good = np.where(fits[0], values[0], -np.inf)
        slots = np.flatnonzero(good >= good.max() - EPSILON)
        return seat_of(w, [int(slots[turn % len(slots)])], claim[0].tolist())

    def listing(self, rows: Ints, code: int) -> Iterator[Seat]:
        """Every seat of GPU type `code`, in the order of rows and slots."""
        _, fits, claim, _ = self._look(rows)
        fits &= self.fleet.gpu_type[rows] == code
        for r, s in np.argwhere(fits).tolist():
            yield Seat(int(rows[r]), (s,), (int(claim[r, s]),))


class ManyGpus(OneWorkerTier):
    """Several GPUs of one type of one worker, as few as hold the model."""

    step = "one_worker"

    def _look(self, rows: Ints, code: int) -> tuple[Cards, Several]:
        found = cards(self.fleet, rows, self.rules)
        load = None
        if not self.rules.compat:
            load = self.fleet.gpu_occupants[rows].astype(np.float64)
        return found, several(found, self.rules, code, load)

    def compute(self, rows: Ints, passing: Ints) -> None:
        self.count[rows] = 0
        if not len(passing):
            return
        kinds = self.fleet.gpu_type[passing]
        for code in np.unique(kinds[kinds >= 0]).tolist():
            found, offer = self._look(passing, code)
            count = self.count[passing]
            better = (offer.count > 0) & ((count == 0) | (offer.count < count))
            if not better.any():
                continue
            value = self._value(found, offer)
            self.count[passing[better]] = offer.count[better]
            self.value[passing[better]] = value[better]
            self.booked[passing[better]] = offer.booked[better]

    def _value(self, found: Cards, offer: Several) -> Floats:
        values = self.scorer.cards(self.search.seats(found, offer.claim, offer.booked[:, None]))
        in_order = np.take_along_axis(values, offer.order, axis=1)
        last = np.maximum(offer.count - 1, 0).astype(np.intp)[:, None]
        if self.scorer.takes_best_card:
            return np.take_along_axis(np.maximum.accumulate(in_order, axis=1), last, axis=1)[:, 0]
        sums = np.take_along_axis(np.cumsum(in_order, axis=1), last, axis=1)[:, 0]
        mean: Floats = sums / (last[:, 0] + 1)
        return mean

    def seat(self, w: int, turn: int) -> Seat:
        rows = np.array([w])
        kinds = self.fleet.gpu_type[w]
        best: tuple[int, Cards, Several] | None = None
        for code in np.unique(kinds[kinds >= 0]).tolist():
            found, offer = self._look(rows, code)
            n = int(offer.count[0])
            if n and (best is None or n < best[0]):
                best = (n, found, offer)
        if best is None:
            raise LookupError(f"worker position {w} offers nothing any more")
        _, found, offer = best
        slots = chosen(offer, 0, found.free[0].tolist(), turn, self.rules.compat)
        return seat_of(w, slots, offer.claim[0].tolist())

    def listing(self, rows: Ints, code: int) -> Iterator[Seat]:
        """The seat of each worker that has one on GPU type `code`, in the order of rows."""
        found, offer = self._look(rows, code)
        for r in np.flatnonzero(offer.count).tolist():
            slots = chosen(offer, r, found.free[r].tolist(), 0, self.rules.compat)
            yield seat_of(int(rows[r]), slots, offer.claim[r].tolist())
