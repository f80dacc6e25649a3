"""How a GGUF model is divided over given devices: a fill by layers, then held against the exact sizes.

What a device takes beside its layers (buffers, allowance) hardly depends on how many these are, but on its
place: first, inner, last. It is read from a few exact sizes; the plan that follows from it is sized exactly,
and made again with what was missing where it does not hold. So no set of devices is tried twice, and none
for its own sake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np

from gpustackd.domain.fleet import Bools, Ints
from gpustackd.domain.gguf_levels import Level
from gpustackd.placement.fit.gguf import MOST_DEVICES, Gguf
from gpustackd.placement.fit.gguf_layers import Layers, shared_out

Room: TypeAlias = tuple[int, bool]
"""Free bytes of a device, and whether it takes its memory from the host's."""
Rests: TypeAlias = tuple[int, int, int]
"""What the first, an inner and the last device take beside layers."""

ROUNDS = 4
BUDGET = 5000
"""Exact sizes that one decision may ask for; a search that needs more ends with what it has."""
KEPT = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plan:
    """A division that holds; `counts` are layers per device, the output among the last one's."""

    level: Level
    counts: tuple[int, ...]
    claims: tuple[int, ...]

    @property
    def layers(self) -> int:
        return self.level.offload_layers


@dataclass(frozen=True, slots=True)
class Choosing:
    """Which of the devices offered take part, by their position, and the plan for them."""

    taken: tuple[int, ...]
    plan: Plan


