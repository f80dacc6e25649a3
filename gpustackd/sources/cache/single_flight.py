"""One read per key at a time: whoever comes later waits for the result of the first."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

from gpustackd.errors import ModelUnreadable

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self) -> None:
        self.landed = anyio.Event()
        self.result: list[T] = []
        self.error: ModelUnreadable | None = None


class SingleFlight(Generic[T]):
    """No task of its own: the first caller does the work. When that caller is cancelled, the next one starts
    over, so that nobody's cancellation is felt by another."""

    def __init__(self) -> None:
        self._flights: dict[object, _Flight[T]] = {}

    async def run(self, key: object, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call()`, by this task or by another that was there before. A ModelUnreadable is
        shared with everyone who waits; any other error is raised in the task that did the work alone."""
        while (other := self._flights.get(key)) is not None:
            await other.landed.wait()
            if other.result:
                return other.result[0]
            if other.error is not None:
                raise same(other.error)
        flight = self._flights[key] = _Flight[T]()
        try:
            result = await call()
            flight.result.append(result)
            return result
        except ModelUnreadable as e:
            flight.error = e
            raise
        finally:
            del self._flights[key]
            flight.landed.set()


def same(e: ModelUnreadable) -> ModelUnreadable:
    """An equal error without the traceback of another task."""
    return ModelUnreadable(e.code, e.problem, e.remedy, retryable=e.retryable)
