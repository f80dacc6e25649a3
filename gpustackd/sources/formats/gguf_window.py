"""A window that moves forward over a file: asks for the next range when it runs out, and keeps only that one.

Ranges double from a first small one to a largest, so that at most about as much is read beyond the header as
the header itself is long, and never more than one largest window.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import NamedTuple, NoReturn

import numpy as np

FIRST = 256 * 1024
MANY = 4096
"""From so many strings on they are skipped together."""


class Range(NamedTuple):
    """Bytes wanted: where they begin in the file, and how many."""

    start: int
    length: int


class Window:
    """`at`: the position in the file. `end` bounds what is read; `cut_off` raises where that is reached."""

    def __init__(self, file_bytes: int, end: int, largest: int, cut_off: Callable[[], NoReturn]) -> None:
        self._file_bytes = file_bytes
        self._end = end
        self._largest = largest
        self._next = min(FIRST, largest)
        self._cut_off = cut_off
        self._held = b""
        self._begin = 0
        self.at = 0

    def take(self, count: int) -> Generator[Range, bytes, bytes]:
        """The next `count` bytes."""
        offset = self.at - self._begin
        if offset >= 0 and offset + count <= len(self._held):
            data = self._held[offset : offset + count]
        else:
            data = yield from self._refill(count)
        self.at += count
        return data

    def skip(self, count: int) -> None:
        """Skip bytes without reading them."""
        self.at += count

    def skip_strings(self, count: int, form: str) -> Generator[Range, bytes, None]:
        """Skip `count` strings, each with its length before it in the form `form`."""
        width = struct.calcsize(form)
        left = count
        while left:
            yield from self._refill_if_short(width)
            offset = self.at - self._begin
            if left >= MANY and form == "<Q":
                offset, left = _skip_together(self._held, offset, left)
            offset, left = _skip(self._held, offset, left, form)
            self.at = self._begin + offset
            if self.at > self._file_bytes:
                self._cut_off()

    def _refill_if_short(self, count: int) -> Generator[Range, bytes, None]:
        offset = self.at - self._begin
        if offset < 0 or offset + count > len(self._held):
            yield from self._refill(count)

    def _refill(self, count: int) -> Generator[Range, bytes, bytes]:
        """Move the view so that `count` bytes from `at` on are in it; those bytes."""
        if self.at + count > self._end:
            self._cut_off()
        offset = self.at - self._begin
        have = self._held[offset:] if 0 <= offset < len(self._held) else b""
        start = self.at + len(have)
        length = min(max(count - len(have), self._next), self._end - start)
        self._next = min(2 * self._next, self._largest)
        got = yield Range(start, length)
        self._held = have + got[:length]
        self._begin = self.at
        if len(self._held) < count:  # the file shrank, or whoever hands it out cut it short
            self._cut_off()
        return self._held[:count]


def _skip(held: bytes, offset: int, left: int, form: str) -> tuple[int, int]:
    """Skip strings one by one, as far as their lengths are in view: the new offset, and what is left."""
    unpack = struct.Struct(form).unpack_from
    width = struct.calcsize(form)
    try:  # no test of the end in the loop: a vocabulary has hundreds of thousands of strings
        while left:
            offset += width + unpack(held, offset)[0]
            left -= 1
    except (struct.error, OverflowError):
        pass  # this one lies beyond the view
    return offset, left


def _skip_together(held: bytes, offset: int, left: int) -> tuple[int, int]:
    """Skip short strings at once: a length below 256 is a byte before seven zeros, which text hardly
    ever holds. Every step is checked; where the chain breaks, the others go one by one."""
    view = np.frombuffer(held, np.uint8, offset=offset)
    if len(view) < 16:
        return offset, left
    zero = view == 0
    three = zero[:-2] & zero[1:-1]
    three &= zero[2:]
    seven = three[:-4] & three[3:-1]
    seven &= zero[6:]
    starts = np.flatnonzero(seven[1:])
    if not len(starts) or starts[0] != 0:
        return offset, left
    after = starts + 8 + view[starts]
    broken = np.flatnonzero(after[:-1] != starts[1:])
    good = int(broken[0]) if len(broken) else len(starts) - 1
    good = min(good, left)
    return (offset + int(starts[good]), left - good) if good else (offset, left)
