"""The selector for GGUF models whose layers lie on several GPUs of one worker, and what it shares with the
one that keeps some of them in RAM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.placement.context.cards import Cards
from gpustackd.placement.context.gpu_allocation import GpuAllocation, Offload
from gpustackd.placement.selectors.gguf.layer_split import Choosing, Room
from gpustackd.placement.selectors.gguf.single_gpu import LayeredSelector

FEW = 1000
"""Beyond any number of GPUs."""


class SeveralGpusSelector(LayeredSelector):
    """What the selectors with several GPUs of one worker share. What a worker offers is known about, by what
    layers add; exact sizes are asked for the workers alone that are the best by that."""

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.about = np.zeros(size, np.int32)
        """How good the offer of a worker is, more is better; 0 = none."""
        self.sure: Bools = np.zeros(size, np.bool_)
        """Whether the offer is worked out."""

    def compute(self, rows: Ints, passing: Ints) -> None:
        self._offering = None
        self.about[rows] = 0
        self.sure[rows] = False
        super().compute(rows, passing)

    @abstractmethod
    def work_out(self, cards: Cards, r: int) -> tuple[int, GpuAllocation] | None:
        """How good the offer of a worker really is, and what it takes."""

    @property
    def offering(self) -> Ints:
        """Positions with the best offers, all of them worked out; of these those with the fewest GPUs."""
        while self._offering is None:
            best = int(self.about.max(initial=0))
            idx = np.flatnonzero(self.about == best) if best else np.zeros(0, np.int64)
            unsure = idx[~self.sure[idx]]
            if len(unsure):
                self._settle(unsure)
            else:
                self._offering = idx[self.count[idx] == self.count[idx].min(initial=2**15 - 1)]
        return self._offering

    def _settle(self, rows: Ints) -> None:
        cards = self.context.cards(rows)
        offers: dict[int, GpuAllocation] = {}
        self.about[rows] = 0
        self.sure[rows] = True
        for r, w in enumerate(rows.tolist()):
            offer = self.work_out(cards, r)
            if offer is not None:
                self.about[w], offers[r] = offer
        self.keep(cards, offers)

    def groups(self, cards: Cards, r: int) -> Iterator[list[int]]:
        """Usable slots of one worker by GPU type, in the order of their indexes."""
        index = self.fleet.gpu_index[cards.positions[r]]
        usable = np.flatnonzero(cards.usable[r] & (cards.free[r] > 0)).tolist()
        for code in sorted({int(cards.type[r, s]) for s in usable}):
            yield sorted((s for s in usable if cards.type[r, s] == code), key=lambda s: int(index[s]))

    def rooms(self, cards: Cards, r: int, slots: Sequence[int]) -> list[Room]:
        unified = bool(cards.unified[r])
        return [(int(cards.free[r, s]), unified) for s in slots]

    def order(self, cards: Cards, r: int, slots: Sequence[int]) -> list[int]:
        """Positions in `slots`: the freest first, of these the one with less on it."""
        load = self.fleet.occupancy.gpu_occupants[cards.positions[r]]
        return sorted(range(len(slots)), key=lambda i: (-cards.free[r, slots[i]], load[slots[i]], i))

    def allocated(
        self, cards: Cards, r: int, slots: Sequence[int], choosing: Choosing | None
    ) -> GpuAllocation | None:
        """The allocation of a plan; None where the worker has not enough RAM."""
        if choosing is None:
            return None
        plan = choosing.plan
        unified = bool(cards.unified[r])
        ram = plan.level.ram_unified if unified else plan.level.ram
        if ram + (sum(plan.claims) if unified else 0) > cards.ram[r]:
            return None
        split = plan.counts if len(plan.counts) > 1 else None
        return GpuAllocation(
            int(cards.positions[r]),
            tuple(slots[i] for i in choosing.taken),
            plan.claims,
            ram=ram,
            offload=Offload(plan.layers, self.asked.total, split),
        )


class GgufMultiGpuSelector(SeveralGpusSelector):
    """As few GPUs of one worker as hold every layer."""

    kind = "one_worker"

    def is_hopeless(self) -> bool:
        return self.splitter.needed(self.asked.total) > self.fleet.largest[1]

    def look(self, rows: Ints) -> None:
        cards = self.context.cards(rows)
        total = self.asked.total
        enough = np.where(cards.usable, cards.free, 0).sum(axis=1) >= self.splitter.needed(total)
        for r in np.flatnonzero(enough).tolist():
            counts = [
                self.splitter.likely_fewest(self.rooms(cards, r, g), self.order(cards, r, g), total)
                for g in self.groups(cards, r)
            ]
            fewest = min((n for n in counts if n), default=0)
            self.about[rows[r]] = FEW - fewest if fewest else 0

    def work_out(self, cards: Cards, r: int) -> tuple[int, GpuAllocation] | None:
        best: GpuAllocation | None = None
        for slots in self.groups(cards, r):
            allocation = self.allocated(cards, r, slots, self.fewest(cards, r, slots))
            if allocation is not None and (best is None or len(allocation.slots) < len(best.slots)):
                best = allocation
        return (FEW - len(best.slots), best) if best is not None else None

    def fewest(self, cards: Cards, r: int, slots: Sequence[int]) -> Choosing | None:
        """As few of these cards as hold every layer."""
        rooms, order = self.rooms(cards, r, slots), self.order(cards, r, slots)
        return self.splitter.fewest(rooms, order, self.asked.total)

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        """Of cards that are as free as the last one taken others serve too: they take turns."""
        kept = self.offers[w]
        if not tie_break or self.asked.split:
            return kept
        cards = self.context.cards(np.array([w]))
        slots = next(g for g in self.groups(cards, 0) if kept.slots[0] in g)
        free = {s: int(cards.free[0, s]) for s in slots}
        least = min(free[s] for s in kept.slots)
        same = [s for s in slots if free[s] == least]
        missing = sum(free[s] == least for s in kept.slots)
        start = missing * (tie_break % max(len(same) // missing, 1))
        taken = {s for s in kept.slots if free[s] != least} | set(same[start : start + missing])
        mine = [s for s in slots if s in taken]
        plan = self.splitter.divided(self.rooms(cards, 0, mine), self.asked.total)
        choosing = Choosing(tuple(range(len(mine))), plan) if plan else None
        return self.allocated(cards, 0, mine, choosing) or kept
