"""A listening connection that knows when it has heard everything that was sent so far."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from tests.integration.world import connected


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
        found = []
        async with asyncio.timeout(20):
            while (payload := await self._got.get()) != mark:
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
