"""The nearest miss where no worker would hold the instance even if all of it were free: the one whose cards
come closest, and how many bytes they are too small by. By arithmetic alone, since no decision tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.placement.advice.near_miss import NearMiss
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.search import Search

TOLD = 3


def too_small(search: Search) -> list[NearMiss]:
    """What single workers lack, least first; none where an engine searches in its own way."""
    rows = np.flatnonzero(search.context.bits == 0)
    if not len(rows) or search.ladder.is_engines_own:
        return []
    cards = read_cards(search.context.fleet, rows, search.context.rules)
    capacity = np.maximum(search.context.fleet.vram_capacity[rows], 0)
    best: dict[int, tuple[int, Ints, int, int]] = {}
    for code, n in _numbers(search, cards):
        for r, short, chosen, need, offered in _lacking(cards, search.context.rules, code, capacity, n):
            if short > 0 and (r not in best or short < best[r][0]):
                best[r] = short, chosen, need, offered
    order = sorted(best, key=lambda r: (best[r][0], int(search.context.fleet.worker_id[rows[r]])))
    return [_miss(search, int(rows[r]), *best[r]) for r in order[:TOLD]]


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


def _lacking(
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


def _miss(search: Search, w: int, short: int, chosen: Any, need: int, offered: int) -> NearMiss:
    fleet = search.context.fleet
    row = fleet.row(w)
    gpus = [fleet.gpu_rows[int(fleet.gpu_id[w, s])] for s in sorted(chosen.tolist())]
    names = tuple(f"{row.name}:{g.type}:{g.index}" for g in gpus)
    return NearMiss(row.name, row.id, names, short, 0, need, offered, even_empty=True)
