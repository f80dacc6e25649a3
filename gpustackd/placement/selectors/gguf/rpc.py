"""The step for GGUF models over several workers: a main worker, and GPUs of others served to it one by one.

Remote GPUs come first among the devices, the largest first; they are added until the layers fit, then each is
left out once to see whether it was needed. Every worker is tried as the main one, the one that offers most
first. So the work grows with workers and devices, never with their combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES
from gpustackd.errors import BadRow
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation, Offload
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.rules.resource_rules import GgufRules
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.selectors.base.selector import Uncached
from gpustackd.placement.selectors.gguf.layer_limit import with_limit
from gpustackd.placement.selectors.gguf.layer_split import LayerSplit, LayerSplitter, Room
from gpustackd.placement.selectors.gguf.rpc_offers import Main, Offered, OfferedGpu, Offers

MOST_MAINS = 64
"""Workers that are tried as the main one, those left out that could not serve by what they offer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan over workers: remote cards, then those of the main worker."""

    main: Main
    remotes: tuple[OfferedGpu, ...]
    own: tuple[OfferedGpu, ...]
    plan: LayerSplit


class RpcSelector(Uncached):
    """All layers, or where that is allowed as many as can be, over GPUs of several workers."""

    kind = "many_workers"

    def __init__(self, context: PlacementContext, ranker: Ranker, planner: LayerSplitter) -> None:
        asked = context.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.context = context
        self.ranker = ranker
        self.asked: GgufRules = asked
        self.planner = planner
        self.offers = Offers(context, planner)
        self.cut = False
        """Whether the last search ended for its budget, with workers left untried."""

    # -- choosing --------------------------------------------------------------------------------------------

    def select(self, tie_break: int) -> Candidate | None:
        rows = np.flatnonzero(self.context.bits == 0)
        layout = self.best(rows, tie_break)
        self.cut |= self.planner.exhausted
        if layout is None:
            return None
        found = self.ranker.pick(
            [Candidate(seats(layout, self.asked, self.offers.remote_ram), self.kind)], tie_break
        )
        return with_limit(self.context.fleet, self.asked, self.planner, found)

    def best(self, rows: Ints, tie_break: int) -> Layout | None:
        """The layout with the most layers, of these with the fewest GPUs, as far as the walk finds it."""
        self.planner.begin()
        self.cut = False
        there = self.offers.offered(rows)
        if not len(there.mains) or not there.remotes:
            return None
        if self.asked.whole:
            found = self._all(there, self.asked.total, tie_break)
            if found is not None:
                return found
        if not self.asked.partial:
            return None
        if self.asked.layers is not None:
            return self._all(there, self.asked.layers, tie_break)
        return self._most(there, tie_break)

    # -- so many layers --------------------------------------------------------------------------------------

    def _all(self, there: Offered, level: int, tie_break: int) -> Layout | None:
        """The first main worker with which so many layers fit."""
        if there.bound < self.planner.needed(level):
            return None
        tried = 0
        for main in self.offers.different(there, tie_break):
            others = [c for c in there.remotes if c.w != main.w]
            if main.ram < self.planner.left(level) or not self._could(main, others, level):
                continue
            if tried >= MOST_MAINS or self.planner.exhausted:
                self.cut = True
                break
            tried += 1
            found = self._with(main, others, level)
            if found is not None:
                return self._fewer(found, level)
        return None

    def _could(self, main: Main, others: Sequence[OfferedGpu], level: int) -> bool:
        """Whether the largest cards of it and of others could hold so many layers at most."""
        rooms = sorted((*main.rooms, *(c.room for c in others)), reverse=True)[:MOST_DEVICES]
        return sum(rooms) >= self.planner.needed(level) and self.planner.bound(rooms) >= level

    def _with(self, main: Main, others: Sequence[OfferedGpu], level: int) -> Layout | None:
        """All of its own cards with as few of others as do; else fewer of its own, the largest of them."""
        largest = sorted(main.cards, key=lambda c: (-c.room, c.index))
        for count in range(len(largest), 0, -1):
            own = sorted(largest[:count], key=lambda c: c.index)
            found = self._added(main, own, others, level)
            if found is not None:
                return found
        return None

    def _added(
        self, main: Main, own: Sequence[OfferedGpu], others: Sequence[OfferedGpu], level: int
    ) -> Layout | None:
        """Remote cards added one by one until the layers fit."""
        need = self.planner.needed(level)
        rooms = [c.room for c in own]
        for count in range(1, min(MOST_DEVICES - len(own), len(others), level - len(own)) + 1):
            rooms.append(others[count - 1].room)
            if sum(rooms) >= need and self.planner.bound(rooms) >= level:
                found = self._laid(main, others[:count], own, level)
                if found is not None:
                    return found
        return None

    def _fewer(self, found: Layout, level: int) -> Layout:
        """Every card left out once, the smallest first."""
        for card in sorted((*found.remotes, *found.own), key=lambda c: c.room):
            remotes = [c for c in found.remotes if c != card]
            own = [c for c in found.own if c != card]
            if remotes and own:
                found = self._laid(found.main, remotes, own, level) or found
        return found

    def _laid(
        self, main: Main, remotes: Sequence[OfferedGpu], own: Sequence[OfferedGpu], level: int
    ) -> Layout | None:
        plan = self.planner.divided([(c.room, c.unified) for c in (*remotes, *own)], level)
        if plan is None or not holds_ram(main, plan, len(own)):
            return None
        return Layout(main, tuple(remotes), tuple(own), plan)

    # -- as many layers as can be ----------------------------------------------------------------------------

    def _most(self, there: Offered, tie_break: int) -> Layout | None:
        """The layout with the most layers: those are worked out first that hold most by what layers add."""
        likely: list[tuple[int, int, Main, list[OfferedGpu]]] = []
        top = 0
        for n, main in enumerate(self.offers.different(there, tie_break)):
            others = [c for c in there.remotes if c.w != main.w][: MOST_DEVICES - len(main.cards)]
            most = self.planner.bound([*main.rooms, *(c.room for c in others)])
            if not others or most < top or main.ram < self.planner.left(most):
                continue
            if len(likely) >= MOST_MAINS:
                self.cut = True
                break
            level = self.planner.likely_deepest(*_asked([*others, *main.cards], main))
            if level and main.ram >= self.planner.left(level):
                likely.append((-level, n, main, others))
                top = max(top, level)
        best: Layout | None = None
        for about, _, main, others in sorted(likely, key=lambda x: x[:2]):
            if best is not None and -about <= best.plan.layers:
                break
            found = self._deepest(main, others)
            if found is not None and (best is None or found.plan.layers > best.plan.layers):
                best = found
        return best

    def _deepest(self, main: Main, others: Sequence[OfferedGpu]) -> Layout | None:
        devices = [*others, *main.cards]
        choosing = self.planner.deepest(*_asked(devices, main))
        if choosing is None:
            return None
        taken = [devices[i] for i in choosing.taken]
        own = tuple(c for c in taken if c.w == main.w)
        far = tuple(c for c in taken if c.w != main.w)
        if not own or not far or not holds_ram(main, choosing.plan, len(own)):
            return None
        return Layout(main, far, own, choosing.plan)


def _asked(devices: Sequence[OfferedGpu], main: Main) -> tuple[list[Room], list[int]]:
    """Devices as a planner takes them, and the order in which they are given up, the last first."""
    order = sorted(range(len(devices)), key=lambda i: (-devices[i].room, devices[i].w != main.w, i))
    return [(c.room, c.unified) for c in devices], order


def holds_ram(main: Main, plan: LayerSplit, own: int) -> bool:
    """Whether the main worker has the RAM; on unified memory for its devices, the last `own`, too."""
    if not main.unified:
        return plan.level.ram <= main.ram
    return plan.level.ram_unified + sum(plan.claims[-own:]) <= main.ram


def seats(layout: Layout, asked: GgufRules, remote_ram: int) -> tuple[GpuAllocation, ...]:
    """The main seat, then one for every remote GPU."""
    plan, far = layout.plan, len(layout.remotes)
    unified = layout.main.unified
    main = GpuAllocation(
        layout.main.w,
        tuple(c.slot for c in layout.own),
        plan.claims[far:],
        ram=plan.level.ram_unified if unified else plan.level.ram,
        offload=Offload(plan.layers, asked.total, plan.counts),
    )
    parts = [
        GpuAllocation(c.w, (c.slot,), (claim,), ram=remote_ram, layers=share.layers)
        for c, claim, share in zip(layout.remotes, plan.claims, plan.level.devices, strict=False)
    ]
    return (main, *parts)
