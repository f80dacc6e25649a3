"""NPUs of some workers as arrays: which may be taken, in which order, and what they offer together.

A fixed fraction of an NPU is booked in whole bytes: it is free or it is not.
R worker positions at once, (R, S) for their GPU slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.placement.context.cards import Cards
from gpustackd.placement.context.gpu_allocation import npu_address
from gpustackd.placement.rules.resource_rules import ResourceRules
from gpustackd.placement.scoring.tie_break import block


@dataclass(slots=True)
class Npus:
    """Sizes in bytes."""

    mine: Bools
    """(R, S) NPUs, usable or not."""
    eligible: Bools
    """(R, S) NPUs that have their fraction free."""
    claim: Ints
    """(R, S) bytes booked on each if it is taken."""
    order: NDArray[np.intp]
    """(R, S) slots, those that may be taken first, the freest of them in front."""
    have: Ints
    """(R,) how many may be taken."""
    sums: Ints
    """(R, S) what the first n of the order book together, for n = 1 and up."""

    def holding(self, n: int, vram: int) -> Bools:
        """(R,) whether the first n hold so many bytes."""
        if n > self.order.shape[1]:
            return np.zeros(len(self.have), np.bool_)
        held: Bools = (self.have >= n) & (self.sums[:, n - 1] >= vram)
        return held

    def taken(self, count: Ints) -> Bools:
        """(R, S) the first `count` (R,) of the order."""
        mask: Bools = np.zeros(self.eligible.shape, np.bool_)
        np.put_along_axis(mask, self.order, np.arange(mask.shape[1]) < count[:, None], axis=1)
        return mask


def npus(cards: Cards, rules: ResourceRules, fleet: Fleet, only: Bools | None = None) -> Npus:
    """Look at the NPUs of every worker; `only` (R, S) leaves the others out."""
    codes = [n for n, t in enumerate(fleet.types) if t in rules.kinds]
    mine = np.isin(cards.type, codes)
    claim = np.where(mine, cards.total * rules.share, 0.0).astype(np.int64)
    eligible = mine & cards.usable & (claim <= cards.free)
    if only is not None:
        eligible &= only
    free = np.where(eligible, cards.free, -1)
    # of NPUs that are equally free, the one with less on it
    order = np.lexsort((fleet.occupancy.gpu_occupants[cards.positions], -free), axis=1)
    sums = np.cumsum(np.take_along_axis(np.where(eligible, claim, 0), order, axis=1), axis=1)
    return Npus(mine, eligible, claim, order, np.count_nonzero(eligible, axis=1), sums)


def sizes(rules: ResourceRules, slots: int) -> list[int]:
    """Numbers of NPUs of one worker to try, smallest first."""
    if rules.gpu_count:
        return [rules.gpu_count] if rules.gpu_count <= slots else []
    return list(rules.divisors.allowed(1, slots))


def levels(rules: ResourceRules, slots: int) -> list[int]:
    """NPUs that every worker of a placement over several workers gives: what the sizes fix, else 1 and the
    powers of two by which the model divides."""
    if rules.per_worker:
        return [rules.per_worker] if rules.per_worker <= slots else []
    most = min(slots, rules.gpu_count) if rules.gpu_count else slots
    powers = [1 << n for n in range(most.bit_length())] if most else []
    return [n for n in powers if n == 1 or rules.divisors.allows(n)]


def slots_of(found: Npus, r: int, n: int, free: Sequence[int], tie_break: int) -> list[int]:
    """The n slots that worker r gives; whole blocks of equally free NPUs take turns."""
    order: list[int] = found.order[r].tolist()
    claim, eligible = found.claim[r].tolist(), found.eligible[r].tolist()
    last = order[n - 1]
    same = [s for s in order if eligible[s] and free[s] == free[last] and claim[s] == claim[last]]
    others = [s for s in order[:n] if s not in same]
    return sorted(others + block(sorted(same), n - len(others), tie_break))


def linked(fleet: Fleet, rows: Ints, code_of: Bools) -> Bools:
    """(R, S) NPUs (`code_of`) whose link is up."""
    up = np.zeros(code_of.shape, np.bool_)
    ids = fleet.gpu_id[rows]
    for r, s in np.argwhere(code_of).tolist():
        gpu = fleet.gpu_rows.get(int(ids[r, s]))
        up[r, s] = gpu is not None and npu_address(gpu) is not None
    return up
