"""Compatibility mode: workers as the peer's GGUF selector sees them, and what it prepares (sections 3 to 5).

The peer's walks are kept with their defects, so that its results can be compared with. Production searches
otherwise (`placement.gguf`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice

from gpustackd.domain.gguf_levels import Level, LevelSizes, Share
from gpustackd.placement.fit.seat import Offload, Seat

FEWEST_GUESS = 16
MOST_REMOTE = 8
"""GPUs of other workers in one candidate."""
MOST_ELIGIBLE = 16
"""With more GPUs of other workers the peer does not look for sets of them."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU that has a known size. Bytes."""

    w: int
    slot: int
    free: int
    id: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """One worker with its cards in their order."""

    w: int
    name: str
    unified: bool
    ram: int
    cards: tuple[Card, ...]

    @property
    def vram(self) -> int:
        return sum(c.free for c in self.cards)

    @property
    def largest_first(self) -> tuple[Card, ...]:
        return tuple(sorted((c for c in self.cards if c.free > 0), key=lambda c: -c.free))

    def share(self, of: Share) -> int:
        """Bytes to claim here for a device."""
        return of.unified if self.unified else of.vram

    def memory(self, level: Level) -> int:
        """Bytes of RAM to claim here for a main process."""
        return level.ram_unified if self.unified else level.ram


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the peer works out before its strategies."""

    levels: Sequence[Level]
    """On one device."""
    layer: int
    """One block on a device, memory of its own."""
    layer_unified: int
    remote_layer: int
    remote_layer_unified: int
    fewest: int
    """GPUs to begin with."""

    @property
    def full(self) -> Level:
        return self.levels[-1]

    def one_layer(self, host: Host, *, remote: bool = False) -> int:
        """Bytes of one block on a device of this worker."""
        if remote:
            return self.remote_layer_unified if host.unified else self.remote_layer
        return self.layer_unified if host.unified else self.layer


def prepared(sizes: LevelSizes, hosts: Sequence[Host]) -> Prepared | None:
    """None where there is no estimate at all."""
    levels = sizes.levels()
    if not levels:
        return None
    own, remote = _single(levels), _single(sizes.levels((1.0, 1.0), 1))
    largest = max((c.free for h in hosts for c in h.cards), default=0)
    need = levels[-1].devices[0].vram
    guesses = range(1, FEWEST_GUESS + 1) if need else ()
    fewest = next((i for i in guesses if largest / need > 1 / i), -1)
    return Prepared(levels, own.vram, own.unified, remote.vram, remote.unified, fewest)


def _single(levels: Sequence[Level]) -> Share:
    return next((x.devices[0] for x in levels if x.devices and x.devices[0].layers == 1), Share(0, 0, 0))


def by_memory(hosts: Sequence[Host]) -> list[Host]:
    """Workers that have memory on GPUs, the most first."""
    return sorted(hosts, key=lambda h: -h.vram)


def sets(host: Host, count: int, layer: int) -> Iterator[tuple[Card, ...]]:
    """Sets of so many cards of one worker that hold a layer each, the largest first."""
    yield from combinations([c for c in host.largest_first if c.free >= layer], count)


def alike(host: Host, layer: int) -> bool:
    """Whether the cards that hold a layer are as free as the worker's first card; the peer then looks at two
    sets of each size."""
    return all(c.free == host.cards[0].free for c in host.largest_first if c.free >= layer)


def tried(host: Host, count: int, layer: int, *, picked: bool) -> Iterator[tuple[Card, ...]]:
    """Those of the sets that the peer looks at; of selected cards the set of all."""
    if not picked:
        yield from islice(sets(host, count, layer), 2 if alike(host, layer) else None)
    elif count == len(host.cards) == len(host.largest_first):
        yield host.largest_first


def remote_sets(remotes: Sequence[Card], *, picked: bool) -> Iterator[tuple[Card, ...]]:
    """Sets of remote cards, the smallest first; of selected cards the set of all."""
    if picked:
        yield tuple(remotes)
        return
    for count in range(1, min(len(remotes), MOST_REMOTE) + 1):
        yield from combinations(remotes, count)


def fits(host: Host, cards: Sequence[Card], level: Level) -> bool:
    """Whether a worker holds a level on these cards, one device each."""
    return host.memory(level) <= host.ram and all(
        host.share(d) <= c.free for c, d in zip(cards, level.devices, strict=True)
    )


def seat(host: Host, cards: Sequence[Card], level: Level, total: int, split: tuple[int, ...] | None) -> Seat:
    """The main part of a candidate: its cards are the last devices."""
    own = level.devices[len(level.devices) - len(cards) :]
    return Seat(
        host.w,
        tuple(c.slot for c in cards),
        tuple(host.share(d) for d in own),
        ram=host.memory(level),
        offload=Offload(level.offload_layers, total, split),
    )
