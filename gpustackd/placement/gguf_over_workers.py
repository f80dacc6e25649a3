"""The step for GGUF models over several workers: a main worker, and GPUs of others served to it one by one.

Remote GPUs come first among the devices, the largest first; they are added until the layers fit, then each is
left out once to see whether it was needed. Every worker is tried as the main one, the one that offers most
first. So the work grows with workers and devices, never with their combinations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpustackd.domain.fleet import Bools, Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.errors import BadRow
from gpustackd.placement import gguf_lacking
from gpustackd.placement.fit.cards import cards
from gpustackd.placement.fit.gguf import MOST_DEVICES, Gguf
from gpustackd.placement.fit.gguf_plan import Plan, Planner
from gpustackd.placement.fit.seat import Choice, Offload, Seat

if TYPE_CHECKING:
    from gpustackd.placement.search import Search

MOST_MAINS = 256
"""Workers that are tried as the main one for some of the layers; for all of them there is no limit."""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that may take part; `room` is what it may be filled with. Bytes."""

    w: int
    slot: int
    index: int
    code: int
    room: int
    unified: bool


@dataclass(frozen=True, slots=True)
class Main:
    """A worker as the main one, with its cards in the order of their indexes."""

    w: int
    ram: int
    unified: bool
    cards: tuple[Card, ...]

    @property
    def offer(self) -> int:
        return sum(c.room for c in self.cards)

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for workers that serve alike."""
        return (self.offer, self.ram, self.unified, tuple(c.room for c in self.cards))


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan over workers: remote cards, then those of the main worker."""

    main: Main
    remotes: tuple[Card, ...]
    own: tuple[Card, ...]
    plan: Plan


