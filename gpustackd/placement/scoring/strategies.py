"""The placement score of each strategy, over arrays or single numbers alike.

A strategy first values every card, then a placement on one worker by its cards, then adds what it
thinks of the worker. Scores lie between 0 and the maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.mix import UNKNOWN_MIX, Mix
from gpustackd.placement.scoring.fragmentation import Usable

Floats = NDArray[np.float64]

WORKER = 1 / 16
"""Best fit: weight of what the worker has left, next to what the card has left, where one card is taken;
where several are taken it is the other way round, since then the worker is what is filled."""

OTHERS = 0.2
"""Weight of other models' instances on a card, next to one of ours."""


@dataclass(slots=True)
class CardView:
    """What is known of cards on which something would be booked: all (R, S), RAM (R, 1)."""

    claim: Ints
    free: Ints
    capacity: Ints
    """Free memory of the card if nothing were on it."""
    ram_claim: Any
    ram_free: Any
    mine: Any
    """Instances of this model on the card."""
    all: Any
    """Instances of any model on the card."""
    host_free: Any = 0
    """(R, S) free memory of every card, also of those that the demand cannot use; for strategies that look
    at whole workers."""
    scale: int = 1
    """Memory of the largest worker."""


@dataclass(frozen=True, slots=True)
class Scorer:
    """One strategy with its maximum and the opt-in preferences."""

    strategy: Strategy
    maximum: float
    mean_over_gpus: bool = False
    dominant_resource: bool = False
    mix: Mix = UNKNOWN_MIX
    """What capacity is kept for (fragmentation)."""

    @property
    def spread(self) -> bool:
        return self.strategy is Strategy.SPREAD

    @property
    def mixed(self) -> bool:
        """Whether the mix of demands counts."""
        return self.strategy is Strategy.FRAGMENTATION

    @property
    def looks_at_hosts(self) -> bool:
        """Whether the other cards of the worker count."""
        return self.strategy in (Strategy.BEST_FIT, Strategy.FRAGMENTATION)

    def cards(self, s: CardView) -> Floats:
        """(R, S) value of every card by itself."""
        if self.strategy is Strategy.SPREAD:
            return spread_card(s.mine, s.all - s.mine)
        if self.strategy is Strategy.BINPACK:
            r, v = ratio(s.ram_claim, s.ram_free), ratio(s.claim, s.free)
            packed = np.maximum(r, v) if self.dominant_resource else (r + 2 * v) / 3
            return self._clamped(self.maximum * packed)
        if self.strategy is Strategy.BEST_FIT:
            on_card = ratio(s.free - s.claim, s.capacity)
            on_worker = ratio(np.add.reduce(s.host_free, axis=1, keepdims=True) - s.claim, s.scale)
            return self._clamped(self.maximum * (1 - (1 - WORKER) * on_card - WORKER * on_worker))
        if self.strategy is Strategy.FRAGMENTATION:
            usable = Usable.of(s.host_free, s.capacity, self.mix)
            return self._worth(usable.cost_of_each(s.claim), s.scale)
        return np.full(np.shape(s.claim), self.maximum)

    def taken(self, s: CardView, taken: NDArray[np.bool_]) -> Floats:
        """Value of the cards taken on each worker, as one: (R,)."""
        several = taken.sum(axis=1) > 1 if self.looks_at_hosts else None
        if several is None or not several.any():
            return self.together(self.cards(s), taken)
        if self.strategy is Strategy.FRAGMENTATION:
            usable = Usable.of(s.host_free, s.capacity, self.mix)
            return self._worth(usable.cost_together(s.claim, taken), s.scale)
        claim = np.where(taken, s.claim, 0)
        left = np.where(taken, ratio(s.free - s.claim, s.capacity), 0.0)
        on_card = left.sum(axis=1) / np.maximum(taken.sum(axis=1), 1)
        on_worker = ratio(s.host_free.sum(axis=1) - claim.sum(axis=1), s.scale)
        whole = self._clamped(self.maximum * (1 - WORKER * on_card - (1 - WORKER) * on_worker))
        return whole if several.all() else np.where(several, whole, self.together(self.cards(s), taken))

    def _worth(self, cost: Floats, scale: int) -> Floats:
        """Points for a cost in bytes: the square root keeps small differences apart and bounds large ones."""
        return self._clamped(self.maximum * (1 - np.sqrt(cost / max(scale, 1))))

    @property
    def takes_best_card(self) -> bool:
        """Whether the best card alone decides a placement over several cards (else: their mean)."""
        return self.strategy is Strategy.BINPACK and not self.mean_over_gpus

    def together(self, values: Floats, taken: NDArray[np.bool_]) -> Floats:
        """Value of the cards taken on each worker, as one: (R, S) to (R,)."""
        if self.takes_best_card:
            best: Floats = np.where(taken, values, 0.0).max(axis=1)
            return best
        mean: Floats = np.where(taken, values, 0.0).sum(axis=1) / np.maximum(taken.sum(axis=1), 1)
        return mean

    def worker(self, value: Floats, mine: Any, others: Any) -> Floats:
        """Score of a placement on one worker from the value of its cards; (K,) over all candidates."""
        if not self.spread:
            return value
        score: Floats = self.maximum * (0.85 * spread_worker(mine, others) + 0.15 * value)
        return score

    def without_cards(self, ram_claim: Any, ram_free: Any, mine: Any, others: Any) -> Floats:
        """Score of a placement that takes no GPU; (K,) over all candidates."""
        if self.spread:
            score: Floats = self.maximum * spread_worker(mine, others)
            return score
        if self.strategy is Strategy.FIRST_FIT:
            return np.full(np.shape(ram_free), self.maximum)
        return self._clamped(self.maximum * ratio(ram_claim, ram_free))

    def several_workers(self, main: float, subordinates: list[float]) -> float:
        """Score of a placement over several workers from the scores of its parts."""
        n = len(subordinates)
        if not n or self.spread:
            return main
        total = sum(subordinates)
        score = (5 * main + total) / (5 + n)
        return float(self._clamped(np.float64(score)))

    def _clamped(self, score: Any) -> Floats:
        return np.asarray(np.clip(score, 0.0, self.maximum), np.float64)


def ratio(part: Any, whole: Any) -> Floats:
    """part / whole, 0 where the whole is 0 or less."""
    whole = np.asarray(whole, np.float64)
    out: Floats = np.zeros(np.broadcast(part, whole).shape)
    np.divide(part, whole, out=out, where=whole > 0)
    return out


def spread_card(mine: Any, others: Any) -> Floats:
    """1 on an empty card, less with every instance there."""
    value: Floats = 1.0 / (1.0 + np.asarray(mine, np.float64) + OTHERS * others)
    return value


def spread_worker(mine: Any, others: Any) -> Floats:
    """How empty workers are of this model, then of others, relative to all candidates; (K,) in 0..1."""
    mine, others = np.asarray(mine), np.asarray(others)
    if not mine.size:
        return np.zeros(0)
    free_of_mine = mine == 0
    free = int(np.count_nonzero(free_of_mine))
    room = _inverse(others)
    if not free:
        crowded: Floats = 0.50 + 0.25 * _inverse(mine) + 0.15 * room
        return crowded
    lonely: Floats = 0.85 + 0.15 * room
    if free == len(mine):
        return lonely
    return np.where(free_of_mine, lonely, 0.45 + 0.35 * _inverse(mine) + 0.20 * room)


def _inverse(x: NDArray[Any]) -> Floats:
    low, high = x.min(), x.max()
    if high <= low:
        return np.ones(x.shape)
    value: Floats = 1.0 - (x - low) / (high - low)
    return value
