"""Compatibility mode: the peer's searches over several workers and for some of the layers (sections 8, 9)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from gpustackd.domain.gguf_levels import Level
from gpustackd.placement.fit.gguf_peer import (
    MOST_ELIGIBLE,
    Card,
    Host,
    by_memory,
    fits,
    remote_sets,
    seat,
    tried,
)
from gpustackd.placement.fit.seat import Seat

if TYPE_CHECKING:
    from gpustackd.placement.gguf_peer import View

Found = list[tuple[Seat, ...]]


# -- several workers (strategy 3) --------------------------------------------------------------------------


def main_worker(view: View) -> Host | None:
    """The worker whose GPUs that hold a layer offer most together."""
    best: Host | None = None
    most = 0
    for host in by_memory(view.picked):
        layer = view.prepared.one_layer(host)
        score = sum(c.free for c in host.cards if c.free >= layer)
        if host.vram >= layer and score > most:
            best, most = host, score
    return best


def remote_cards(view: View, main: Host) -> list[Card]:
    """GPUs of other workers that may take part, the largest first."""
    found = []
    for host in view.picked:
        least = 0 if view.manual else view.prepared.one_layer(host, remote=True)
        if host.w != main.w:
            found += [c for c in host.cards if c.free > 0 and c.free >= least]
    return sorted(found, key=lambda c: -c.free)


def over_workers(view: View) -> Found:
    """A main worker with all its GPUs, and GPUs of others."""
    main = main_worker(view)
    if main is None:
        return []
    remotes = remote_cards(view, main)
    if not remotes or (len(remotes) > MOST_ELIGIBLE and not view.manual):
        return []
    hosts = {h.w: h for h in view.picked}
    found: list[tuple[int, tuple[Seat, ...]]] = []
    best = 0
    for _, some in groupby(remote_sets(remotes, picked=view.manual), key=len):
        group = list(some)
        tries = _levels_to_try(view, main, group[0], best)
        kept: dict[tuple[int, ...], Sequence[Level]] = {}
        for cards in group:
            level = _level_of(view, main, cards, hosts, tries, kept)
            if level is not None and level.offload_layers >= best:
                best = level.offload_layers
                found.append((best, _seats(view, main, cards, level, hosts)))
        if found and (best == view.total or view.layers is not None):
            break
    if not view.asked.cpu_offloading and best != view.total:
        return []
    return [seats for level, seats in found if level == best]


def _levels_to_try(view: View, main: Host, remotes: Sequence[Card], best: int) -> list[int]:
    """Numbers of layers, the highest first, that the peer tries with sets of this size."""
    levels = view.prepared.levels
    most = sum(c.free for c in (*remotes, *main.cards))
    if view.layers is not None:
        enough = view.layers < len(levels) and most >= levels[view.layers].devices[0].unified
        return [view.layers] if enough else []
    if not view.asked.cpu_offloading:
        return [view.total, view.total - 1] if most > levels[-1].devices[0].unified else []
    within = [n for n, x in enumerate(levels) if x.devices[0].unified < most and n >= best]
    return list(range(max(within), best - 1, -1)) if within else []


def _level_of(
    view: View,
    main: Host,
    remotes: Sequence[Card],
    hosts: dict[int, Host],
    tries: Sequence[int],
    kept: dict[tuple[int, ...], Sequence[Level]],
) -> Level | None:
    own = main.largest_first
    if not own:
        return None
    split = tuple(c.free for c in (*remotes, *own))
    levels = kept.get(split)
    if levels is None:
        levels = kept[split] = view.asked.sizes.levels(tuple(map(float, split)), len(remotes))
    for n in tries:
        if n >= len(levels) or main.memory(levels[n]) > main.ram:
            continue
        devices = levels[n].devices
        if all(hosts[c.w].share(d) <= c.free for c, d in zip((*remotes, *own), devices, strict=True)):
            return levels[n]
    return None


def _seats(
    view: View, main: Host, remotes: Sequence[Card], level: Level, hosts: dict[int, Host]
) -> tuple[Seat, ...]:
    own = main.largest_first
    split = tuple(c.free for c in (*remotes, *own))
    parts = [
        Seat(c.w, (c.slot,), (hosts[c.w].share(d),), ram=0, layers=d.layers)
        for c, d in zip(remotes, level.devices, strict=False)
    ]
    return (seat(main, own, level, view.total, split), *parts)


# -- a part of the layers on one worker (strategy 4) -------------------------------------------------------


def part_of_worker(view: View) -> Found:
    """One GPU of each worker, then several; those with the most layers."""
    best = view.layers or 0
    found: list[tuple[int, Seat]] = []
    for host in by_memory(view.picked):
        mine = _on_one(view, host, best)
        if mine is not None and mine[0] >= best:
            best = mine[0]
            found.append(mine)
    for host in by_memory(view.picked):
        some, best = _on_several(view, host, best)
        found += some
    return [(s,) for level, s in found if level == best]


def _on_one(view: View, host: Host, best: int) -> tuple[int, Seat] | None:
    levels, layer = view.prepared.levels, view.prepared.one_layer(host)
    if best >= len(levels) or view.asked.split or (view.manual and len(host.cards) != 1):
        return None
    least = host.share(levels[best].devices[0])
    if host.vram < layer or host.vram < least:
        return None
    if host.unified and host.ram < least + host.memory(levels[best]):
        return None
    if view.layers is not None:
        card, level = host.largest_first[0], levels[best]
        fits_in = host.memory(level) <= host.ram and card.free > least
        return (best, seat(host, [card], level, view.total, None)) if fits_in else None
    partial = [x for x in levels if not x.full and x.offload_layers >= best]
    for card in host.largest_first:
        if card.free < layer:
            continue
        fitting = [x for x in partial if host.share(x.devices[0]) <= card.free]
        if not fitting:
            continue
        level = max(fitting, key=lambda x: host.share(x.devices[0]))
        room = host.ram - (host.share(level.devices[0]) if host.unified else 0)
        if host.memory(level) <= room:
            return level.offload_layers, seat(host, [card], level, view.total, None)
    return None


def _on_several(view: View, host: Host, best: int) -> tuple[list[tuple[int, Seat]], int]:
    levels, layer = view.prepared.levels, view.prepared.one_layer(host)
    if len(host.cards) < 2 or best >= len(levels):
        return [], best
    least = host.share(levels[best].devices[0])
    if host.vram < layer or host.vram < least:
        return [], best
    found: list[tuple[int, int, Seat]] = []
    for count in range(2, len(host.cards) + 1):
        before = best
        least = host.share(levels[best].devices[0])
        for cards in tried(host, count, layer, picked=view.manual):
            if sum(c.free for c in cards) < least:
                break
            level = _best_level(view, host, cards, best)
            if level is not None:
                best = level.offload_layers
                split = tuple(c.free for c in cards)
                found.append((best, count, seat(host, cards, level, view.total, split)))
        if best and best == before and not view.manual:
            break
    if not found:
        return [], best
    top = max(level for level, _, _ in found)
    fewest = min(count for level, count, _ in found if level == top)
    return [(level, s) for level, count, s in found if (level, count) == (top, fewest)], best


def _best_level(view: View, host: Host, cards: Sequence[Card], best: int) -> Level | None:
    levels = view.asked.sizes.levels(tuple(float(c.free) for c in cards))
    if view.layers is not None:
        levels = levels[view.layers : view.layers + 1]
    for level in reversed(levels):
        if level.full:
            continue
        if level.offload_layers < best:
            return None
        if fits(host, cards, level):
            return level
    return None
