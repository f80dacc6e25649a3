"""A fleet, its users and several replicas, in any order: the rules hold after every step.

Over memory with many and long histories; over PostgreSQL and memory side by side, where each step has to
end alike in both and the audit is the oracle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from tests.conformance.scenes import SHOWN, MemoryScene, Scene, SqlScene
from tests.integration.world import world_of
from tests.property.oracle import breaches
from tests.property.protocol import Protocol

T = TypeVar("T")


class OverMemory(Protocol):
    """Many long histories."""

    outcomes: ClassVar[Counter[str]] = Counter()


def test_over_memory_every_rule_holds_after_every_step() -> None:
    OverMemory.outcomes.clear()
    run_state_machine_as_test(OverMemory, settings=settings(max_examples=120, stateful_step_count=60))
    print(dict(OverMemory.outcomes))
    assert {"placed", "refused", "conflict"} <= set(OverMemory.outcomes)


class Beside(Protocol):
    """PostgreSQL and memory side by side."""

    outcomes: ClassVar[Counter[str]] = Counter()
    url: ClassVar[str]
    runner: ClassVar[asyncio.Runner]
    sql: ClassVar[SqlScene]

    def open(self) -> list[Scene]:
        self.run(self.empty())
        return [MemoryScene(), self.sql]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def empty(self) -> None:
        for table in ("models", "workers", "scheduling_decisions"):
            await self.sql.world.sql.execute(f"DELETE FROM {table}")

    @invariant()
    def every_rule_holds(self) -> None:
        memory = self.scenes[0]
        assert isinstance(memory, MemoryScene)
        assert breaches(memory.memory) == []
        assert self.run(self.sql.world.audit()).breaches == ()

    @invariant()
    def both_tell_the_same(self) -> None:
        for table, columns in SHOWN.items():
            memory, sql = [
                [{c: row[c] for c in columns} for row in self.run(scene.rows(table))] for scene in self.scenes
            ]
            assert without_ids(memory) == without_ids(sql), table


def without_ids(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ids within JSON differ between the stores."""
    for row in rows:
        for part in (row.get("distributed_servers") or {}).get("subordinate_workers", ()):
            part["worker_id"] = None
    return rows


@pytest.fixture
def beside(database: str) -> Iterator[type[Beside]]:
    with asyncio.Runner() as runner:
        opened = world_of(database)
        world = runner.run(opened.__aenter__())
        Beside.runner, Beside.url, Beside.sql = runner, database, SqlScene(world)
        yield Beside
        runner.run(opened.__aexit__(None, None, None))


def test_over_postgresql_every_step_ends_as_in_memory(beside: type[Beside]) -> None:
    beside.outcomes.clear()
    patient = settings(
        max_examples=20, derandomize=True, stateful_step_count=30, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(beside, settings=patient)
    print(dict(beside.outcomes))
    assert beside.outcomes["placed"] > 0