class Planner:
    """Plans for one model. Pure but for what it keeps: equal questions have equal answers."""

    def __init__(self, asked: Gguf) -> None:
        self.asked = asked
        self.layers = Layers(asked.sizes.layer_bytes)
        self.questions = 0
        """Exact sizes asked for since the last `begin`."""
        self.exhausted = False
        """Whether a search had to end for the budget."""
        self._alone: dict[int, Level] = {}
        self._rests: dict[tuple[int, bool, bool], Rests] = {}
        self._kept: dict[object, object] = {}
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

    def deepest_alone(self, free: Ints, pooled: Bools) -> Ints:
        """The most layers, but not all, that devices with so much free memory hold, each by itself; 0 = none.

        What layers add names a few levels, which are held against their exact sizes.
        """
        most = self.total - 1
        found = self.about_alone(free, pooled)
        for unified in (False, True):
            mine = pooled if unified else ~pooled
            if most < 1 or not mine.any():
                continue
            level = found[mine]
            claim = self._claims(unified)
            for _ in range(ROUNDS):
                higher = np.minimum(level + 1, most)
                rising = (claim(higher) <= free[mine]) & (level < most)
                falling = ~rising & (level > 0) & (claim(level) > free[mine])
                level = np.where(rising, higher, level - falling)
                if not (rising | falling).any():
                    break
            found[mine] = np.where(claim(level) <= free[mine], level, 0)
        return found

    def _claims(self, unified: bool) -> Callable[[Ints], Ints]:
        def claims(levels: Ints) -> Ints:
            table = np.zeros(self.total + 1, np.int64)
            for n in set(levels[levels > 0].tolist()):
                share = self.alone(n).devices[0]
                table[n] = share.unified if unified else share.vram
            return table[levels]

        return claims

    def _rest_alone(self, unified: bool) -> int:
        """What one device takes beside some of the layers."""
        level = max(1, self.total // 2)
        share = self.alone(level).devices[0]
        return max(0, (share.unified if unified else share.vram) - self.needed(level))

    # -- several devices -------------------------------------------------------------------------------------

    def divided(self, rooms: Sequence[Room], level: int) -> Plan | None:
        """All of these devices hold so many layers together; None where they do not."""
        return self._keep(("divided", tuple(rooms), level), lambda: self._divided(rooms, level))

    def fewest(
        self, rooms: Sequence[Room], order: Sequence[int], level: int, most: int = 0
    ) -> Choosing | None:
        """As few of these devices as hold so many layers, those earlier in `order` before others where it can
        be; at most `most` (0 = all of them)."""
        key = ("fewest", tuple(rooms), tuple(order), level, most)
        return self._keep(key, lambda: self._fewest(rooms, order, level, most or len(rooms)))

    def exactly(self, rooms: Sequence[Room], order: Sequence[int], level: int, count: int) -> Choosing | None:
        """The same with a number of devices."""
        found = self._some(rooms, order, level, count)
        return found if found is not None and len(found.taken) == count else None

    def deepest(self, rooms: Sequence[Room], order: Sequence[int]) -> Choosing | None:
        """The devices, as few as can be, that hold the most layers (not all of them) together."""
        key = ("deepest", tuple(rooms), tuple(order))
        return self._keep(key, lambda: self._deepest(rooms, order))

    def likely_fewest(self, rooms: Sequence[Room], order: Sequence[int], level: int) -> int:
        """About how many devices `fewest` takes, by what layers add; 0 = none do. No exact size is asked for
        but those of buffers."""
        if self.asked.split:
            return len(self.asked.split) if len(rooms) >= len(self.asked.split) else 0
        key = ("likely", tuple(rooms), tuple(order), level)
        return self._keep(key, lambda: self._likely_fewest(rooms, order, level))

    def likely_deepest(self, rooms: Sequence[Room], order: Sequence[int]) -> int:
        """About how many layers `deepest` holds."""
        if self.asked.split:
            return self.total - 1 if len(rooms) >= len(self.asked.split) else 0
        key = ("reach", tuple(rooms), tuple(order))
        return self._keep(key, lambda: self._reach(rooms, self._able(rooms, order), self.total - 1))

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

    # -- the work --------------------------------------------------------------------------------------------

    def _keep(self, key: object, make: Callable[[], T]) -> T:
        if key in self._kept:
            return self._kept[key]  # type: ignore[return-value]
        found = make()
        if not self.exhausted:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found

    def _spent(self) -> bool:
        if self.questions >= BUDGET:
            self.exhausted = True
        return self.exhausted

    def _divided(self, rooms: Sequence[Room], level: int) -> Plan | None:
        count = len(rooms)
        if count > MOST_DEVICES or level < count:
            return None
        free = [f for f, _ in rooms]
        if sum(free) < self.needed(level):
            return None
        if count == 1:
            return self._on_one(rooms[0], level)
        if self.asked.split:
            given = self._given(rooms, level)
            return given.plan if given is not None and len(given.taken) == count else None
        own, pooled = self.rests(count, level, unified=False), self.rests(count, level, unified=True)
        rest = [(pooled if u else own)[_place(n, count)] for n, (_, u) in enumerate(rooms)]
        start = self.total - level
        for _ in range(ROUNDS):
            counts = self.layers.balanced(start, free, rest)
            if counts is None or self._spent():
                return None
            found = self.exact(level, counts)
            claims = tuple(s.unified if u else s.vram for s, (_, u) in zip(found.devices, rooms, strict=True))
            if all(c <= f for c, f in zip(claims, free, strict=True)):
                return Plan(found, counts, claims)
            at = start
            for n, (claim, layers) in enumerate(zip(claims, counts, strict=True)):
                rest[n] = max(rest[n], claim - self.layers.held(at, at + layers))
                at += layers
        return None

    def _on_one(self, room: Room, level: int) -> Plan | None:
        free, unified = room
        share = self.alone(level).devices[0]
        claim = share.unified if unified else share.vram
        return Plan(self.alone(level), (level,), (claim,)) if claim <= free else None

    def _given(self, rooms: Sequence[Room], level: int) -> Choosing | None:
        """The shares that a flag gives, on devices in their order that hold them."""
        counts = shared_out(self.asked.split, level)
        if self._spent():
            return None
        found = self.exact(level, counts)
        taken: list[int] = []
        claims: list[int] = []
        for n, (free, unified) in enumerate(rooms):
            if len(taken) == len(counts):
                break
            share = found.devices[len(taken)]
            claim = share.unified if unified else share.vram
            if claim <= free:
                taken.append(n)
                claims.append(claim)
        if len(taken) < len(counts):
            return None
        return Choosing(tuple(taken), Plan(found, counts, tuple(claims)))

    def _could_hold(self, rooms: Sequence[Room], some: Sequence[int], level: int) -> bool:
        return sum(rooms[i][0] for i in some) >= self.needed(level)

    def _fewest(self, rooms: Sequence[Room], order: Sequence[int], level: int, most: int) -> Choosing | None:
        if self.asked.split:
            return self._given(rooms, level)
        for count in range(2, min(most, len(rooms), MOST_DEVICES, level) + 1):
            if self._could_hold(rooms, order[:count], level):
                found = self._some(rooms, order, level, count)
                if found is not None:
                    return found
        return None

    def _likely_fewest(self, rooms: Sequence[Room], order: Sequence[int], level: int) -> int:
        start = self.total - level
        for count in range(2, min(len(rooms), MOST_DEVICES, level) + 1):
            if not self._could_hold(rooms, order[:count], level):
                continue
            first = sorted(order[:count])
            if self.layers.filled(start, self._without_rests(rooms, first, level)) is not None:
                return count
            rests = self.rests(count, level, unified=any(u for _, u in rooms))
            if count < len(rooms) and self.layers.chosen(start, [f for f, _ in rooms], rests, count):
                return count
        return 0

    def _without_rests(self, rooms: Sequence[Room], taken: Sequence[int], level: int) -> list[int]:
        """What these devices have for layers."""
        count = len(taken)
        own, pooled = (self.rests(count, level, unified=u) for u in (False, True))
        return [rooms[i][0] - (pooled if rooms[i][1] else own)[_place(n, count)] for n, i in enumerate(taken)]

    def _able(self, rooms: Sequence[Room], order: Sequence[int]) -> list[int]:
        """As many devices as may be, without those at the end that could not hold the output."""
        taken = sorted(order[:MOST_DEVICES])
        while taken and not self._ends(rooms[taken[-1]], len(taken)):
            taken.pop()
        return taken

    def _some(self, rooms: Sequence[Room], order: Sequence[int], level: int, count: int) -> Choosing | None:
        """The first so many in `order`, else any that hold so many layers."""
        if self.asked.split:
            return self._given(rooms, level) if count == len(self.asked.split) else None
        first = tuple(sorted(order[:count]))
        plan = self.divided([rooms[i] for i in first], level)
        if plan is not None:
            return Choosing(first, plan)
        if count == len(rooms) or not self._could_hold(rooms, order[:count], level):
            return None
        rests = self.rests(count, level, unified=any(u for _, u in rooms))
        taken = self.layers.chosen(self.total - level, [f for f, _ in rooms], rests, count)
        plan = self.divided([rooms[i] for i in taken], level) if taken else None
        return Choosing(taken, plan) if taken and plan else None

    def _deepest(self, rooms: Sequence[Room], order: Sequence[int]) -> Choosing | None:
        most = self.total - 1
        if self.asked.split:
            return self._deepest_given(rooms, most)
        taken = self._able(rooms, order)
        level = self._reach(rooms, taken, most)
        for i in reversed(order):
            fewer = [x for x in taken if x != i]
            if i in taken and len(fewer) > 1 and self._reach(rooms, fewer, most) >= level:
                taken = fewer
        while level >= max(len(taken), 2):
            plan = self.divided([rooms[i] for i in taken], level)
            if plan is not None:
                return Choosing(tuple(taken), plan)
            level -= 1
        return None

    def _ends(self, room: Room, count: int) -> bool:
        """Whether a device can be the last one, which holds the output."""
        rest = self.rests(count, 0, unified=room[1])[2]
        return self.layers.held(self.total - 1, self.total) + rest <= room[0]

    def _reach(self, rooms: Sequence[Room], taken: Sequence[int], most: int) -> int:
        """How many layers these devices hold, by what they take at least."""
        count = len(taken)
        if not 1 < count <= most:
            return 0
        return min(self.layers.deepest(self._without_rests(rooms, taken, 0)), most)

    def _deepest_given(self, rooms: Sequence[Room], most: int) -> Choosing | None:
        best: Choosing | None = None
        low, high = len(self.asked.split), most
        while low <= high:
            middle = (low + high) // 2
            found = self._given(rooms, middle)
            if found is None:
                high = middle - 1
            else:
                best, low = found, middle + 1
        return best


def _place(n: int, count: int) -> int:
    return 0 if n == 0 else 2 if n == count - 1 else 1
