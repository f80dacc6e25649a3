"""Steps of the ladder over the whole fleet, each keeping per worker position the best that it offers.

A tier is brought up to date only when the ladder reaches it, and then only for workers that changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.placement.context.cards import Cards, alone
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation
from gpustackd.placement.context.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.scoring.ranker import BEST, EPSILON, Floats
from gpustackd.placement.scoring.ranking_cache import KeptRanking, kept_ranking
from gpustackd.placement.scoring.soft_scores import Part
from gpustackd.placement.scoring.strategies import Scorer
from gpustackd.placement.selectors.generic.gpu_sets import Several, alike, chosen, several

if TYPE_CHECKING:
    from gpustackd.placement.context.search import PlacementContext


class Bitmap:
    """A set of slots per worker position."""

    def __init__(self, size: int, slots: int) -> None:
        self._bits = np.zeros((size, (slots + 7) // 8), np.uint8)

    def put(self, rows: Ints, members: NDArray[np.bool_]) -> None:
        """Set the slots of these positions; (R, S)."""
        self._bits[rows] = np.packbits(members, axis=1, bitorder="little")

    def of(self, w: int) -> list[int]:
        """Slots of one position, ascending."""
        bits = int.from_bytes(self._bits[w].tobytes(), "little")
        return [s for s in range(bits.bit_length()) if bits >> s & 1]


class FleetSelector(ABC):
    """What all steps share: columns per worker position, refreshed by need."""

    step: ClassVar[str] = ""

    def __init__(self, search: PlacementContext) -> None:
        self.search = search
        self.rules: ResourceRules = search.rules
        self.scorer: Scorer = search.scorer
        self.tick = -1
        self.shape = (0, 0)
        """Positions and slots that the columns are made for."""

    @property
    def size(self) -> int:
        return self.shape[0]

    @property
    def fleet(self) -> Fleet:
        return self.search.fleet

    @abstractmethod
    def allocate(self, size: int) -> None:
        """Make empty columns for so many worker positions."""

    @abstractmethod
    def compute(self, rows: Ints, passing: Ints) -> None:
        """Fill the columns for changed positions `rows`, of which `passing` pass the filters."""

    @abstractmethod
    def choose(self, turn: int) -> Candidate | None:
        """The best place of this step, even scores broken by `turn`."""

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
            self.compute(rows, rows[self.search.bits[rows] == 0])


class SingleWorkerSelector(FleetSelector):
    """Steps whose placements stay on one worker: one best offer per worker."""

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
    def seat(self, w: int, turn: int) -> GpuAllocation:
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

    @abstractmethod
    def hopeless(self) -> bool:
        """Whether no worker could ever offer anything, however empty: then nothing is looked at."""

    def choose(self, turn: int) -> Candidate | None:
        if self.hopeless():
            return None
        self.refresh()
        idx = self.offering
        if not len(idx):
            return None
        scores, parts = self.rank(idx)
        ties = self.search.ties(idx, scores, self.booked[idx])
        self.search.standing = stands = kept_ranking(self, idx, scores, parts, ties)
        if stands is not None:
            return self.next_of(stands, turn)
        return self._choice(idx, scores, parts, int(ties[turn % len(ties)]), ties, turn)

    def next_of(self, stands: KeptRanking, turn: int) -> Candidate:
        """The choice for `turn` out of a ranking that still stands."""
        ties = stands.ties
        return self._choice(stands.idx, stands.scores, stands.parts, stands.take(turn), ties, turn)

    def _choice(
        self, idx: Ints, scores: Floats, parts: Mapping[str, Part], at: int, ties: Ints, turn: int
    ) -> Candidate:
        return Candidate(
            (self.seat(int(idx[at]), turn // len(ties)),),
            self.step,
            float(scores[at]),
            {k: float(v[at]) for k, v in parts.items()},
            also=self._best(idx, scores, parts, at, ties),
        )

    def rank(self, idx: Ints) -> tuple[Floats, Mapping[str, Part]]:
        """Total scores of these positions' offers, and their parts."""
        return self.search.rank(idx, self.value[idx])

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


