"""Searches kept between decisions, the least recently used given up first; memory stays flat."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SearchCache(Generic[T]):
    """At most `limit` kept values by key. One memo belongs to one fleet."""

    def __init__(self, limit: int = 256) -> None:
        self.limit = limit
        self.hits = 0
        self.misses = 0
        self._kept: OrderedDict[Hashable, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> T | None:
        """What was kept under a key, now the most recently used."""
        found = self._kept.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return found

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value; the oldest one goes where there are too many."""
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self.limit:
            self._kept.popitem(last=False)

    def values(self) -> Iterator[T]:
        """Everything that is kept."""
        return iter(self._kept.values())
