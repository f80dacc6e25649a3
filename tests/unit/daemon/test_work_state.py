"""Work on its way through a replica: what is ready, what is in progress, claims that the database delays."""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import uuid4

import anyio
import pytest

from gpustackd.daemon.queue.instance_queue import InstanceQueue, QueueEntry
from gpustackd.daemon.queue.lanes import Lane, WakeOrigin
from gpustackd.daemon.scheduling.claims import Claims
from gpustackd.daemon.scheduling.context import ReplicaIdentity, SchedulingContext
from gpustackd.daemon.scheduling.work_state import WorkItem, WorkState
from gpustackd.errors import Contended
from gpustackd.observe.metrics import Metrics
from gpustackd.store.memory.store import MemoryStore

pytestmark = pytest.mark.anyio


def item(instance: int, model: int = 1, signature: str | None = None) -> WorkItem:
    entry = QueueEntry(instance, model, 0, 0.0, WakeOrigin.NOTIFY)
    return WorkItem(entry, f"i{instance}", None, signature)


async def test_ready_work_is_taken_in_order_and_what_is_decided_anew_comes_first() -> None:
    work = WorkState()
    work.push([item(1), item(2), item(3)])
    work.push_front([item(8), item(9)])
    assert [i.id for i in await work.take(4, wait=0)] == [8, 9, 1, 2]
    assert [i.id for i in await work.take(4, wait=0)] == [3]
    assert await work.take(4, wait=0) == []


async def test_work_is_finished_when_nothing_is_ready_and_no_batch_is_in_progress() -> None:
    work = WorkState()
    done = anyio.Event()

    async def wait() -> None:
        await work.finished()
        done.set()

    work.push([item(1)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await work.take(1, wait=0)
        work.begin()  # handed on, to be committed
        work.end()
        await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        work.push_front([item(1)])  # a conflict
        work.end()
        await anyio.wait_all_tasks_blocked()
        assert not done.is_set()
        await work.take(1, wait=0)
        work.end()
    assert done.is_set()


async def test_room_is_made_by_taking() -> None:
    work = WorkState()
    work.push([item(1), item(2)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.wait_for_room, 2)
        await anyio.wait_all_tasks_blocked()
        await work.take(1, wait=0)


def test_one_read_serves_all_that_wait_for_a_model() -> None:
    work = WorkState()
    assert [work.wait_for_facts(item(n)) for n in (1, 2, 3)] == [True, False, False]
    assert work.wait_for_facts(item(4, model=2))
    assert work.reading_count(1) == 3
    work.facts_read(1)
    assert work.reading_count(1) == 0
    assert work.wait_for_facts(item(5))


class Busy(MemoryStore):
    """A store whose rows others hold, at the first statement or at the second one."""

    def __init__(self, claims: bool) -> None:
        super().__init__()
        self.claims = claims

    async def claim(self, *arguments: Any) -> Any:
        if self.claims:
            raise Contended("lock timeout")
        return await super().claim(*arguments)

    async def waiting(self, *arguments: Any) -> Any:
        raise Contended("lock timeout")


class Silent:
    """A reporter that counts what was contended."""

    def __init__(self) -> None:
        self.metrics = Metrics("1", "r")
        self.contended_by: list[str] = []

    def contended(self, what: str) -> None:
        self.contended_by.append(what)

    def phase(self, *_: object) -> None: ...

    def analyzing(self, _: WorkItem) -> None: ...


@pytest.mark.parametrize("claims", [True, False])
async def test_instances_whose_claim_the_database_delays_are_tried_again_soon(claims: bool) -> None:
    """Each stays in the queue exactly once; one that was claimed is worked on."""
    now = 0.0
    store, work, reporter = Busy(claims), WorkState(), Silent()
    queue = InstanceQueue(lambda: now)
    model = store.database.insert("models", name="m")
    ours = store.database.insert("model_instances", name="i", model_id=model)
    for instance in (ours, 77):
        queue.put(instance, 0, 0.0, model_id=model)
    queue.take_nowait(2)
    context = SchedulingContext(
        ReplicaIdentity(uuid4(), "r"), 30.0, store, queue, work, None, None, None, reporter, None,
        lambda: now, Random(1),
    )  # fmt: skip
    claimed = await Claims(context).claim([item(ours, model), item(77, model, signature="said#before")])
    assert [i.id for i in claimed] == ([] if claims else [ours])
    assert work.held_ids() == [i.id for i in claimed]
    assert reporter.contended_by == ["claim"]
    assert queue.lane_of(77) is Lane.BACKOFF
    assert queue.lane_of(ours) is (Lane.BACKOFF if claims else Lane.IN_FLIGHT)
