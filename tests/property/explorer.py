"""Every interleaving of a few actors' steps, by walking the graph of the states that they can reach."""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

W = TypeVar("W", bound="Stepping")


class Stepping(Protocol):
    """A world that can be pickled, with actors that can make steps in it."""

    def able(self) -> list[int]:
        """Actors that have a step left."""
        ...

    def step(self, actor: int) -> None: ...


def _proxy(mapping: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(mapping)


class _Pickler(pickle.Pickler):
    dispatch_table: ClassVar[Any] = copyreg.dispatch_table | {
        MappingProxyType: lambda m: (_proxy, (dict(m),))
    }


def frozen(world: object) -> bytes:
    """A world as bytes: its copy, and what tells it from others."""
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(world)
    return out.getvalue()


class Explored:
    """How much was walked."""

    def __init__(self) -> None:
        self.states = 0
        self.steps = 0
        self.ways = 0
        """Interleavings from the beginning to an end."""

    def __repr__(self) -> str:
        return f"{self.ways} interleavings, {self.states} states, {self.steps} steps"


def explore(begin: Callable[[], W], at_each: Callable[[W], None], at_end: Callable[[W], None]) -> Explored:
    """Make each possible step in each reachable state once. `at_end` may change the world it is given."""
    told = Explored()
    ways: dict[bytes, int] = {}

    def walk(state: bytes) -> int:
        if state in ways:
            return ways[state]
        world: W = pickle.loads(state)
        able = world.able()
        told.states += 1
        if not able:
            at_end(world)
            ways[state] = 1
            return 1
        total = 0
        for actor in able:
            told.steps += 1
            world.step(actor)
            at_each(world)
            total += walk(frozen(world))
            world = pickle.loads(state)
        ways[state] = total
        return total

    told.ways = walk(frozen(begin()))
    return told
