"""Layers of a GGUF model on devices, by what each adds to the device that runs it. Sizes in bytes.

Layers lie in their order on devices in theirs: each device runs neighbours. So the layers from `start` on fit
exactly where it works to give each device in tie_break as many as it holds, and the most layers fit where the
devices are filled from the last one back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Layers:
    """`adds`: one size per layer, the output last."""

    def __init__(self, adds: Sequence[int]) -> None:
        self.count = len(adds)
        self.least = min(adds, default=0)
        self._sums = [0]
        for size in adds:
            self._sums.append(self._sums[-1] + size)

    def held(self, start: int, end: int) -> int:
        """What layers `start` … `end` - 1 take."""
        return self._sums[end] - self._sums[start]

    def forward(self, start: int, room: int) -> int:
        """The end of the longest run from `start` that fits."""
        return (
            max(start, bisect_right(self._sums, self._sums[start] + room, start) - 1) if room >= 0 else start
        )

    def backward(self, end: int, room: int) -> int:
        """The start of the longest run up to `end` that fits."""
        return bisect_left(self._sums, self._sums[end] - room, 0, end + 1) if room >= 0 else end

    def longest(self, room: int, last: int) -> int:
        """The most neighbours among the last so many layers that fit together."""
        best, start = 0, self.count - last
        for end in range(start + 1, self.count + 1):
            while self.held(start, end) > room:
                start += 1
            best = max(best, end - start)
        return best

    # -- every device takes part ---------------------------------------------------------------------------

    def filled(self, start: int, rooms: Sequence[int]) -> tuple[int, ...] | None:
        """Layers of each device, at least one each; None where the layers from `start` on do not fit so."""
        found = self._greedy(start, rooms)
        if found is None and sum(rooms) >= self.held(start, self.count):
            return self._sparing(start, rooms)
        return found

    def _greedy(self, start: int, rooms: Sequence[int]) -> tuple[int, ...] | None:
        """The first devices take all that they hold. Where layers are alike, no other way does more."""
        counts = []
        at = start
        for behind, room in zip(range(len(rooms) - 1, 0, -1), rooms, strict=False):
            end = min(self.forward(at, room), self.count - behind)
            if end <= at:
                return None
            counts.append(end - at)
            at = end
        if at >= self.count or self.held(at, self.count) > rooms[-1]:
            return None
        return (*counts, self.count - at)

    def _sparing(self, start: int, rooms: Sequence[int]) -> tuple[int, ...] | None:
        """A device takes less than it holds where the next one could not take the layer that comes then."""
        reached: list[dict[int, int]] = [{start: start}]
        for room in rooms:
            known = sorted(reached[-1])
            ends: dict[int, int] = {}
            for end in range(known[0] + 1, self.count + 1):
                at = bisect_left(known, self.backward(end, room))
                if at < len(known) and known[at] < end:
                    ends[end] = known[at]
            if not ends:
                return None
            reached.append(ends)
        counts: list[int] = []
        end = self.count
        for ends in reached[:0:-1]:
            if end not in ends:
                return None
            counts.append(end - ends[end])
            end = ends[end]
        return tuple(reversed(counts))

    def balanced(
        self, start: int, free: Sequence[int], rest: Sequence[int], rounds: int = 8
    ) -> tuple[int, ...] | None:
        """Layers of each device with the fullest device as empty as can be; `rest` is what a device takes
        beside its layers. None where they do not fit."""
        best = self.filled(start, [f - r for f, r in zip(free, rest, strict=True)])
        total = sum(free)
        if best is None or total <= 0:
            return best
        low, high = (self.held(start, self.count) + sum(rest)) / total, 1.0
        for _ in range(rounds):
            middle = (low + high) / 2
            found = self.filled(start, [int(f * middle) - r for f, r in zip(free, rest, strict=True)])
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return best

    # -- some of the devices do ------------------------------------------------------------------------------

    def deepest(self, rooms: Sequence[int]) -> int:
        """How many layers, counted from the last, the devices hold together; some may hold none."""
        at = self.count
        for room in reversed(rooms):
            at = self.backward(at, room)
        return self.count - at

    def chosen(
        self, start: int, free: Sequence[int], rests: tuple[int, int, int], count: int
    ) -> tuple[int, ...] | None:
        """At most so many of the devices, in their order, that hold the layers from `start` on; None where no
        choice does. `rests`: what the first, an inner, and the last device take beside layers.

        To have come further with the same number of devices is never worse, so that one best way per number
        is kept from device to device.
        """
        reached: list[tuple[int, tuple[int, ...]] | None] = [None] * (count + 1)
        reached[0] = (start, ())
        for j, size in enumerate(free):
            for c in range(min(j, count - 1), -1, -1):
                before = reached[c]
                if before is None:
                    continue
                end = self.forward(before[0], size - rests[1 if c else 0])
                if end >= self.count and size - rests[2] < self.held(before[0], self.count):
                    end = self.count - 1  # all but the output, which takes more
                if end >= self.count:
                    return (*before[1], j)
                known = reached[c + 1]
                if end > before[0] and (known is None or end > known[0]):
                    reached[c + 1] = (end, (*before[1], j))
        return None
