"""What workers offer to a GGUF model that lies over several of them: GPUs that can be served to others, and
workers that may be the main one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.selectors.gguf.layer_split import LayerSplitter


@dataclass(frozen=True, slots=True)
class OfferedGpu:
    """A GPU that may take part; `room` is what it may be filled with. Bytes."""

    position: int
    slot: int
    index: int
    code: int
    room: int
    unified: bool


@dataclass(frozen=True, slots=True)
class Main:
    """A worker as the main one, with its cards in the order of their indexes."""

    position: int
    ram: int
    unified: bool
    cards: tuple[OfferedGpu, ...]

    @property
    def rooms(self) -> list[int]:
        return [c.room for c in self.cards]


@dataclass(frozen=True, slots=True)
class Offered:
    """What there is: rows of `cards` that may be the main worker, those that offer most first, and the
    largest cards that can be served."""

    cards: Cards
    own: Bools
    """(R, S) cards that hold a layer on a main worker."""
    mains: Ints
    remotes: tuple[OfferedGpu, ...]
    bound: int
    """What the largest cards that one instance can take offer together."""


class Offers:
    """Looks at the cards of all workers; nothing is kept."""

    def __init__(self, context: PlacementContext, splitter: LayerSplitter) -> None:
        self.context = context
        self.splitter = splitter

    @property
    def remote_ram(self) -> int:
        return self.context.policy.rpc_ram

    def offered(self, rows: Ints) -> Offered:
        """Look at the cards of all workers."""
        fleet = self.context.fleet
        cards = read_cards(fleet, rows, self.context.rules)
        per_worker = np.maximum(np.count_nonzero(cards.usable, axis=1), 1)
        least = self.least_room()
        pooled = np.where(cards.unified, (cards.ram - per_worker * self.remote_ram) // per_worker, 2**62)
        room = np.minimum(cards.free, pooled[:, None])
        served = cards.usable & (room >= least)
        short = np.count_nonzero(served, axis=1) * self.remote_ram > cards.ram
        for at in map(int, np.flatnonzero(short)):  # as many as its RAM serves, the largest
            largest = np.argsort(-np.where(served[at], room[at], -1), kind="stable")
            served[at, largest[int(cards.ram[at]) // self.remote_ram :]] = False
        own = cards.usable & (cards.free >= least)
        offers = np.where(own, cards.free, 0).sum(axis=1)
        mains = np.lexsort((fleet.worker_id[rows], -offers))
        mains = mains[offers[mains] > 0]
        rank = np.full(len(rows), len(rows))
        rank[mains] = np.arange(len(mains))
        flat = np.argwhere(served)
        sizes = room[served]
        keep = MOST_DEVICES + fleet.slots
        if len(flat) > keep:
            limit = np.partition(sizes, len(sizes) - keep)[len(sizes) - keep]
            flat, sizes = flat[sizes >= limit], sizes[sizes >= limit]
        r, s = flat[:, 0], flat[:, 1]
        order = np.lexsort((fleet.gpu_index[rows[r], s], rank[r], -sizes))[:keep]
        remotes = tuple(
            _card(fleet, int(rows[r[i]]), int(s[i]), int(sizes[i]), bool(cards.unified[r[i]])) for i in order
        )
        bound = int(np.sort(cards.free[own])[-MOST_DEVICES:].sum())
        return Offered(cards, own, mains, remotes, bound)

    def least_room(self) -> int:
        """What a device must have to hold one layer."""
        return self.splitter.least_rest + self.splitter.layers.least

    def mains(self, offered: Offered, tie_break: int) -> Iterator[Main]:
        """Workers as main ones, those that offer most first; those that serve alike take turns, so that
        instances do not all run for the same one."""
        cards = offered.cards
        own = np.where(offered.own, cards.free, 0)
        at, rows = 0, offered.mains
        while at < len(rows):
            first = rows[at]
            end = at + 1
            while end < len(rows) and _alike(cards, own, first, rows[end]):
                end += 1
            shift = tie_break % (end - at)
            for r in [*rows[at + shift : end].tolist(), *rows[at : at + shift].tolist()]:
                yield self._main(offered, r)
            at = end

    def different(self, offered: Offered, tie_break: int) -> Iterator[Main]:
        """The first of the workers that serve alike: where it does not, the others do not either."""
        seen: set[object] = set()
        for main in self.mains(offered, tie_break):
            kind = (main.ram, main.unified, *main.rooms)
            if kind not in seen:
                seen.add(kind)
                yield main

    def _main(self, offered: Offered, r: int) -> Main:
        """Its cards of the type that offers most together."""
        cards = offered.cards
        w, unified = int(cards.positions[r]), bool(cards.unified[r])
        by_type: dict[int, list[OfferedGpu]] = {}
        for s in np.flatnonzero(offered.own[r]).tolist():
            card = _card(self.context.fleet, w, s, int(cards.free[r, s]), unified)
            by_type.setdefault(card.code, []).append(card)
        mine = max(by_type.values(), key=lambda some: sum(c.room for c in some))
        if len(mine) >= MOST_DEVICES:
            mine = sorted(mine, key=lambda c: (-c.room, c.index))[: MOST_DEVICES - 1]
        mine.sort(key=lambda c: c.index)
        return Main(w, int(cards.ram[r]), unified, tuple(mine))


def _card(fleet: Fleet, w: int, s: int, room: int, unified: bool) -> OfferedGpu:
    return OfferedGpu(w, s, int(fleet.gpu_index[w, s]), int(fleet.gpu_type[w, s]), room, unified)


def _alike(cards: Cards, own: Ints, a: int, b: int) -> bool:
    """Whether two workers serve alike as main ones."""
    same = cards.ram[a] == cards.ram[b] and cards.unified[a] == cards.unified[b]
    return bool(same) and np.array_equal(own[a], own[b])
