"""Waiting for rows: a query is asked again until it has an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")

INTERVAL = 0.02
"""Seconds between two queries."""


async def poll(
    query: Callable[[], Awaitable[T | None]], patience: float, interval: float = INTERVAL
) -> T | None:
    """The first answer of `query` that is not None; None where there is none for `patience` seconds."""
    with anyio.move_on_after(patience):
        while True:
            answer = await query()
            if answer is not None:
                return answer
            await anyio.sleep(interval)
    return None
