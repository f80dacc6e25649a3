"""How much capacity a placement makes useless for the demands to come, after FGD (USENIX ATC'23).

A demand to come asks a number of cards of one worker, each with some memory free. What of a worker's free
memory it could use is the memory of the cards that have that much free, if there are enough of them, else
nothing. A placement costs what is lost of that, weighted by how often each kind of demand comes; the steepest
descent of the paper is the placement that costs least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Ints
from gpustackd.placement.mix import Mix

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Usable:
    """What each kind of demand could use of some workers. (K, R, S) and (K, R, 1)."""

    free: Ints
    """(R, S) bytes free of every card, whoever may use it."""
    need: NDArray[Any]
    """(K, R, S) bytes that must be free of a card."""
    enough: NDArray[np.bool_]
    """(K, R, S) cards with that much free."""
    count: Ints
    """(K, R, 1) how many there are."""
    total: Ints
    """(K, R, 1) what they have free together."""
    mix: Mix

    @classmethod
    def of(cls, free: Ints, capacity: Ints, mix: Mix) -> Usable:
        """From the free memory and the capacity of all cards, both (R, S); 0 or less = no card."""
        _, size, share, _ = mix.columns
        need = share * capacity  # below 0 where a card is not known: its size counts then
        np.maximum(need, size, out=need)
        enough = free >= need
        return cls(free, need, enough, *_summed(enough, free), mix)

    def cost_of_each(self, claim: Ints) -> Floats:
        """(R, S) bytes that are lost to the mix when `claim` (R, S) is booked on that card alone."""
        left = self.free - claim
        still = left >= self.need
        count = self.count - self.enough
        count += still
        total = self.total - self.enough * self.free
        total += still * left
        return self._weighted(count, total)

    def cost_together(self, claim: Ints, taken: NDArray[np.bool_]) -> Floats:
        """(R,) the same when `claim` (R, S) is booked on all cards `taken` (R, S)."""
        left = self.free - claim * taken
        return self._weighted(*_summed(left >= self.need, left))[:, 0]

    def _weighted(self, count: Ints, total: Ints) -> Floats:
        """What is lost where afterwards so many cards are left to each kind, with so much free on them."""
        gpus, _, _, weights = self.mix.columns
        lost = (self.count >= gpus) * self.total - (count >= gpus) * total
        np.maximum(lost, 0, out=lost)
        cost: Floats = np.add.reduce(weights * lost, axis=0)
        return cost


def _summed(enough: NDArray[np.bool_], free: Ints) -> tuple[Ints, Ints]:
    """How many cards there are of those with enough, and what is free on them together; (K, R, 1)."""
    count: Ints = np.add.reduce(enough, axis=2, dtype=np.int64, keepdims=True)
    total: Ints = np.add.reduce(enough * free, axis=2, keepdims=True)
    return count, total
