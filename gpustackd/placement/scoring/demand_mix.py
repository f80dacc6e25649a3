"""Demands as kinds, and the mix of what waits and what was seen: for `fragmentation`, for orders by size."""

from __future__ import annotations

from collections.abc import Mapping

from gpustackd.placement.mix import WHOLE, DemandShape, Mix
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules

MOST = 16
"""Kinds that a mix tells apart; rarer ones are left out."""
WAITING, SEEN, UNKNOWN = 0.5, 0.3, 0.2
"""Parts of the mix: what waits now, what was seen so far, and whole cards, whatever may come."""
MANY = 64
"""GPUs of one worker beyond which no demand is looked into."""


def shape(rules: ResourceRules, largest: int) -> DemandShape | None:
    """The kind of a demand, seen from the largest card of the fleet (bytes); None where it takes no GPU."""
    if rules.cpu_only or largest <= 0:
        return None
    if rules.pool is not None and rules.pool.whole:
        return DemandShape(max(rules.pool.cards, 1), 0, 1.0)
    if rules.vram <= 0 and rules.cpu:
        return None
    share = max(rules.share_of_type.values(), default=rules.share)
    share = share if rules.claim_policy in (ClaimPolicy.SHARE, ClaimPolicy.AT_LEAST) else 0.0
    offers = int(largest * share) if rules.claim_policy is ClaimPolicy.SHARE and share > 0 else largest
    fewest = 1 if rules.claim_policy is ClaimPolicy.EACH else max(1, -(-rules.vram // max(offers, 1)))
    gpus = rules.gpu_count or fewest
    if not rules.gpu_count and fewest > 1:
        gpus = next((n for n in rules.divisors.allowed(2, MANY) if n >= fewest), fewest)
    size = rules.vram if rules.claim_policy is ClaimPolicy.EACH else -(-rules.vram // gpus)
    return DemandShape(gpus, min(size, largest), min(share, 1.0))


def magnitude(rules: ResourceRules, largest: int) -> int:
    """Bytes that a demand would take of cards as large as the largest: how large it is among others. A demand
    without GPUs comes after all that take one, by its RAM."""
    kind = shape(rules, largest)
    if kind is None:
        return 0
    return kind.gpus * max(kind.size, int(kind.share * largest), 1)


def mix(waiting: Mapping[DemandShape, float], seen: Mapping[DemandShape, float]) -> Mix:
    """Kinds with how many of them wait and how many were seen; a part without any gives its weight to the
    others."""
    parts = [(WAITING, _coarse(waiting)), (SEEN, _coarse(seen)), (UNKNOWN, dict.fromkeys(WHOLE, 1.0))]
    there = sum(weight for weight, counts in parts if counts)
    weights: dict[DemandShape, float] = {}
    for weight, counts in parts:
        total = sum(counts.values())
        for kind, n in counts.items():
            weights[kind] = weights.get(kind, 0.0) + weight / there * n / total
    kept = sorted(weights.items(), key=lambda x: (-x[1], x[0].gpus, x[0].size))[:MOST]
    total = sum(w for _, w in kept)
    return Mix(tuple(k for k, _ in kept), tuple(w / total for _, w in kept))


def distance(a: Mix, b: Mix) -> float:
    """Half the sum of differences of weights, 0..1: 0 = the same mix."""
    first, second = dict(zip(a.shapes, a.weights, strict=True)), dict(zip(b.shapes, b.weights, strict=True))
    return sum(abs(first.get(k, 0.0) - second.get(k, 0.0)) for k in first.keys() | second.keys()) / 2


def _coarse(counts: Mapping[DemandShape, float]) -> dict[DemandShape, float]:
    """Kinds that are nearly the same as one: sizes in eighths of a power of two, upwards."""
    found: dict[DemandShape, float] = {}
    for kind, n in counts.items():
        if n <= 0:
            continue
        step = max(1 << max(kind.size.bit_length() - 4, 0), 1)
        one = DemandShape(kind.gpus, -(-kind.size // step) * step, round(kind.share, 2))
        found[one] = found.get(one, 0.0) + n
    return found