class LayersOverWorkers:
    """All layers, or where that is allowed as many as can be, over GPUs of several workers."""

    step = "many_workers"

    def __init__(self, search: Search, planner: Planner) -> None:
        asked = search.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.search = search
        self.asked: Gguf = asked
        self.planner = planner
        self.cut = False
        """Whether the last search ended for its budget, with workers left untried."""
        self.bound = 0
        """What the largest cards that one instance can take offer together."""

    # -- choosing --------------------------------------------------------------------------------------------

    def choose(self, turn: int) -> Choice | None:
        self.search.refresh()
        rows = np.flatnonzero(self.search.bits == 0)
        layout = self.best(rows, turn)
        self.cut |= self.planner.exhausted
        if layout is None:
            return None
        found = self.search.pick([Choice(seats(layout, self.asked, self.remote_ram), self.step)], turn)
        return gguf_lacking.limited(self, found)

    @property
    def remote_ram(self) -> int:
        return self.search.policy.rpc_ram

    def best(self, rows: Ints, turn: int) -> Layout | None:
        """The layout with the most layers, of these with the fewest GPUs, as far as the walk finds it."""
        self.planner.begin()
        self.cut = False
        mains, remotes = self.offered(rows)
        if len(mains) < 1 or not remotes:
            return None
        mains = turned(mains, turn)
        if self.asked.whole:
            found = self._all(mains, remotes, self.asked.total)
            if found is not None:
                return found
        if not self.asked.partial:
            return None
        if self.asked.layers is not None:
            return self._all(mains, remotes, self.asked.layers)
        return self._most(mains, remotes)

    # -- what there is ---------------------------------------------------------------------------------------

    def offered(self, rows: Ints) -> tuple[list[Main], list[Card]]:
        """Workers that may be the main one, those that offer most first; the largest cards as remote ones."""
        found = cards(self.search.fleet, rows, self.search.rules)
        per_worker = np.maximum(np.count_nonzero(found.usable, axis=1), 1)
        least = self.least_room()
        ram_left = np.maximum(found.ram - self.remote_ram, -1)
        pooled = np.where(found.unified, (found.ram - per_worker * self.remote_ram) // per_worker, 2**62)
        room = np.minimum(found.free, pooled[:, None])
        served = found.usable & (ram_left >= 0)[:, None] & (room >= least)
        own = found.usable & (found.free >= least)
        mains = [
            self._main(int(w), found.free[r], own[r], int(found.ram[r]))
            for r, w in enumerate(rows.tolist())
            if own[r].any()
        ]
        self.bound = int(np.sort(found.free[own])[-MOST_DEVICES:].sum())
        mains.sort(key=lambda m: (-m.offer, self.search.fleet.worker_id[m.w]))
        rank = {m.w: n for n, m in enumerate(mains)}
        flat = np.argwhere(served)
        keep = MOST_DEVICES + self.search.fleet.slots
        sizes = room[served]
        if len(flat) > keep:
            limit = np.partition(sizes, len(sizes) - keep)[len(sizes) - keep]
            flat = flat[sizes >= limit]
        remotes = [self._card(int(rows[r]), int(s), int(room[r, s])) for r, s in flat.tolist()]
        remotes.sort(key=lambda c: (-c.room, rank.get(c.w, len(rank)), c.index))
        return mains, remotes

    def _inner_rest(self) -> int:
        """What a device takes at least beside layers."""
        own, pooled = (self.planner.rests(3, self.asked.total, unified=u)[1] for u in (False, True))
        return min(own, pooled)

    def least_room(self) -> int:
        """What a device must have to hold one layer."""
        return self._inner_rest() + self.planner.layers.least

    def _main(self, w: int, free: Ints, own: Bools, ram: int) -> Main:
        """Its cards of the type that offers most together."""
        by_type: dict[int, list[Card]] = {}
        for s in np.flatnonzero(own).tolist():
            card = self._card(w, s, int(free[s]))
            by_type.setdefault(card.code, []).append(card)
        mine = max(by_type.values(), key=lambda some: sum(c.room for c in some))
        if len(mine) >= MOST_DEVICES:
            mine = sorted(mine, key=lambda c: (-c.room, c.index))[: MOST_DEVICES - 1]
        mine.sort(key=lambda c: c.index)
        return Main(w, ram, bool(self.search.fleet.unified[w]), tuple(mine))

    def _card(self, w: int, s: int, room: int) -> Card:
        fleet = self.search.fleet
        return Card(w, s, int(fleet.gpu_index[w, s]), int(fleet.gpu_type[w, s]), room, bool(fleet.unified[w]))

    # -- so many layers --------------------------------------------------------------------------------------

    def _all(self, mains: Sequence[Main], remotes: Sequence[Card], level: int) -> Layout | None:
        """The first main worker with which so many layers fit."""
        need = self.planner.needed(level)
        if self.bound < need:
            return None
        for main in mains:
            others = [c for c in remotes if c.w != main.w]
            found = self._with(main, others, level)
            if found is not None:
                return found
            if self.planner.exhausted:
                return None
        return None

    def _with(self, main: Main, others: Sequence[Card], level: int) -> Layout | None:
        need = self.planner.needed(level)
        own = main.cards
        found = self._added(main, own, others, level, need)
        if found is None and len(own) > 1:
            # as many devices as may be, but larger ones
            several = sorted((*own, *others), key=lambda c: (-c.room, c.w != main.w))[:MOST_DEVICES]
            mine = tuple(c for c in own if c in several) or (max(own, key=lambda c: c.room),)
            if len(mine) < len(own):
                found = self._added(main, mine, others, level, need)
        return self._fewer(found, level) if found is not None else None

    def _added(
        self, main: Main, own: Sequence[Card], others: Sequence[Card], level: int, need: int
    ) -> Layout | None:
        """Remote cards added one by one until the layers fit."""
        offered = sum(c.room for c in own)
        most = min(MOST_DEVICES - len(own), len(others), level - len(own))
        for count in range(1, most + 1):
            offered += others[count - 1].room
            if offered >= need:
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

    def _laid(self, main: Main, remotes: Sequence[Card], own: Sequence[Card], level: int) -> Layout | None:
        plan = self.planner.divided([(c.room, c.unified) for c in (*remotes, *own)], level)
        if plan is None or not holds_ram(main, plan, len(own)):
            return None
        return Layout(main, tuple(remotes), tuple(own), plan)

    # -- as many layers as can be ----------------------------------------------------------------------------

    def _most(self, mains: Sequence[Main], remotes: Sequence[Card]) -> Layout | None:
        best: Layout | None = None
        level = tried = 0
        rest = self._inner_rest()
        for main in mains:
            others = [c for c in remotes if c.w != main.w][: MOST_DEVICES - len(main.cards)]
            together = main.offer + sum(c.room for c in others) - rest * (len(others) + len(main.cards))
            if not others or self.planner.at_most(together) <= level:
                continue
            if tried >= MOST_MAINS or self.planner.exhausted:
                self.cut = True
                break
            tried += 1
            devices = [*others, *main.cards]
            rooms = [(c.room, c.unified) for c in devices]
            order = sorted(range(len(devices)), key=lambda i: (-devices[i].room, devices[i].w != main.w, i))
            choosing = self.planner.deepest(rooms, order)
            if choosing is None or choosing.plan.layers <= level:
                continue
            taken = [devices[i] for i in choosing.taken]
            own = tuple(c for c in taken if c.w == main.w)
            far = tuple(c for c in taken if c.w != main.w)
            if own and far and holds_ram(main, choosing.plan, len(own)):
                best, level = Layout(main, far, own, choosing.plan), choosing.plan.layers
        return best

    # -- saying --------------------------------------------------------------------------------------------

    def listing(self, rows: Ints) -> Iterator[tuple[Seat, ...]]:
        """The one layout that is chosen."""
        layout = self.best(rows, 0)
        if layout is not None:
            yield seats(layout, self.asked, self.remote_ram)

    def lacking(self, rows: Ints) -> tuple[list[Reason], Cure]:
        return gguf_lacking.many_workers(self, rows), Cure.CAPACITY


def holds_ram(main: Main, plan: Plan, own: int) -> bool:
    """Whether the main worker has the RAM; on unified memory for its devices, the last `own`, too."""
    if not main.unified:
        return plan.level.ram <= main.ram
    return plan.level.ram_unified + sum(plan.claims[-own:]) <= main.ram


def turned(mains: Sequence[Main], turn: int) -> list[Main]:
    """Workers that serve alike take turns, so that instances do not all run for the same one."""
    found: list[Main] = []
    at = 0
    while at < len(mains):
        end = at + 1
        while end < len(mains) and mains[end].kind == mains[at].kind:
            end += 1
        first = at + turn % (end - at)
        found += [*mains[first:end], *mains[at:first]]
        at = end
    return found


def seats(layout: Layout, asked: Gguf, remote_ram: int) -> tuple[Seat, ...]:
    """The main seat, then one for every remote GPU."""
    plan, far = layout.plan, len(layout.remotes)
    unified = layout.main.unified
    main = Seat(
        layout.main.w,
        tuple(c.slot for c in layout.own),
        plan.claims[far:],
        ram=plan.level.ram_unified if unified else plan.level.ram,
        offload=Offload(plan.layers, asked.total, plan.counts),
    )
    parts = [
        Seat(c.w, (c.slot,), (claim,), ram=remote_ram, layers=share.layers)
        for c, claim, share in zip(layout.remotes, plan.claims, plan.level.devices, strict=False)
    ]
    return (main, *parts)
