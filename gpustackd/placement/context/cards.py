"""Cards of some workers as arrays: what is free on them and what one of them would be booked.

Everything here is about R worker positions at once, (R, S) for their GPU slots. A single worker is R = 1,
the whole fleet R = W: the walk over the whole fleet and the few workers that changed are one implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Cards:
    """GPU slots of worker `positions`. Sizes in bytes."""

    positions: Ints
    """(R,) worker positions."""
    free: Ints
    """(R, S) free VRAM; 0 where unusable."""
    total: Ints
    """(R, S) total VRAM; -1 where unknown or where no card is."""
    share: Floats
    """(R, S) u of the card's type, or one number for all."""
    type: NDArray[np.int32]
    """(R, S) type code, -1 = no card."""
    usable: Bools
    """(R, S) there, open, of known size, not over-committed, and not excluded."""
    ram: Ints
    """(R,) free RAM."""
    unified: Bools
    """(R,) one pool for RAM and VRAM."""

    ratio: Floats
    """(R, S) part of the card that is free."""


def read_cards(fleet: Fleet, rows: Ints, rules: ResourceRules) -> Cards:
    """The cards of these worker positions as the search may use them."""
    fleet.renew()
    kind = fleet.gpu_type[rows]
    if rules.share_of_type:
        by_code = np.array([rules.memory_fraction(t) for t in fleet.types] or [0.0])
        share = np.where(kind >= 0, by_code[kind], 0.0)
    else:
        share = np.asarray(rules.share)
    free, usable, ratio = fleet.free[rows], fleet.usable[rows], fleet.ratio[rows]
    eligible = rules.devices(fleet, rows) if rules.devices is not None else None
    if eligible is not None:
        free, usable, ratio = free * eligible, usable & eligible, ratio * eligible
    return Cards(
        rows, free, fleet.vram_total[rows], share, kind, usable, fleet.ram_free[rows], fleet.unified[rows],
        ratio,
    )  # fmt: skip


def single_card_fits(cards: Cards, rules: ResourceRules) -> tuple[Bools, Ints]:
    """Which cards hold the model by themselves, and what would be booked on each: both (R, S)."""
    v = rules.vram
    claim: Ints
    fits: Bools
    if rules.claim_policy is ClaimPolicy.SHARE:
        portion = cards.total * cards.share
        claim = portion.astype(np.int64)
        fits = portion >= v
        if not fits.any():
            return fits, claim
        fits &= cards.ratio >= cards.share
        fits &= cards.share > 0
    elif rules.claim_policy is ClaimPolicy.AT_LEAST:
        claim = np.maximum((cards.total * cards.share).astype(np.int64), v)
        fits = cards.free >= claim
    else:
        claim = np.full(cards.free.shape, v, np.int64)
        fits = cards.free >= v
    fits &= cards.usable
    fits &= claim <= cards.free
    if asks_ram(cards, rules):
        fits &= ram_holds(cards, rules, claim, cards.ram[:, None], cards.unified[:, None])
    return fits, claim


def asks_ram(cards: Cards, rules: ResourceRules) -> bool:
    """Whether RAM can stand in the way at all."""
    return bool(rules.ram or rules.ram_static or rules.ram_ratio or cards.unified.any())


def ram_holds(cards: Cards, rules: ResourceRules, booked: Ints, ram: Ints, unified: Bools) -> Bools:
    """Whether a worker has the RAM for a part that books so much VRAM there (on unified memory both come
    from one pool). `booked`, `ram` and `unified` have one shape, or broadcast to it."""
    claim: Ints | int
    if rules.ram_static or not rules.ram_ratio:
        claim = rules.ram_static or 0
    else:
        claim = (booked * rules.ram_ratio).astype(np.int64)
    asked = np.maximum(claim, rules.ram)
    held: Bools = (asked == 0) | (asked <= ram)
    if cards.unified.any():
        held = held & (~unified | (booked + claim <= ram))
    return held


def portions(cards: Cards, rules: ResourceRules) -> tuple[Bools, Ints]:
    """Which cards may take a part in a placement over several cards, and the least booked on each: (R, S).

    Where the need is split (`SPLIT`, `AT_LEAST`), what is booked depends on how many cards share it.
    """
    claim: Ints
    enough: Bools
    if rules.claim_policy is ClaimPolicy.SHARE:
        claim = (cards.total * cards.share).astype(np.int64)
        enough = cards.ratio >= cards.share
        enough &= cards.share > 0
        enough &= claim <= cards.free
    elif rules.claim_policy is ClaimPolicy.SPLIT:
        claim = np.zeros(cards.free.shape, np.int64)
        enough = cards.free > 0
    elif rules.claim_policy is ClaimPolicy.AT_LEAST:
        claim = (cards.total * cards.share).astype(np.int64)
        enough = (cards.free > 0) & (cards.free >= claim)
    else:
        claim = np.full(cards.free.shape, rules.vram, np.int64)
        enough = cards.free >= rules.vram
    return enough & cards.usable, claim
