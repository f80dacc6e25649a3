"""A heap whose items can leave from anywhere: what left is skipped on the way out, not searched for."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Stamped(Protocol):
    """An item whose `stamp` changes, to one never used before, when it leaves its heap or its rank there."""

    stamp: int


T = TypeVar("T", bound=Stamped)

_SLACK = 64


class RemovableHeap(Generic[T]):
    """Items by rank, lowest first. Two items never have the same rank.

    An entry counts while its item still carries the stamp that it was added with. `add` costs O(log n),
    the others O(1) over time; the heap stays within twice what it holds.
    """

    __slots__ = ("_entries", "_live")

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, ...], int, T]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __iter__(self) -> Iterator[T]:
        """Every item, in no order."""
        return (item for _, stamp, item in self._entries if stamp == item.stamp)

    def add(self, rank: tuple[float, ...], item: T) -> None:
        """Add an item that is not in the heap."""
        self._live += 1
        heapq.heappush(self._entries, (rank, item.stamp, item))

    def removed(self) -> None:
        """One item is no longer in the heap: its stamp has just changed."""
        self._live -= 1
        if len(self._entries) > 2 * self._live + _SLACK:
            self._entries = [entry for entry in self._entries if entry[1] == entry[2].stamp]
            heapq.heapify(self._entries)

    def first(self) -> tuple[tuple[float, ...], T] | None:
        """The lowest rank and its item, which stays; None when empty."""
        while self._entries:
            rank, stamp, item = self._entries[0]
            if stamp == item.stamp:
                return rank, item
            heapq.heappop(self._entries)
        return None

    def head(self) -> T:
        """The item of the lowest rank. Raise IndexError when empty."""
        first = self.first()
        if first is None:
            raise IndexError("the heap is empty")
        return first[1]
