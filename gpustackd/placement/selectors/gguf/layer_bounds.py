"""What devices could hold of a GGUF model at most, by what layers add and what a device takes beside them.

Exact sizes are asked for buffers alone, one question for each kind of division: what follows from it names
the few plans that are worth working out (see `gguf_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.gguf_levels import Level
from gpustackd.placement.rules.resource_rules import GgufRules
from gpustackd.placement.selectors.gguf.layer_costs import Layers

Rests: TypeAlias = tuple[int, int, int]
"""What the first, an inner and the last device take beside layers."""

BUDGET = 5000
"""Exact sizes that one decision may ask for; a search that needs more ends with what it has."""
KEPT = 4096


class Bounds:
    """Bounds for one model. Pure but for what it keeps: equal questions have equal answers."""

    def __init__(self, asked: GgufRules) -> None:
        self.asked = asked
        self.layers = Layers(asked.sizes.layer_bytes)
        self.questions = 0
        """Exact sizes asked for since the last `begin`."""
        self.exhausted = False
        """Whether a search had to end for the budget."""
        self._alone: dict[int, Level] = {}
        self._rests: dict[tuple[int, bool, bool], Rests] = {}
        self._runs: dict[tuple[int, int], int] = {}

    def begin(self) -> None:
        """A new decision: the budget is whole again."""
        self.questions = 0
        self.exhausted = False

    @property
    def total(self) -> int:
        return self.asked.total

    # -- one device ------------------------------------------------------------------------------------------

    def alone(self, level: int) -> Level:
        """So many layers on one device; 0 = the host alone."""
        found = self._alone.get(level)
        if found is None:
            found = self._alone[level] = self.asked.sizes.level(level)
        return found

    def about_alone(self, free: Ints, pooled: Bools) -> Ints:
        """About the most layers, but not all, that devices with so much free memory hold, each by itself; 0 =
        none. By what layers add; see `deepest_alone`."""
        most = self.total - 1
        if most < 1:
            return np.zeros(free.shape, np.int64)
        needed = np.array([self.needed(n) for n in range(most + 1)])
        rest = np.where(pooled, self._rest_alone(True), self._rest_alone(False))
        about: Ints = np.clip(np.searchsorted(needed, free - rest, side="right") - 1, 0, most)
        return about

    def _rest_alone(self, unified: bool) -> int:
        """What one device takes beside some of the layers."""
        level = max(1, self.total // 2)
        share = self.alone(level).devices[0]
        return max(0, (share.unified if unified else share.vram) - self.needed(level))

    # -- several devices -------------------------------------------------------------------------------------

    def needed(self, level: int) -> int:
        """Bytes that so many layers take on devices whatever their division, buffers not counted."""
        return self.layers.held(self.total - level, self.total)

    def left(self, level: int) -> int:
        """Bytes of RAM that the other layers take at least."""
        return self.layers.held(0, self.total - level)

    def at_most(self, size: int) -> int:
        """Layers that devices with so many bytes together can hold, whatever they are."""
        return self.total - self.layers.backward(self.total, size)

    def bound(self, sizes: Sequence[int]) -> int:
        """Layers that devices of these sizes can hold together, each by itself and all of them."""
        most = self.at_most(sum(sizes))
        rest = self.least_rest
        return min(most, sum(self._longest(s - rest, most) for s in sizes))

    def _longest(self, room: int, last: int) -> int:
        key = (room, last)
        found = self._runs.get(key)
        if found is None:
            if len(self._runs) >= KEPT:
                self._runs.clear()
            found = self._runs[key] = self.layers.longest(room, last)
        return found

    @cached_property
    def least_rest(self) -> int:
        """What any of several devices takes at least beside layers."""
        found = [
            r for level in (self.total, 0) for u in (False, True) for r in self.rests(3, level, unified=u)
        ]
        return min(found)

    def rests(self, count: int, level: int, *, unified: bool) -> Rests:
        """What each of `count` devices takes beside its layers, at least about."""
        full = level == self.total
        parts = min(count, 3, self.total)
        key = (parts, full, unified)
        found = self._rests.get(key)
        if found is None:
            # the same question whatever level was asked about first, so that answers do not depend on that
            probe = self.total if full else max(parts, min(self.total // 2, self.total - 1))
            even = [probe // parts + (n < probe % parts) for n in range(parts)]
            shares = self.exact(probe, tuple(even)).devices
            ends = np.cumsum([self.total - probe, *even]).tolist()
            over = [
                max(0, (s.unified if unified else s.vram) - self.layers.held(a, b))
                for s, a, b in zip(shares, ends, ends[1:], strict=False)
            ]
            found = self._rests[key] = (over[0], over[len(over) // 2], over[-1])
        return found

    def exact(self, level: int, counts: tuple[int, ...]) -> Level:
        """The sizes themselves."""
        self.questions += 1
        return self.asked.sizes.level(level, tuple(map(float, counts)))

    def _spent(self) -> bool:
        if self.questions >= BUDGET:
            self.exhausted = True
        return self.exhausted