class SingleGpuSelector(SingleWorkerSelector):
    """One GPU that holds the model by itself."""

    step = "one_gpu"

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.slots = Bitmap(size, self.fleet.slots)
        """Slots that share the best value and book the same."""

    def hopeless(self) -> bool:
        share = (
            1.0
            if self.rules.taking is not ClaimPolicy.SHARE or self.rules.share_of_type
            else self.rules.share
        )
        return self.rules.vram > self.fleet.largest[0] * share

    def look(self, rows: Ints) -> None:
        found = self.search.cards(rows)
        fits, claim = alone(found, self.rules)
        if not fits.any():
            return
        values = self.scorer.cards(self.search.seats(found, claim, claim))
        np.copyto(values, -np.inf, where=~fits)
        top = values.max(axis=1)
        good = values >= (top - EPSILON)[:, None]
        booked = claim[np.arange(len(rows)), good.argmax(axis=1)]
        good &= claim == booked[:, None]
        self.count[rows] = top > -np.inf
        self.value[rows] = top
        self.booked[rows] = booked
        self.slots.put(rows, good)

    def seat(self, w: int, turn: int) -> GpuAllocation:
        good = self.slots.of(w)
        slot = good[turn % len(good)]
        kind = self.fleet.types[int(self.fleet.gpu_type[w, slot])]
        return GpuAllocation(w, (slot,), (self.rules.claim(int(self.fleet.vram_total[w, slot]), kind, 1),))


class CpuSelector(SingleWorkerSelector):
    """No GPU: a worker with enough RAM."""

    step = "cpu"

    def hopeless(self) -> bool:
        return False

    def look(self, rows: Ints) -> None:
        self.fleet.renew()
        serves = self.fleet.ram_free[rows] >= self.rules.ram_floor
        if self.rules.by_cpu is not None:
            serves &= self.rules.by_cpu(self.fleet, rows)
        self.count[rows] = serves

    def rank(self, idx: Ints) -> tuple[Floats, Mapping[str, Part]]:
        return self.search.rank(idx, self.value[idx], bare=True)

    def seat(self, w: int, turn: int) -> GpuAllocation:
        return GpuAllocation(w)


class MultiGpuSelector(SingleWorkerSelector):
    """Several GPUs of one type of one worker, as few as hold the model."""

    step = "one_worker"

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.forced = Bitmap(size, self.fleet.slots)
        """Slots that are taken in any case."""
        self.same = Bitmap(size, self.fleet.slots)
        """Slots of which as many are taken as are missing."""

    def hopeless(self) -> bool:
        share = (
            1.0
            if self.rules.taking is not ClaimPolicy.SHARE or self.rules.share_of_type
            else self.rules.share
        )
        return self.rules.taking is not ClaimPolicy.EACH and self.rules.vram > self.fleet.largest[1] * share

    def look(self, rows: Ints) -> None:
        found = self.search.cards(rows)
        load = self.fleet.occupancy.gpu_occupants[rows]
        for code in range(len(self.fleet.types)):
            offer = several(found, self.rules, code, load)
            count = self.count[rows]
            better = (offer.count > 0) & ((count == 0) | (offer.count < count))
            if not better.any():
                continue
            at = rows[better]
            self.count[at] = offer.count[better]
            self.value[at] = self._value(found, offer)[better]
            self.booked[at] = offer.booked[better]
            forced, same = alike(offer, found.free)
            self.forced.put(at, forced[better])
            self.same.put(at, same[better])

    def _value(self, found: Cards, offer: Several) -> Floats:
        view = self.search.seats(found, offer.claim, offer.booked[:, None])
        if self.scorer.looks_at_hosts:
            taken = np.zeros(offer.eligible.shape, np.bool_)
            first = np.arange(self.fleet.slots) < offer.count[:, None]
            np.put_along_axis(taken, offer.order, first, axis=1)
            return self.scorer.taken(view, taken)
        values = self.scorer.cards(view)
        rows = np.arange(len(values))
        in_order = values[rows[:, None], offer.order]
        last = np.maximum(offer.count - 1, 0)
        if self.scorer.takes_best_card:
            return np.maximum.accumulate(in_order, axis=1)[rows, last]
        mean: Floats = np.cumsum(in_order, axis=1)[rows, last] / (last + 1)
        return mean

    def seat(self, w: int, turn: int) -> GpuAllocation:
        n = int(self.count[w])
        slots = chosen(self.forced.of(w), self.same.of(w), n, turn)
        slots.sort(key=lambda s: int(self.fleet.gpu_index[w, s]))
        kind = self.fleet.types[int(self.fleet.gpu_type[w, slots[0]])]
        claims = tuple(self.rules.claim(int(self.fleet.vram_total[w, s]), kind, n) for s in slots)
        return GpuAllocation(w, tuple(slots), claims)
