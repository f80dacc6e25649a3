"""The selector for GGUF models of which some layers lie on GPUs of one worker, the others in its RAM."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.placement.context.cards import Cards
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation, Offload
from gpustackd.placement.selectors.gguf.layer_limit import with_limit
from gpustackd.placement.selectors.gguf.multi_gpu import SeveralGpusSelector


class PartialOffloadSelector(SeveralGpusSelector):
    """The most layers that one worker holds on its GPUs, as few as hold so many; the rest in its RAM."""

    kind = "partial"

    def look(self, rows: Ints) -> None:
        cards = self.context.cards(rows)
        asked = self.asked.layers
        if asked is not None:
            self.about[rows] = np.where(cards.usable.any(axis=1), asked, 0)
            return
        best = np.zeros(len(rows), np.int64)
        if not self.asked.split:
            pooled = np.broadcast_to(cards.unified[:, None], cards.free.shape)
            alone = np.where(cards.usable, self.splitter.about_alone(cards.free, pooled), 0)
            best = alone.max(axis=1)
            left = np.array([self.splitter.left(n) for n in range(self.asked.total)], np.int64)
            best[cards.ram < left[best]] = 0
        for r in np.flatnonzero(np.count_nonzero(cards.usable, axis=1) > 1).tolist():
            for slots in self.groups(cards, r):
                offered = int(cards.free[r, slots].sum())
                if len(slots) > 1 and self.splitter.at_most(offered) > best[r]:
                    rooms, order = self.rooms(cards, r, slots), self.order(cards, r, slots)
                    level = self.splitter.likely_deepest(rooms, order)
                    if level > best[r] and cards.ram[r] >= self.splitter.left(level):
                        best[r] = level
        self.about[rows] = best

    def levels_alone(self, cards: Cards, r: int) -> Ints:
        """(S,) the most layers that each card of a worker holds by itself; 0 = none."""
        usable, unified = cards.usable[r], bool(cards.unified[r])
        best = np.zeros(usable.shape, np.int64)
        if self.asked.split:
            return best
        if self.asked.layers is None:
            free = cards.free[r, usable]
            best[usable] = self.splitter.deepest_alone(free, np.full(free.shape, unified))
        else:
            best[usable] = self.asked.layers
        for n in set(best[best > 0].tolist()):
            level = self.splitter.alone(n)
            claim = level.devices[0].unified if unified else level.devices[0].vram
            ram = level.ram_unified + claim if unified else level.ram
            best[(best == n) & ((claim > cards.free[r]) | (ram > cards.ram[r]))] = 0
        return best

    def work_out(self, cards: Cards, r: int) -> tuple[int, GpuAllocation] | None:
        alone = self.levels_alone(cards, r)
        level = int(alone.max())
        best = self._alone(cards, r, int(alone.argmax()), level) if level else None
        if level and level == self.asked.layers:
            return (level, best) if best is not None else None
        for slots in self.groups(cards, r):
            offered = int(cards.free[r, slots].sum())
            if len(slots) < 2 or self.splitter.at_most(offered) <= level:
                continue
            rooms, order = self.rooms(cards, r, slots), self.order(cards, r, slots)
            if self.asked.layers is None:
                choosing = self.splitter.deepest(rooms, order)
            else:
                choosing = self.splitter.fewest(rooms, order, self.asked.layers)
            allocation = self.allocated(cards, r, slots, choosing)
            if allocation is not None and choosing is not None and choosing.plan.layers > level:
                best, level = allocation, choosing.plan.layers
        return (level, best) if best is not None else None

    def _alone(self, cards: Cards, r: int, slot: int, level: int) -> GpuAllocation:
        sized, pooled = self.splitter.alone(level), bool(cards.unified[r])
        share = sized.devices[0]
        return GpuAllocation(
            int(cards.positions[r]),
            (slot,),
            (share.unified if pooled else share.vram,),
            ram=sized.ram_unified if pooled else sized.ram,
            offload=Offload(level, self.asked.total),
        )

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        """Where one card is taken, others that hold as many layers take turns."""
        kept = self.offers[w]
        if not tie_break or len(kept.slots) != 1 or kept.offload is None:
            return kept
        cards = self.context.cards(np.array([w]))
        good = np.flatnonzero(self.levels_alone(cards, 0) == kept.offload.layers).tolist()
        return replace(kept, slots=(good[tie_break % len(good)],)) if good else kept

    def select(self, tie_break: int) -> Candidate | None:
        found = super().select(tie_break)
        return None if found is None else with_limit(self.fleet, self.asked, self.splitter, found)
