"""Compatibility mode: the peer's ladder for GGUF models, candidate by candidate (sections 5 to 10).

One step of ours for each of its strategies. What it finds depends on the fleet alone; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpustackd.domain.fleet.fleet import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.errors import BadRow
from gpustackd.placement import gguf_peer_lacking as lacking
from gpustackd.placement.fit.cards import cards
from gpustackd.placement.fit.gguf import Gguf
from gpustackd.placement.fit.gguf_peer import Card, Host, Prepared, by_memory, fits, prepared, seat, tried
from gpustackd.placement.fit.seat import Choice, Offload, Seat
from gpustackd.placement.gguf_peer_parts import over_workers, part_of_worker

if TYPE_CHECKING:
    from gpustackd.placement.search import Search

Found = list[tuple[Seat, ...]]


class View:
    """The fleet as the peer's selector prepares it for one search."""

    def __init__(self, search: Search, rows: Ints) -> None:
        asked = search.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.asked: Gguf = asked
        self.distributed = search.rules.distributed
        self.ids = search.demand.spec.gpu_ids
        self.hosts = _hosts(search, rows)
        self.picked = _picked(search, self.hosts) if self.ids else self.hosts
        found = prepared(asked.sizes, self.hosts)
        if found is None:
            raise BadRow("source", "there is no estimate of this model")
        self.prepared: Prepared = found

    @property
    def total(self) -> int:
        return self.asked.total

    @property
    def layers(self) -> int | None:
        return self.asked.layers

    def skips(self, strategy: int) -> bool:
        """Whether the peer passes over a strategy (section 5)."""
        asked, layers = self.asked, self.layers
        if (strategy in (4, 5) and not asked.cpu_offloading) or (strategy == 3 and not self.distributed):
            return True
        if asked.image and strategy != 1:
            return True
        if layers is not None:
            if 0 < layers < self.total and not asked.cpu_offloading:
                return True
            if layers == 0 and strategy != 5:
                return True
            if layers != 0 and strategy == 5:
                return True
            if (layers != self.total and strategy in (1, 2)) or (layers == self.total and strategy in (4, 5)):
                return True
        if asked.split and strategy == 1:
            return True
        return self._picked_skips(strategy) or self._fleet_skips(strategy)

    def _picked_skips(self, strategy: int) -> bool:
        if not self.manual:
            return False
        if strategy == 5:
            return True
        if len({g.worker for g in self.ids}) > 1:
            return strategy != 3
        return strategy == 3 or strategy == (1 if len(self.ids) > 1 else 2)

    def _fleet_skips(self, strategy: int) -> bool:
        free = [c for h in self.picked for c in h.cards if c.free > 0]
        if not self.hosts:
            return True
        if not free:
            return strategy != 5
        if (strategy == 3 and len(self.picked) < 2) or (strategy in (2, 3) and len(free) < 2):
            return True
        return bool(self.manual and lacking.selection(self))

    @property
    def manual(self) -> bool:
        """Whether selected GPUs steer the strategies; a tensor split takes their place."""
        return bool(self.ids) and not self.asked.split


def _hosts(search: Search, rows: Ints) -> list[Host]:
    fleet = search.fleet
    found = cards(fleet, rows, search.rules)
    made = []
    for r, w in enumerate(rows.tolist()):
        slots = np.flatnonzero(found.usable[r]).tolist()
        name = fleet.row(w).name
        mine = tuple(
            Card(
                w,
                s,
                int(found.free[r, s]),
                f"{name}:{fleet.types[int(found.type[r, s])]}:{fleet.gpu_index[w, s]}",
            )
            for s in slots
        )
        made.append(Host(w, name, bool(found.unified[r]), int(found.ram[r]), mine))
    return made


def _picked(search: Search, hosts: Sequence[Host]) -> list[Host]:
    wanted = {f"{g.worker}:{g.type}:{g.index}" for g in search.demand.spec.gpu_ids}
    return [Host(h.w, h.name, h.unified, h.ram, tuple(c for c in h.cards if c.id in wanted)) for h in hosts]


