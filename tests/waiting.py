"""Waiting for what comes about by itself: the one place in which tests wait.

The answer is there as soon as it is true; where it is not true in time, the AssertionError says what was
waited for and what was seen instead. Logs and metrics of daemons are read through `tests.acceptance.daemon`,
rows through `Site.until` of `tests.acceptance.machines`; both wait here.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, TypeVar

import anyio
import asyncpg

from tests.integration.world import connected

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds. Success never waits for them, so they are many: a busy machine is no failure."""
LOOK = 0.02
"""Seconds between two looks."""


async def until(
    condition: Callable[[], T | Awaitable[T]],
    what: str,
    timeout: float = PATIENCE,
    shows: Callable[[], str | Awaitable[str]] | None = None,
) -> T:
    """Ask again until the answer is true; that answer. `shows`: how things stand, for a failure's text."""
    answer: Any = None
    with anyio.move_on_after(timeout):
        while True:
            answer = await _awaited(condition())
            if answer:
                found: T = answer
                return found
            await anyio.sleep(LOOK)
    state = await _awaited(shows()) if shows else f"the last answer was {answer!r}"
    raise AssertionError(f"not in {timeout:.0f} s: {what}\n{state}")


def until_in_thread(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> None:
    """`until` for tests without an event loop."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"not in {timeout:.0f} s: {what}"
        time.sleep(LOOK)


async def soon(signal: Awaitable[T], what: str, timeout: float = PATIENCE) -> T:
    """The result of something that ends by itself: an event's `wait()`, a task, a queue's `get()`."""
    with anyio.move_on_after(timeout):
        return await signal
    raise AssertionError(f"not in {timeout:.0f} s: {what}")


async def elapse(seconds: float, why: str) -> None:
    """Let time pass, where time itself is what is tested or a load has a pace. Not for waiting: `why` says
    what it is for."""
    assert why
    await anyio.sleep(seconds)


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to what is due next once nothing else is left to do: delays are exact
    and take no time, however busy the machine is. For code that waits for timers alone.

        @pytest.fixture
        def anyio_backend(): return "asyncio", {"loop_factory": TimelessLoop}
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._look = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None = None) -> Any:
        ready = self._look(0 if timeout is not None else None)
        if not ready and timeout:
            self._now += timeout
        return ready


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


# -- notifications -------------------------------------------------------------------------------------------


class Ear:
    """`heard()` gives the payloads since the last call, in order."""

    def __init__(self, listening: Any, speaking: Any, channel: str) -> None:
        self._listening = listening
        self._speaking = speaking
        self._channel = channel
        self._got: asyncio.Queue[str] = asyncio.Queue()
        self._marks = count(1)

    async def open(self) -> None:
        await self._listening.add_listener(self._channel, lambda *a: self._got.put_nowait(a[3]))

    async def heard(self) -> list[str]:
        """Notifications come in the order of commits: what was sent before the mark is heard before it."""
        mark = f"mark {next(self._marks)}"
        await self._speaking.execute("SELECT pg_notify($1, $2)", self._channel, mark)
        found: list[str] = []
        while (payload := await soon(self._got.get(), f"{mark} is heard; before it came {found}")) != mark:
            found.append(payload)
        return found


@asynccontextmanager
async def listening(url: str, channel: str = "gpustackd_public") -> AsyncIterator[Ear]:
    """An ear on the channel of the schema."""
    one, two = await connected(url), await connected(url)
    ear = Ear(one, two, channel)
    await ear.open()
    try:
        yield ear
    finally:
        one.terminate()
        two.terminate()


# -- locks ---------------------------------------------------------------------------------------------------

_BLOCKED = "SELECT cardinality(pg_blocking_pids($1)) > 0"


@asynccontextmanager
async def blocked(url: str, statement: str, *arguments: Any) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """Run a statement on a connection of its own; entered once the server says that it waits for a lock.
    Yields a function that awaits its end and raises what it raised."""
    connection = await asyncpg.connect(url)
    watch = await asyncpg.connect(url)
    pid = connection.get_server_pid()
    task = asyncio.ensure_future(connection.execute(statement, *arguments))
    try:

        async def waits() -> bool:
            assert not task.done(), f"did not wait: {task.result()}"
            return bool(await watch.fetchval(_BLOCKED, pid))

        await until(waits, f"{statement} waits for a lock")

        async def finished() -> Any:
            return await soon(task, f"{statement} goes on")

        yield finished
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        connection.terminate()
        await watch.close()
