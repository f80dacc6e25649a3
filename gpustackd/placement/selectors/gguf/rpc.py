"""The selector for GGUF models over several workers: a main worker, and GPUs of others served to it one by
one.

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
class RpcLayout:
    """A plan over workers: remote cards, then those of the main worker."""

    main: Main
    remotes: tuple[OfferedGpu, ...]
    own: tuple[OfferedGpu, ...]
    plan: LayerSplit


class RpcSelector(Uncached):
    """All layers, or where that is allowed as many as can be, over GPUs of several workers."""

    kind = "many_workers"

    def __init__(self, context: PlacementContext, ranker: Ranker, splitter: LayerSplitter) -> None:
        asked = context.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.context = context
        self.ranker = ranker
        self.asked: GgufRules = asked
        self.splitter = splitter
        self.offers = Offers(context, splitter)
        self.cut = False
        """Whether the last search ended for its budget, with workers left untried."""

    # -- choosing --------------------------------------------------------------------------------------------

    def select(self, tie_break: int) -> Candidate | None:
        rows = np.flatnonzero(self.context.bits == 0)
        layout = self.best(rows, tie_break)
        self.cut |= self.splitter.exhausted
        if layout is None:
            return None
        found = self.ranker.pick(
            [Candidate(allocations(layout, self.asked, self.offers.remote_ram), self.kind)], tie_break
        )
        return with_limit(self.context.fleet, self.asked, self.splitter, found)

    def best(self, rows: Ints, tie_break: int) -> RpcLayout | None:
        """The layout with the most layers, of these with the fewest GPUs, as far as the walk finds it."""
        self.splitter.begin()
        self.cut = False
        offered = self.offers.offered(rows)
        if not len(offered.mains) or not offered.remotes:
            return None
        if self.asked.whole:
            found = self._all(offered, self.asked.total, tie_break)
            if found is not None:
                return found
        if not self.asked.partial:
            return None
        if self.asked.layers is not None:
            return self._all(offered, self.asked.layers, tie_break)
        return self._most(offered, tie_break)

    # -- so many layers --------------------------------------------------------------------------------------

    def _all(self, offered: Offered, level: int, tie_break: int) -> RpcLayout | None:
        """The first main worker with which so many layers fit."""
        if offered.bound < self.splitter.needed(level):
            return None
        tried = 0
        for main in self.offers.different(offered, tie_break):
            others = [c for c in offered.remotes if c.position != main.position]
            if main.ram < self.splitter.left(level) or not self._could(main, others, level):
                continue
            if tried >= MOST_MAINS or self.splitter.exhausted:
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
        return sum(rooms) >= self.splitter.needed(level) and self.splitter.bound(rooms) >= level

    def _with(self, main: Main, others: Sequence[OfferedGpu], level: int) -> RpcLayout | None:
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
    ) -> RpcLayout | None:
        """Remote cards added one by one until the layers fit."""
        need = self.splitter.needed(level)
        rooms = [c.room for c in own]
        for count in range(1, min(MOST_DEVICES - len(own), len(others), level - len(own)) + 1):
            rooms.append(others[count - 1].room)
            if sum(rooms) >= need and self.splitter.bound(rooms) >= level:
                found = self._laid(main, others[:count], own, level)
                if found is not None:
                    return found
        return None

    def _fewer(self, found: RpcLayout, level: int) -> RpcLayout:
        """Every card left out once, the smallest first."""
        for card in sorted((*found.remotes, *found.own), key=lambda c: c.room):
            remotes = [c for c in found.remotes if c != card]
            own = [c for c in found.own if c != card]
            if remotes and own:
                found = self._laid(found.main, remotes, own, level) or found
        return found

    def _laid(
        self, main: Main, remotes: Sequence[OfferedGpu], own: Sequence[OfferedGpu], level: int
    ) -> RpcLayout | None:
        plan = self.splitter.divided([(c.room, c.unified) for c in (*remotes, *own)], level)
        if plan is None or not holds_ram(main, plan, len(own)):
            return None
        return RpcLayout(main, tuple(remotes), tuple(own), plan)

    # -- as many layers as can be ----------------------------------------------------------------------------

    def _most(self, offered: Offered, tie_break: int) -> RpcLayout | None:
        """The layout with the most layers: those are worked out first that hold most by what layers add."""
        likely: list[tuple[int, int, Main, list[OfferedGpu]]] = []
        top = 0
        for n, main in enumerate(self.offers.different(offered, tie_break)):
            others = [c for c in offered.remotes if c.position != main.position][
                : MOST_DEVICES - len(main.cards)
            ]
            most = self.splitter.bound([*main.rooms, *(c.room for c in others)])
            if not others or most < top or main.ram < self.splitter.left(most):
                continue
            if len(likely) >= MOST_MAINS:
                self.cut = True
                break
            level = self.splitter.likely_deepest(*_asked([*others, *main.cards], main))
            if level and main.ram >= self.splitter.left(level):
                likely.append((-level, n, main, others))
                top = max(top, level)
        best: RpcLayout | None = None
        for about, _, main, others in sorted(likely, key=lambda x: x[:2]):
            if best is not None and -about <= best.plan.layers:
                break
            found = self._deepest(main, others)
            if found is not None and (best is None or found.plan.layers > best.plan.layers):
                best = found
        return best

    def _deepest(self, main: Main, others: Sequence[OfferedGpu]) -> RpcLayout | None:
        devices = [*others, *main.cards]
        choosing = self.splitter.deepest(*_asked(devices, main))
        if choosing is None:
            return None
        taken = [devices[i] for i in choosing.taken]
        own = tuple(c for c in taken if c.position == main.position)
        far = tuple(c for c in taken if c.position != main.position)
        if not own or not far or not holds_ram(main, choosing.plan, len(own)):
            return None
        return RpcLayout(main, far, own, choosing.plan)


def _asked(devices: Sequence[OfferedGpu], main: Main) -> tuple[list[Room], list[int]]:
    """Devices as a splitter takes them, and the order in which they are given up, the last first."""
    order = sorted(
        range(len(devices)), key=lambda i: (-devices[i].room, devices[i].position != main.position, i)
    )
    return [(c.room, c.unified) for c in devices], order


def holds_ram(main: Main, plan: LayerSplit, own: int) -> bool:
    """Whether the main worker has the RAM; on unified memory for its devices, the last `own`, too."""
    if not main.unified:
        return plan.level.ram <= main.ram
    return plan.level.ram_unified + sum(plan.claims[-own:]) <= main.ram


def allocations(layout: RpcLayout, asked: GgufRules, remote_ram: int) -> tuple[GpuAllocation, ...]:
    """The main worker's allocation, then one for every remote GPU."""
    plan, far = layout.plan, len(layout.remotes)
    unified = layout.main.unified
    main = GpuAllocation(
        layout.main.position,
        tuple(c.slot for c in layout.own),
        plan.claims[far:],
        ram=plan.level.ram_unified if unified else plan.level.ram,
        offload=Offload(plan.layers, asked.total, plan.counts),
    )
    parts = [
        GpuAllocation(c.position, (c.slot,), (claim,), ram=remote_ram, layers=share.layers)
        for c, claim, share in zip(layout.remotes, plan.claims, plan.level.devices, strict=False)
    ]
    return (main, *parts)