class PeerStep:
    """One strategy of the peer."""

    def __init__(self, search: Search, number: int, step: str) -> None:
        self.search = search
        self.number = number
        self._step = step

    @property
    def step(self) -> str:
        return self._step

    def choose(self, turn: int) -> Choice | None:
        self.search.refresh()
        found = list(self.listing(np.flatnonzero(self.search.bits == 0)))
        return self.search.pick([Choice(s, self.step) for s in found], 0) if found else None

    def listing(self, rows: Ints) -> Iterator[tuple[Seat, ...]]:
        """Every candidate, in the peer's order."""
        view = View(self.search, rows)
        if not view.skips(self.number):
            yield from STRATEGIES[self.number](view)

    def lacking(self, rows: Ints) -> tuple[list[Reason], Cure]:
        view = View(self.search, rows)
        reasons = lacking.before(view) if self.number == 1 else []
        if not view.skips(self.number):
            reasons += lacking.LACKING[self.number](view)
        return reasons, Cure.CAPACITY


def one_gpu(view: View) -> Found:
    """Strategy 1: every GPU that holds all layers, until a worker lacks the RAM."""
    level = view.prepared.full
    found: Found = []
    cards = [(c, h) for h in view.picked for c in h.cards if c.free > 0]
    for card, host in sorted(cards, key=lambda x: -x[0].free):
        claim = host.share(level.devices[0])
        if claim > card.free:
            continue
        if host.memory(level) > host.ram - (claim if host.unified else 0):
            break
        found.append((seat(host, [card], level, view.total, None),))
    return found


def many_gpus(view: View) -> Found:
    """Strategy 2: several GPUs of one worker, as few as hold all layers."""
    found: Found = []
    full = view.prepared.full
    for host in by_memory(view.picked):
        if len(host.cards) < 2 or host.memory(full) > host.ram:
            continue
        if view.asked.split:
            found += _given_split(view, host)
            continue
        for count in range(max(2, view.prepared.fewest), len(host.cards) + 1):
            mine = list(_of_worker(view, host, count))
            found += mine
            if mine:
                break
    fewest = min((len(s[0].slots) for s in found), default=0)
    return [s for s in found if len(s[0].slots) == fewest]


def _of_worker(view: View, host: Host, count: int) -> Iterator[tuple[Seat, ...]]:
    need = host.share(view.prepared.full.devices[0])
    for some in tried(host, count, view.prepared.one_layer(host), picked=view.manual):
        if sum(c.free for c in some) < need:
            continue
        split = tuple(c.free for c in some)
        levels = view.asked.sizes.levels(tuple(map(float, split)))
        if levels and levels[-1].full and fits(host, some, levels[-1]):
            yield (seat(host, some, levels[-1], view.total, split),)


def _given_split(view: View, host: Host) -> Found:
    """A defect of the peer: the shares of a given split are taken for bytes, on the first cards."""
    split = view.asked.split
    if len(split) > len(host.cards) or sum(split) < host.share(view.prepared.full.devices[0]):
        return []
    levels = view.asked.sizes.levels(split)
    some = [Card(c.w, c.slot, int(s)) for c, s in zip(host.cards, split, strict=False)]
    if not levels or not fits(host, some, levels[-1]):
        return []
    return [(seat(host, some, levels[-1], view.total, tuple(map(int, split))),)]


def host_only(view: View) -> Found:
    """Strategy 5: no GPU at all; workers with the most RAM first, until one lacks it."""
    found: Found = []
    level = view.prepared.levels[0]
    for host in sorted(view.hosts, key=lambda h: -h.ram):
        if host.memory(level) > host.ram:
            break
        found.append((Seat(host.w, ram=host.memory(level), offload=Offload(0, view.total)),))
    return found


STRATEGIES = {1: one_gpu, 2: many_gpus, 3: over_workers, 4: part_of_worker, 5: host_only}
NAMES = {1: "one_gpu", 2: "one_worker", 3: "many_workers", 4: "partial", 5: "cpu"}


def ladder(search: Search) -> tuple[PeerStep, ...]:
    """All strategies in the peer's order."""
    return tuple(PeerStep(search, n, name) for n, name in NAMES.items())
