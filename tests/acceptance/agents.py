"""Simulated workers: they beat, take the rows that are theirs and report states, all by plain SQL.

All that are up beat in one statement, at the same moment as far as the database is concerned: where this
machine stalls, all of them fall silent together, which the daemons have to put up with.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import anyio

from tests.integration.world import connected
from tests.waiting import elapse

_BEAT = "UPDATE workers SET heartbeat_at = clock_timestamp() WHERE id = ANY ($1::bigint[])"
_TAKE = """
UPDATE model_instances SET state = 'INITIALIZING'
 WHERE state = 'SCHEDULED' AND worker_id = ANY ($1::bigint[]) RETURNING id, placement_epoch"""
_REPORT = """
UPDATE model_instances SET state = $3, state_message = $4
 WHERE id = $1 AND placement_epoch = $2 AND state IN ('INITIALIZING', 'UNREACHABLE')"""
_BACK = """
SELECT id, placement_epoch FROM model_instances
 WHERE state = 'UNREACHABLE' AND worker_id = ANY ($1::bigint[])"""


class Agents:
    """Workers by id. `lazy` ones beat but take nothing; instances on `broken` ones fail with its words."""

    def __init__(self, sql: Any, workers: Collection[int], every: float) -> None:
        self._sql = sql
        self._every = every
        self.up = set(workers)
        self.lazy: set[int] = set()
        self.broken: dict[int, str] = {}
        self.beats = 0

    async def run(self) -> None:
        while True:
            await self.beat()
            await elapse(self._every, "between two heartbeats")

    async def beat(self) -> None:
        """A heartbeat of all that are up, and what they have to do."""
        up = sorted(self.up)
        await self._sql.execute(_BEAT, up)
        self.beats += 1
        there = [w for w in up if w not in self.lazy]
        for row in [*await self._sql.fetch(_TAKE, there), *await self._sql.fetch(_BACK, there)]:
            at = await self._sql.fetchval("SELECT worker_id FROM model_instances WHERE id = $1", row["id"])
            words = self.broken.get(at)
            state = "RUNNING" if words is None else "ERROR"
            await self._sql.execute(_REPORT, row["id"], row["placement_epoch"], state, words)


@asynccontextmanager
async def agents(url: str, workers: Collection[int], every: float = 0.25) -> AsyncIterator[Agents]:
    """Workers that beat and work until this ends; the first heartbeat is there when it begins."""
    sql = await connected(url, application_name="the workers")
    made = Agents(sql, workers, every)
    try:
        await made.beat()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            yield made
            tasks.cancel_scope.cancel()
    finally:
        sql.terminate()
