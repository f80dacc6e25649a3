"""A fleet, its users and several replicas, in any order: the rules hold after every step.

Over memory with many and long histories; over PostgreSQL and memory side by side, where each step has to
end alike in both and the audit is the oracle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck
from hypothesis.stateful import invariant, run_state_machine_as_test

from gpustackd.domain.outcome import Check
from tests.conformance.scenes import SHOWN, MemoryScene, Scene, SqlScene
from tests.exploring import explored
from tests.integration.world import world_of
from tests.property.oracle import breaches
from tests.property.protocol import Protocol

T = TypeVar("T")


class OverMemory(Protocol):
    """Many long histories."""

    outcomes: ClassVar[Counter[str]] = Counter()


def test_over_memory_every_rule_holds_after_every_step() -> None:
    OverMemory.outcomes.clear()
    run_state_machine_as_test(OverMemory, settings=explored(100, stateful_step_count=60))
    print(dict(OverMemory.outcomes))
    assert OverMemory.outcomes["placed"] > 0


def meets_every_outcome(history: Protocol) -> None:
    """A history by hand: a place, a card that another was faster to take, no place at all, a lease that is
    over when the commit comes, and a model that was edited after the decision."""
    history.outcomes.clear()
    history.begin()
    history.create(0, 3)
    decide = partial(
        history.decide, some=[0], wide=1, ram=0, blind=False, check=Check.FITS, over=False, at_once=False
    )
    for who in (0, 1):
        history.look(who)
    for who in (0, 1):
        decide(who, fresh=False, vram=12)
    for who in (0, 1):
        history.commit_of(history.replicas[who])
    assert history.outcomes == {"placed": 2, "conflict": 1}
    decide(2, fresh=True, vram=30)
    history.commit_of(history.replicas[2])
    decide(2, fresh=True, vram=2)
    for at in range(len(history.names("i"))):
        history.expire(at, swept=True)
    history.commit_of(history.replicas[2])
    decide(2, fresh=True, vram=2)
    history.edit_model(0)
    history.commit_of(history.replicas[2])
    assert history.outcomes == {"placed": 2, "conflict": 1, "refused": 1, "lost": 1, "model_changed": 1}


def test_a_history_by_hand_meets_every_outcome_over_memory() -> None:
    history = OverMemory()
    meets_every_outcome(history)
    history.every_rule_holds()


def test_a_history_by_hand_meets_every_outcome_over_postgresql(beside: type[Beside]) -> None:
    history = beside()
    meets_every_outcome(history)
    history.every_rule_holds()
    history.both_tell_the_same()


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
    patient = explored(20, stateful_step_count=30, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(beside, settings=patient)
    print(dict(beside.outcomes))
    assert beside.outcomes["placed"] > 0
