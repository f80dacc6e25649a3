"""Several GPUs of one worker: how many, and in which order they are taken (selectors spec 9.3, step 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet import Bools, Ints
from gpustackd.placement.fit.cards import Cards, portions, ram_holds
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


def several(found: Cards, rules: Rules, code: int, load: NDArray[np.float64] | None = None) -> Several:
    """Look at the cards of type `code` of every worker; of cards that are equally free those with less
    `load` (R, S) are taken first."""
    enough, least = portions(found, rules, rules.compat and not rules.grouped)
    enough &= found.type == code
    r, s = enough.shape
    free = np.where(enough, found.free, -1)
    order = np.argsort(-free, axis=1, kind="stable") if load is None else np.lexsort((load, -free), axis=1)
    have = np.count_nonzero(enough, axis=1)
    of_type = np.count_nonzero(found.type == code, axis=1)
    count = np.zeros(r, np.int16)
    booked = np.zeros(r, np.int64)
    claim = least
    in_order = np.take_along_axis(np.where(enough, least, 0), order, axis=1)
    free_in_order = np.take_along_axis(free, order, axis=1)
    if rules.taking is Taking.SPLIT and rules.compat:  # the peer books all that is free
        in_order = np.where(free_in_order > 0, free_in_order, 0)
        claim = np.where(enough, found.free, 0)
    sums = np.cumsum(in_order, axis=1)
    for n in sizes(rules, s):
        open_ = (count == 0) & (have >= n) & (of_type >= 2)
        if not open_.any():
            continue
        holds, total, each = _holds(found, rules, n, sums, in_order, free_in_order)
        holds &= open_
        count[holds] = n
        booked[holds] = total[holds]
        if each is not None:
            claim = np.where(holds[:, None], each, claim)
    return Several(count, order, booked, claim, enough)


def _holds(
    found: Cards, rules: Rules, n: int, sums: Ints, in_order: Ints, free: Ints
) -> tuple[Bools, Ints, Ints | None]:
    """Whether the first n cards of each worker hold the model, what they book together, and on each slot
    where that depends on n."""
    each: Ints | None = None
    ok: Bools
    total: Ints
    if rules.taking is Taking.SHARE or (rules.taking is Taking.SPLIT and rules.compat):
        total = sums[:, n - 1]
        ok = total >= rules.vram
    elif rules.taking is Taking.EACH:
        total = sums[:, n - 1]
        ok = free[:, n - 1] >= rules.vram
    else:
        part = -(-rules.vram // n)
        share = np.maximum(in_order, part)[:, :n]
        total = share.sum(axis=1)
        ok = np.all(free[:, :n] >= share, axis=1)
        each = np.maximum((found.total * found.share).astype(np.int64), part)
        if rules.taking is Taking.SPLIT:
            each = np.full(found.total.shape, part, np.int64)
    if rules.compat:
        if rules.ram_floor:
            ok = ok & (found.ram >= rules.ram_floor)
    else:
        ok = ok & ram_holds(found, rules, total, found.ram, found.unified)
    return ok, total, each


def chosen(found: Several, r: int, free: Sequence[int], turn: int, compat: bool) -> list[int]:
    """Slots that worker r of the rows takes. Among cards that are equally free, whole blocks take turns."""
    n = int(found.count[r])
    order: list[int] = found.order[r].tolist()
    if compat:
        return order[:n]
    claim: list[int] = found.claim[r].tolist()
    eligible: list[bool] = found.eligible[r].tolist()
    last = order[n - 1]
    same = [s for s in order if eligible[s] and free[s] == free[last] and claim[s] == claim[last]]
    others = [s for s in order[:n] if s not in same]
    return sorted(others + block(sorted(same), n - len(others), turn))
