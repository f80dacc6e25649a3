"""Statements that wait for a lock: known to wait before the test goes on, without any sleep for luck."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

_BLOCKED = "SELECT cardinality(pg_blocking_pids($1)) > 0"


async def until(condition: Callable[[], Awaitable[bool]], within: float = 20.0) -> None:
    """Ask again until it is so; fail after `within` seconds."""
    async with asyncio.timeout(within):
        while not await condition():
            await asyncio.sleep(0.005)


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

        await until(waits)

        async def finished() -> Any:
            async with asyncio.timeout(20):
                return await task

        yield finished
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        connection.terminate()
        await watch.close()
