"""Places on one worker for engines that take whole GPUs or shares of them: one GPU, several, or none."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Ints
from gpustackd.placement.context.cards import Cards, single_card_fits
from gpustackd.placement.context.gpu_allocation import GpuAllocation
from gpustackd.placement.rules.resource_rules import ClaimPolicy
from gpustackd.placement.scoring.ranker import EPSILON, Floats
from gpustackd.placement.scoring.soft_scores import Part
from gpustackd.placement.selectors.base.fleet_selector import SingleWorkerSelector
from gpustackd.placement.selectors.base.gpu_sets import Several, alike, chosen, several


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


class SingleGpuSelector(SingleWorkerSelector):
    """One GPU that holds the model by itself."""

    kind = "one_gpu"

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.slots = Bitmap(size, self.fleet.slots)
        """Slots that share the best value and book the same."""

    def is_hopeless(self) -> bool:
        return self.rules.vram > self.fleet.largest[0] * self.rules.largest_fraction

    def look(self, rows: Ints) -> None:
        cards = self.context.cards(rows)
        fits, claim = single_card_fits(cards, self.rules)
        if not fits.any():
            return
        values = self.scorer.cards(self.ranker.view(cards, claim, claim))
        np.copyto(values, -np.inf, where=~fits)
        top = values.max(axis=1)
        good = values >= (top - EPSILON)[:, None]
        booked = claim[np.arange(len(rows)), good.argmax(axis=1)]
        good &= claim == booked[:, None]
        self.count[rows] = top > -np.inf
        self.value[rows] = top
        self.booked[rows] = booked
        self.slots.put(rows, good)

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        good = self.slots.of(w)
        slot = good[tie_break % len(good)]
        kind = self.fleet.types[int(self.fleet.gpu_type[w, slot])]
        return GpuAllocation(w, (slot,), (self.rules.claim(int(self.fleet.vram_total[w, slot]), kind, 1),))


class CpuSelector(SingleWorkerSelector):
    """No GPU: a worker with enough RAM."""

    kind = "cpu"

    def look(self, rows: Ints) -> None:
        self.fleet.renew()
        serves = self.fleet.ram_free[rows] >= self.rules.ram_floor
        if self.rules.by_cpu is not None:
            serves &= self.rules.by_cpu(self.fleet, rows)
        self.count[rows] = serves

    def rank(self, idx: Ints) -> tuple[Floats, Mapping[str, Part]]:
        return self.ranker.rank(idx, self.value[idx], bare=True)

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        return GpuAllocation(w)


class MultiGpuSelector(SingleWorkerSelector):
    """Several GPUs of one type of one worker, as few as hold the model."""

    kind = "one_worker"

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.forced = Bitmap(size, self.fleet.slots)
        """Slots that are taken in any case."""
        self.same = Bitmap(size, self.fleet.slots)
        """Slots of which as many are taken as are missing."""

    def is_hopeless(self) -> bool:
        return (
            self.rules.claim_policy is not ClaimPolicy.EACH
            and self.rules.vram > self.fleet.largest[1] * self.rules.largest_fraction
        )

    def look(self, rows: Ints) -> None:
        cards = self.context.cards(rows)
        load = self.fleet.occupancy.gpu_occupants[rows]
        for code in range(len(self.fleet.types)):
            offer = several(cards, self.rules, code, load)
            count = self.count[rows]
            better = (offer.count > 0) & ((count == 0) | (offer.count < count))
            if not better.any():
                continue
            at = rows[better]
            self.count[at] = offer.count[better]
            self.value[at] = self._value(cards, offer)[better]
            self.booked[at] = offer.booked[better]
            forced, same = alike(offer, cards.free)
            self.forced.put(at, forced[better])
            self.same.put(at, same[better])

    def _value(self, cards: Cards, offer: Several) -> Floats:
        view = self.ranker.view(cards, offer.claim, offer.booked[:, None])
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

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        n = int(self.count[w])
        slots = chosen(self.forced.of(w), self.same.of(w), n, tie_break)
        slots.sort(key=lambda s: int(self.fleet.gpu_index[w, s]))
        kind = self.fleet.types[int(self.fleet.gpu_type[w, slots[0]])]
        claims = tuple(self.rules.claim(int(self.fleet.vram_total[w, s]), kind, n) for s in slots)
        return GpuAllocation(w, tuple(slots), claims)
