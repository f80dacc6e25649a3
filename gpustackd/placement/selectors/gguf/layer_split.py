"""How a GGUF model is divided over given devices: a fill by layers, then held against the exact sizes.

What a device takes beside its layers (buffers, allowance) hardly depends on how many these are, but on its
place: first, inner, last. It is read from a few exact sizes; the plan that follows from it is sized exactly,
and made again with what was missing where it does not hold. So no set of devices is tried twice, and none
for its own sake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.gguf_levels import Level
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES, layers_per_device
from gpustackd.placement.rules.resource_rules import GgufRules
from gpustackd.placement.selectors.gguf.layer_bounds import KEPT, Bounds

Room: TypeAlias = tuple[int, bool]
"""Free bytes of a device, and whether it takes its memory from the host's."""
ROUNDS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerSplit:
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
    plan: LayerSplit


class LayerSplitter(Bounds):
    """Plans for one model. Pure but for what it keeps: equal questions have equal answers."""

    def __init__(self, asked: GgufRules) -> None:
        super().__init__(asked)
        self._kept: dict[object, object] = {}

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

    # -- several devices -------------------------------------------------------------------------------------

    def divided(self, rooms: Sequence[Room], level: int) -> LayerSplit | None:
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

    def _divided(self, rooms: Sequence[Room], level: int) -> LayerSplit | None:
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
                return LayerSplit(found, counts, claims)
            at = start
            for n, (claim, layers) in enumerate(zip(claims, counts, strict=True)):
                rest[n] = max(rest[n], claim - self.layers.held(at, at + layers))
                at += layers
        return None

    def _on_one(self, room: Room, level: int) -> LayerSplit | None:
        free, unified = room
        share = self.alone(level).devices[0]
        claim = share.unified if unified else share.vram
        return LayerSplit(self.alone(level), (level,), (claim,)) if claim <= free else None

    def _given(self, rooms: Sequence[Room], level: int) -> Choosing | None:
        """The shares that a flag gives, on devices in their order that hold them."""
        counts = layers_per_device(self.asked.split, level)
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
        return Choosing(tuple(taken), LayerSplit(found, counts, tuple(claims)))

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
        """As many devices as may be and have a layer each, without those at the end that could not hold the
        output."""
        taken = sorted(order[: min(MOST_DEVICES, self.total - 1)])
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
