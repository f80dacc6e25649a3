"""Several GPUs of one worker: how many, and in which order they are taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.placement.context.cards import Cards, asks_ram, portions, ram_holds
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.scoring.tie_break import block


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


def sizes(rules: ResourceRules, slots: int) -> list[int]:
    """Numbers of GPUs to try, smallest first."""
    if rules.gpu_count:
        return [rules.gpu_count] if 2 <= rules.gpu_count <= slots else []
    return list(rules.divisors.allowed(2, slots))


def several(
    cards: Cards,
    rules: ResourceRules,
    code: int,
    load: NDArray[Any] | None = None,
    within: Bools | None = None,
) -> Several:
    """Look at the cards of type `code` of every worker (those in `within`, (R, S)); of cards that are
    equally free those with less `load` (R, S) are taken first."""
    if rules.grouped and within is None:
        return _by_groups(cards, rules, code, load)
    mine = cards.type == code
    enough, least = portions(cards, rules)
    enough &= mine
    if within is not None:
        enough &= within
    r, s = enough.shape
    free = np.where(enough, cards.free, -1)
    order = np.argsort(-free, axis=1, kind="stable") if load is None else np.lexsort((load, -free), axis=1)
    at = np.arange(r)[:, None]
    free = free[at, order]
    claim = np.where(enough, least, 0)
    sums = np.cumsum(claim[at, order], axis=1)
    holds = _holds(rules, sums, free)
    tried = np.zeros(s, np.bool_)
    tried[[n - 1 for n in sizes(rules, s)]] = True
    holds &= tried
    holds &= free >= 0
    last = holds.argmax(axis=1)
    rows = at[:, 0]
    fits = holds[rows, last]
    if rules.claim_policy in (ClaimPolicy.SPLIT, ClaimPolicy.AT_LEAST):
        claim = np.maximum(claim, (-(-rules.vram // (last + 1)))[:, None])
        sums = np.cumsum(claim[at, order], axis=1)
    booked = sums[rows, last]
    if asks_ram(cards, rules):
        fits &= ram_holds(cards, rules, booked, cards.ram, cards.unified)
    return Several(np.where(fits, last + 1, 0).astype(np.int16), order, booked, claim, enough)


def _holds(rules: ResourceRules, sums: Ints, free: Ints) -> Bools:
    """(R, S) whether the first 1, 2, … cards in their order hold the model; both arrays are in that order."""
    if rules.claim_policy is ClaimPolicy.SHARE:
        return sums >= rules.vram
    if rules.claim_policy is ClaimPolicy.EACH:
        return free >= rules.vram
    # the least free of the cards must hold an even part
    return free >= -(-rules.vram // np.arange(1, sums.shape[1] + 1))


def _by_groups(cards: Cards, rules: ResourceRules, code: int, load: NDArray[Any] | None) -> Several:
    """Cards with about the same free memory only, the smallest group that serves."""
    enough, _ = portions(cards, rules)
    grouped = (cards.type == code) & cards.usable & enough  # a card that is too full takes no part
    most = np.where(grouped, cards.free, 0).max(axis=1)
    least = np.where(grouped, cards.free, most[:, None]).min(axis=1)
    if np.all(least >= 0.9 * most):
        return several(cards, rules, code, load, grouped)
    groups = memory_groups(cards.free, grouped)
    r, s = groups.shape
    result = Several(
        np.zeros(r, np.int16), np.tile(np.arange(s), (r, 1)), np.zeros(r, np.int64),
        np.zeros((r, s), np.int64), np.zeros((r, s), np.bool_),
    )  # fmt: skip
    for k in range(int(groups.max(initial=-1)) + 1):
        members = groups == k
        fits = (result.count == 0) & (np.count_nonzero(members, axis=1) >= 2)
        fits &= ~np.any(members & ~enough, axis=1)
        if not fits.any():
            continue
        offer = several(cards, rules, code, load, members & fits[:, None])
        new = offer.count > 0
        for name in ("count", "order", "booked", "claim", "eligible"):
            getattr(result, name)[new] = getattr(offer, name)[new]
    return result


def memory_groups(free: Ints, members: Bools) -> NDArray[np.int16]:
    """(R, S) number of each card's group, -1 outside: ascending by free memory, a group ends where its
    smallest member has less than nine tenths of the next one."""
    groups: NDArray[np.int16] = np.full(free.shape, -1, np.int16)
    counted = members & (free > 0)
    order = np.argsort(np.where(counted, free, np.iinfo(np.int64).max), axis=1, kind="stable")
    rows = np.arange(len(free))
    number = np.full(len(free), -1, np.int16)
    smallest = np.zeros(len(free))
    for n in range(free.shape[1]):
        slot = order[:, n]
        here = counted[rows, slot]
        if not here.any():
            break
        size = free[rows, slot]
        fresh = here & ((number < 0) | (smallest < 0.9 * size))
        number[fresh] += 1
        smallest[fresh] = size[fresh]
        groups[rows[here], slot[here]] = number[here]
    return groups


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


def chosen(forced: Sequence[int], same: Sequence[int], count: int, tie_break: int) -> list[int]:
    """Slots taken: all of `forced`, the rest in whole blocks of `same` that take turns."""
    return sorted([*forced, *block(same, count - len(forced), tie_break)])
