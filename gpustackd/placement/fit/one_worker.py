"""Several GPUs of one worker: how many, and in which order they are taken (selectors spec 9.3, step 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet import Bools, Ints
from gpustackd.placement.fit.cards import Cards, asks_ram, portions, ram_holds
from gpustackd.placement.fit.rules import Rules, Taking
from gpustackd.placement.tie import block


@dataclass(slots=True)
class Several:
    """Per worker position: how many cards of one type hold the model together. (R,) and (R, S)."""

    count: NDArray[np.int16]
    """(R,) number of cards; 0 = does not fit."""
    order: NDArray[np.intp]
    """(R, S) slots in the order in which they are taken."""
    booked: Ints
    """(R,) VRAM booked altogether."""
    claim: Ints
    """(R, S) VRAM booked on each slot if it is taken."""
    eligible: Bools
    """(R, S) slots that may take a part."""


def sizes(rules: Rules, slots: int) -> list[int]:
    """Numbers of GPUs to try, smallest first."""
    if rules.gpu_count:
        if not rules.compat:
            return [rules.gpu_count] if 2 <= rules.gpu_count <= slots else []
        # the peer goes on to the next number that divides, past the one asked for
        fitting = (n for n in range(rules.gpu_count, slots + 1) if rules.divisors.allows(n))
        first = next(fitting, None)
        return [] if first is None else [first]
    return [n for n in range(1 if rules.compat else 2, slots + 1) if rules.divisors.allows(n)]


def several(found: Cards, rules: Rules, code: int, load: NDArray[Any] | None = None) -> Several:
    """Look at the cards of type `code` of every worker; of cards that are equally free those with less
    `load` (R, S) are taken first."""
    mine = found.type == code
    enough, least = portions(found, rules, rules.compat and not rules.grouped)
    enough &= mine
    r, s = enough.shape
    free = np.where(enough, found.free, -1)
    order = np.argsort(-free, axis=1, kind="stable") if load is None else np.lexsort((load, -free), axis=1)
    at = np.arange(r)[:, None]
    free = free[at, order]
    claim = np.where(enough, least, 0)
    if rules.taking is Taking.SPLIT and rules.compat:  # the peer books all that is free
        claim = np.where(enough, found.free, 0)
    sums = np.cumsum(claim[at, order], axis=1)
    holds = _holds(rules, sums, free)
    tried = np.zeros(s, np.bool_)
    tried[[n - 1 for n in sizes(rules, s)]] = True
    holds &= tried
    holds &= free >= 0
    if rules.compat:
        holds &= (np.count_nonzero(mine, axis=1) >= 2)[:, None]
    last = holds.argmax(axis=1)
    rows = at[:, 0]
    fits = holds[rows, last]
    if rules.taking in (Taking.SPLIT, Taking.AT_LEAST) and not rules.compat:
        claim = np.maximum(claim, (-(-rules.vram // (last + 1)))[:, None])
        sums = np.cumsum(claim[at, order], axis=1)
    booked = sums[rows, last]
    if not rules.compat:
        if asks_ram(found, rules):
            fits &= ram_holds(found, rules, booked, found.ram, found.unified)
    elif rules.ram_floor:
        fits &= found.ram >= rules.ram_floor
    return Several(np.where(fits, last + 1, 0).astype(np.int16), order, booked, claim, enough)


def _holds(rules: Rules, sums: Ints, free: Ints) -> Bools:
    """(R, S) whether the first 1, 2, … cards in their order hold the model; both arrays are in that order."""
    if rules.taking is Taking.EACH:
        return free >= rules.vram
    if rules.taking is Taking.SHARE or (rules.compat and rules.taking is Taking.SPLIT):
        return sums >= rules.vram
    # the least free of the cards must hold an even part
    return free >= -(-rules.vram // np.arange(1, sums.shape[1] + 1))


def alike(found: Several, free: Ints) -> tuple[Bools, Bools]:
    """(R, S) slots that every choice takes, and slots that are as good as the last one taken: of these
    as many are taken as are missing. `free` (R, S) by slot."""
    rows = np.arange(len(found.count))
    last = found.order[rows, np.maximum(found.count - 1, 0)]
    same = (free == free[rows, last][:, None]) & (found.claim == found.claim[rows, last][:, None])
    same &= found.eligible
    taken = np.zeros(same.shape, np.bool_)
    np.put_along_axis(taken, found.order, np.arange(same.shape[1]) < found.count[:, None], axis=1)
    return taken & ~same, same


def chosen(forced: Sequence[int], same: Sequence[int], count: int, turn: int) -> list[int]:
    """Slots taken: all of `forced`, the rest in whole blocks of `same` that take turns."""
    return sorted([*forced, *block(same, count - len(forced), turn)])
