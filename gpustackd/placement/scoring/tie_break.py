"""Breaks even scores: by the instance's name, so that a decision can be repeated and replicas of the daemon
that work on different instances do not all choose the same GPU.

Instances of one model usually differ in the number at the end of their names. Their numbers are
consecutive, so that even replicas that cannot see each other's decisions yet pick different places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b


@lru_cache(maxsize=4096)
def _stem(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big")


def tie_break(name: str) -> int:
    """A stable, well spread number for a name; names that differ in their last number are neighbours."""
    stem = name.rstrip("0123456789")
    digits = name[len(stem) :][-12:]
    return _stem(stem) + (int(digits) if digits.isascii() and digits else 0)


def block(items: Sequence[int], size: int, at: int) -> list[int]:
    """`size` of `items`: whole aligned blocks take turns (cards 0,1 then 2,3 …), so that what stays
    free stays in whole blocks."""
    if size >= len(items):
        return list(items)
    start = size * (at % (len(items) // size))
    return list(items[start : start + size])
