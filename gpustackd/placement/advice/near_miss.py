"""The nearest miss: the worker that lacks the fewest bytes, and how many.

Workers are first ranked by arithmetic over all of them at once; of the first ones it is then tried out how
much more would have to be free, by the decision itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Placed
from gpustackd.placement.advice.changes import more_free
from gpustackd.placement.advice.trials import Trials
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.diagnostics.wording import gib, some
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.search import Search

TRIED = 4
"""Workers of which it is tried out how much they lack."""
GRAIN = 256 * 2**20
"""Bytes to which what is lacking is found, before it is counted card by card."""
SHOWN = 3
"""Workers that are too small even if they were empty."""
FAR = np.iinfo(np.int64).max // 64


@dataclass(frozen=True, slots=True)
class NearMiss:
    """What one worker lacks. Sizes in bytes; `gpus` are the cards on which `vram_short` is missing."""

    worker: str
    worker_id: int
    gpus: tuple[str, ...] = ()
    vram_short: int = 0
    ram_short: int = 0
    need: int = 0
    """What would be booked on these cards, or of RAM where only that is short."""
    free: int = 0
    """What is free there now."""
    even_empty: bool = False
    """It would lack this even if nothing were booked there: `free` is what its cards offer then."""

    @property
    def short(self) -> int:
        return self.vram_short + self.ram_short

    @property
    def text(self) -> str:
        parts = []
        if self.vram_short:
            parts.append(f"{gib(self.vram_short)} of GPU memory on {some(self.gpus, 8)}")
        if self.ram_short:
            parts.append(f"{gib(self.ram_short)} of RAM")
        ever = ", even if it were empty" if self.even_empty else ""
        return f"{self.worker} lacks {' and '.join(parts)} ({self.short} bytes){ever}"

    def as_json(self) -> dict[str, Any]:
        return {"worker": self.worker, "gpus": list(self.gpus), "short_bytes": self.short,
                "vram_short_bytes": self.vram_short, "ram_short_bytes": self.ram_short,
                "need_bytes": self.need, "free_bytes": self.free,
                "even_empty": self.even_empty}  # fmt: skip


def ranked(search: Search) -> dict[int, int]:
    """Positions of the workers that passed every filter, those that lack least first, with the least bytes
    that somebody there would have to give back (0 where the engine's search is its own, and nobody knows)."""
    rows = np.flatnonzero(search.context.bits == 0)
    if not len(rows):
        return {}
    own = search.ladder.is_engines_own
    lacking = _by_free(search, rows) if own else lacks(search, rows)
    order = np.lexsort((search.context.fleet.worker_id[rows], lacking)).tolist()
    return {int(rows[n]): max(int(lacking[n]), 0) for n in order}


def lacks(search: Search, rows: Ints) -> Ints:
    """(R,) bytes of VRAM and RAM that each worker lacks for the place that lacks least; FAR = none there,
    however empty its cards."""
    fleet, rules = search.context.fleet, search.context.rules
    cards = read_cards(fleet, rows, rules)
    kinds = search.ladder.kinds
    most = 1 if "one_worker" not in kinds else cards.free.shape[1]
    first = 1 if "one_gpu" in kinds else 2
    best: Ints = np.full(len(rows), FAR, np.int64)
    capacity = fleet.vram_capacity[rows]
    for code in np.unique(cards.type[cards.usable]).tolist():
        mine = cards.usable & (cards.type == code)
        for n in range(first, most + 1):
            if rules.gpu_count and n != rules.gpu_count:
                continue
            if not rules.fixed_world and not rules.divisors.allows(n):
                continue
            np.minimum(best, _for(cards, rules, mine, capacity, n), out=best)
    if rules.cpu or rules.cpu_only:
        best = np.where(fleet.free_ram(rows) < rules.ram_floor, np.minimum(best, 0), best)
    short = np.maximum(rules.ram_floor - fleet.free_ram(rows), 0)
    return np.minimum(best, FAR) + short


def _for(cards: Cards, rules: ResourceRules, mine: Any, capacity: Ints, n: int) -> Ints:
    """Lacking bytes where n cards share the model."""
    share = (cards.total * cards.share).astype(np.int64)
    part = share
    if rules.claim_policy is ClaimPolicy.EACH:
        part = np.full(cards.free.shape, rules.vram, np.int64)
    elif rules.claim_policy is not ClaimPolicy.SHARE:
        part = np.maximum(-(-rules.vram // n), share if rules.claim_policy is ClaimPolicy.AT_LEAST else 0)
        part = np.broadcast_to(part, cards.free.shape)
    could = mine & (part > 0) & (part <= capacity)
    lacking = np.where(could, np.maximum(part - cards.free, 0), FAR)
    order = np.argsort(lacking, axis=1)[:, :n]
    rows = np.arange(len(lacking))[:, None]
    sums: Ints = np.minimum(lacking[rows, order], FAR).sum(axis=1)
    if rules.claim_policy is ClaimPolicy.SHARE:
        sums[np.where(could, part, 0)[rows, order].sum(axis=1) < rules.vram] = FAR
    return np.minimum(sums, FAR)


def _by_free(search: Search, rows: Ints) -> Ints:
    """For engines that search in ways of their own: the more is free, the nearer."""
    fleet = search.context.fleet
    free: Ints = -fleet.free_vram(rows).sum(axis=1)
    return free


def nearest(trials: Trials, order: Sequence[int]) -> list[NearMiss]:
    """What the first workers of a ranking lack, least first; none where nothing freed there would help."""
    found = [miss for w in order[:TRIED] if (miss := _miss(trials, w)) is not None]
    return sorted(found, key=lambda m: (m.short, m.worker_id))


def _miss(trials: Trials, w: int) -> NearMiss | None:
    """The least that one worker lacks: the fewer bytes are taken to be free on each of its cards, the nearer
    is what is chosen to what is there."""
    fleet = trials.case.fleet
    worker_id = int(fleet.worker_id[w])
    most = int(max(fleet.vram_allocated[w].max(), 0))
    ram = int(fleet.ram_allocated[w])
    placed = _with(trials, worker_id, most, ram)
    if placed is None:
        return None
    low, high = 0, most
    while high - low > GRAIN:
        middle = (low + high) // 2
        other = _with(trials, worker_id, middle, ram)
        if other is None:
            low = middle
        else:
            placed, high = other, middle
    return _counted(trials, w, placed)


def _with(trials: Trials, worker_id: int, vram: int, ram: int) -> Placed | None:
    undo = more_free(trials.case.fleet, worker_id, vram, ram)
    try:
        found = trials.find(trials.case.demand)
    finally:
        undo()
    there = found is not None and any(p.worker_id == worker_id for p in found.placement.parts)
    return found if there else None


def _counted(trials: Trials, w: int, placed: Placed) -> NearMiss | None:
    """What of a placement is not there."""
    fleet = trials.case.fleet
    row = fleet.row(w)
    part = next(p for p in placed.placement.parts if p.worker_id == row.id)
    unified = bool(fleet.unified[w])
    names: list[str] = []
    vram_short = need = free = 0
    for gpu_id, index, vram in zip(part.gpu_ids, part.gpu_indexes, part.vram, strict=True):
        place = fleet.slot[gpu_id]
        there = int(fleet.vram_capacity[place] - fleet.vram_allocated[place] - fleet.foreign[place])
        lacking = max(vram - max(there, 0), 0)
        if lacking and not unified:
            names.append(f"{row.name}:{part.gpu_type}:{index}")
            vram_short, need, free = vram_short + lacking, need + vram, free + max(there, 0)
    wanted = part.ram + (sum(part.vram) if unified else 0)
    wanted = max(wanted, trials.least_ram)
    ram_free = int(fleet.free_ram(np.array([w]))[0])
    ram_short = max(wanted - ram_free, 0)
    if not vram_short and not ram_short:
        return None
    if not vram_short:
        need, free = wanted, ram_free
    return NearMiss(row.name, row.id, tuple(names), vram_short, ram_short, need, free)


def too_small(search: Search) -> list[NearMiss]:
    """What single workers lack where none would hold the instance even if all of it were free, least first:
    those whose cards come closest. By arithmetic alone, since no decision says it; none where an engine
    searches in its own way."""
    rows = np.flatnonzero(search.context.bits == 0)
    if not len(rows) or search.ladder.is_engines_own:
        return []
    cards = read_cards(search.context.fleet, rows, search.context.rules)
    capacity = np.maximum(search.context.fleet.vram_capacity[rows], 0)
    best: dict[int, tuple[int, Ints, int, int]] = {}
    for code, n in _numbers(search, cards):
        for r, short, chosen, need, offered in _lacking_when_empty(
            cards, search.context.rules, code, capacity, n
        ):
            if short > 0 and (r not in best or short < best[r][0]):
                best[r] = short, chosen, need, offered
    order = sorted(best, key=lambda r: (best[r][0], int(search.context.fleet.worker_id[rows[r]])))
    return [_miss_of_empty(search, int(rows[r]), *best[r]) for r in order[:SHOWN]]


def _numbers(search: Search, cards: Cards) -> Iterator[tuple[int, int]]:
    """Types of cards, and how many of a type an instance may lie on within one worker."""
    rules = search.context.rules
    kinds = search.ladder.kinds
    first = 1 if "one_gpu" in kinds else 2
    most = cards.free.shape[1] if "one_worker" in kinds else 1
    for code in np.unique(cards.type[cards.usable]).tolist():
        for n in range(first, most + 1):
            if rules.gpu_count in (0, n) and (rules.fixed_world or rules.divisors.allows(n)):
                yield code, n


def _lacking_when_empty(
    cards: Cards, rules: ResourceRules, code: int, capacity: Ints, n: int
) -> Iterator[tuple[int, int, Ints, int, int]]:
    """Of each worker with n such cards: its row, the bytes that they are too small by if they were empty, the
    cards, the bytes needed of them and what they offer."""
    mine = cards.usable & (cards.type == code)
    share = np.minimum((cards.total * cards.share).astype(np.int64), capacity)
    offered = share if rules.claim_policy is ClaimPolicy.SHARE else capacity
    offered = np.where(mine, offered, -1)
    order = np.argsort(-offered, axis=1, kind="stable")[:, :n]
    for r in np.flatnonzero(mine.sum(axis=1) >= n).tolist():
        sizes = offered[r, order[r]]
        if rules.claim_policy is ClaimPolicy.SHARE:
            need, short = rules.vram, rules.vram - int(sizes.sum())
        else:
            part = rules.vram if rules.claim_policy is ClaimPolicy.EACH else -(-rules.vram // n)
            need, short = part * n, int(np.maximum(part - sizes, 0).sum())
        yield r, short, order[r], need, int(sizes.sum())


def _miss_of_empty(search: Search, w: int, short: int, chosen: Any, need: int, offered: int) -> NearMiss:
    fleet = search.context.fleet
    row = fleet.row(w)
    gpus = [fleet.gpu_rows[int(fleet.gpu_id[w, s])] for s in sorted(chosen.tolist())]
    names = tuple(f"{row.name}:{g.type}:{g.index}" for g in gpus)
    return NearMiss(row.name, row.id, names, short, 0, need, offered, even_empty=True)
