"""The unique queue: waiting, waking, closing, and what it costs. Its rules are in tests/property."""

from __future__ import annotations

import time
import tracemalloc

import anyio
import pytest

from gpustackd.daemon.queue.instance_queue import InstanceQueue, QueueEntry
from gpustackd.daemon.queue.lanes import Lane, WakeOrigin
from gpustackd.domain.outcome import Cure

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(*ids: int, clock: Clock | None = None) -> InstanceQueue:
    queue = InstanceQueue(clock or Clock())
    for instance in ids:
        queue.put(instance, 0, float(instance), model_id=1)
    return queue


def ids(batch: list[QueueEntry]) -> list[int]:
    return [taken.id for taken in batch]


def test_the_highest_priority_goes_first_then_the_oldest_then_the_lowest_id() -> None:
    queue = InstanceQueue(Clock())
    for instance, priority, created in [(1, 0, 5.0), (2, 9, 8.0), (3, 0, 4.0), (4, 9, 7.0), (5, 0, 4.0)]:
        queue.put(instance, priority, created, model_id=1)
    assert ids(queue.take_nowait(10)) == [4, 2, 3, 5, 1]


async def test_who_waits_is_woken_by_a_put() -> None:
    queue = InstanceQueue(Clock())
    got: list[int] = []
    waiting = anyio.Event()

    async def taker() -> None:
        waiting.set()
        got.extend(ids(await queue.take(4)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(taker)
        await waiting.wait()
        queue.put(7, 0, 0.0, model_id=1)
    assert got == [7]


async def test_a_backoff_ends_by_itself_and_an_earlier_one_added_later_is_not_overslept() -> None:
    queue = InstanceQueue(time.monotonic)
    for instance in (1, 2):
        queue.put(instance, 0, 0.0, model_id=1)
    queue.take_nowait(2)
    queue.retry(1, 3600)
    got: list[QueueEntry] = []
    async with anyio.create_task_group() as tasks:

        async def taker() -> None:
            got.extend(await queue.take(4))

        tasks.start_soon(taker)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        queue.retry(2, 0.001)
    assert [(taken.id, taken.origin) for taken in got] == [(2, WakeOrigin.DUE)]


async def test_two_takers_share_the_work_without_doubles() -> None:
    queue = InstanceQueue(Clock())
    got: list[int] = []

    async def taker() -> None:
        while batch := await queue.take(1):
            got.extend(ids(batch))
            if len(got) == 20:
                queue.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(taker)
        tasks.start_soon(taker)
        for instance in range(20):
            queue.put(instance, 0, float(instance), model_id=1)
            await anyio.lowlevel.checkpoint()
    assert got == list(range(20))


async def test_a_cancelled_taker_has_taken_nothing() -> None:
    queue = InstanceQueue(Clock())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(queue.take, 5)
        await anyio.lowlevel.checkpoint()
        queue.put(1, 0, 0.0, model_id=1)
        tasks.cancel_scope.cancel()
    assert queue.lane_of(1) is Lane.ACTIVE


async def test_closing_ends_every_wait_with_an_empty_batch() -> None:
    queue = filled()
    ended: list[list[QueueEntry]] = []

    async def taker() -> None:
        ended.append(await queue.take(1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(taker)
        tasks.start_soon(taker)
        await anyio.lowlevel.checkpoint()
        queue.close()
    assert ended == [[], []]
    assert not queue.put(1, 0, 0.0, model_id=1)


def test_what_is_in_flight_at_the_close_may_still_finish() -> None:
    queue = filled(1, 2)
    queue.take_nowait(2)
    queue.close()
    queue.done(1)
    queue.retry(2, 1)
    assert len(queue) == 1


def test_an_id_put_while_in_flight_comes_back_exactly_once() -> None:
    queue = filled(1)
    queue.take_nowait(1)
    for _ in range(3):
        queue.put(1, 0, 0.0, model_id=1, origin=WakeOrigin.RESCAN)
    assert queue.take_nowait(1) == []
    assert queue.done(1) is Lane.ACTIVE
    assert [taken.origin for taken in queue.take_nowait(5)] == [WakeOrigin.RESCAN]
    assert queue.done(1) is None


def test_a_cure_that_comes_during_the_decision_is_not_lost() -> None:
    queue = filled(1, 2)
    queue.take_nowait(2)
    assert queue.wake(Cure.CAPACITY) == []
    assert queue.park(1, "demand", Cure.CAPACITY | Cure.WORKER, "fit") is Lane.ACTIVE
    assert queue.park(2, "demand", Cure.FILES, "files") is Lane.PARKED


def test_only_groups_that_the_event_could_help_are_looked_at() -> None:
    queue = filled(1, 2, 3)
    queue.take_nowait(3)
    queue.park(1, "big", Cure.CAPACITY, "fit")
    queue.park(2, "labels", Cure.WORKER, "labels")
    queue.park(3, "big", Cure.CAPACITY, "fit")
    (group,) = queue.wake(Cure.CAPACITY)
    assert (group.key, group.count, group.signatures) == ("big", 2, {"fit"})
    assert queue.wake(Cure.FILES) == []
    assert [group.key for group in queue.wake(Cure.MODEL, {1})] == ["big", "labels"]
    assert queue.wake(Cure.MODEL, {2}) == []
    assert queue.activate("big", 1) == 1
    assert [(taken.id, taken.origin) for taken in queue.take_nowait(9)] == [(1, WakeOrigin.CURE)]


def test_a_changed_refusal_brings_back_only_the_rows_that_tell_another_one() -> None:
    queue = filled(1, 2, 3)
    queue.take_nowait(3)
    for instance, told in [(1, "fit"), (2, "labels"), (3, None)]:
        queue.park(instance, "demand", Cure.CAPACITY, told)
    assert queue.activate_changed("demand", "fit") == 2
    assert ids(queue.take_nowait(9)) == [2, 3]
    assert queue.activate_changed("demand", "fit") == 0


def test_an_edit_of_the_model_ends_a_backoff() -> None:
    queue = filled(1)
    queue.take_nowait(1)
    queue.retry(1, 60)
    queue.wake(Cure.CAPACITY)
    queue.wake(Cure.MODEL, {2})
    assert queue.take_nowait(1) == []
    queue.wake(Cure.MODEL, {1})
    assert ids(queue.take_nowait(1)) == [1]


def test_a_group_is_woken_by_what_could_help_any_of_its_members() -> None:
    queue = filled(1, 2)
    queue.take_nowait(2)
    queue.park(1, "demand", Cure.CAPACITY)
    queue.park(2, "demand", Cure.FILES)
    (group,) = queue.wake(Cure.CAPACITY)
    assert group.cures == Cure.CAPACITY | Cure.FILES | Cure.MODEL


def test_a_new_refusal_in_memory_changes_what_wakes_the_group_but_an_edit_always_does() -> None:
    queue = filled(1)
    queue.take_nowait(1)
    queue.park(1, "demand", Cure.CAPACITY)
    queue.set_cures("demand", Cure.WORKER)
    assert queue.wake(Cure.CAPACITY) == []
    assert len(queue.wake(Cure.WORKER)) == 1
    assert len(queue.wake(Cure.MODEL, {1})) == 1


def test_finishing_what_is_not_in_flight_is_an_error() -> None:
    queue = filled(1)
    with pytest.raises(ValueError, match="instance 1 is not in flight"):
        queue.done(1)


def test_two_scans_without_an_id_forget_it_but_one_does_not() -> None:
    queue = filled(1, 2)
    queue.take_nowait(2)
    for instance in (1, 2):
        queue.park(instance, "demand", Cure.ANY)
    queue.rescan_started()
    queue.put(2, 0, 2.0, model_id=1, origin=WakeOrigin.RESCAN)
    assert queue.rescan_finished() == 0
    queue.rescan_started()
    queue.put(2, 0, 2.0, model_id=1, origin=WakeOrigin.RESCAN)
    assert queue.rescan_finished() == 1
    assert queue.lane_of(1) is None
    assert queue.lane_of(2) is Lane.PARKED


def test_when_full_the_newest_of_the_lowest_priority_goes_and_a_rescan_is_wanted() -> None:
    queue = InstanceQueue(Clock(), limit=4)
    for instance, priority in [(1, 1), (2, 0), (3, 0), (4, 1)]:
        queue.put(instance, priority, float(instance), model_id=1)
    assert queue.put(5, 1, 5.0, model_id=1)
    assert queue.lane_of(3) is None
    assert not queue.put(6, 0, 6.0, model_id=1)
    assert (queue.dropped, queue.overflowed, queue.rescan_wanted) == (2, True, False)
    for taken in queue.take_nowait(2):
        queue.done(taken.id)
    assert queue.rescan_wanted
    queue.rescan_started()
    assert not queue.overflowed


def test_what_is_in_flight_is_never_pushed_out() -> None:
    queue = InstanceQueue(Clock(), limit=2)
    for instance in (1, 2):
        queue.put(instance, 0, 0.0, model_id=1)
    queue.take_nowait(2)
    assert not queue.put(3, 9, 0.0, model_id=1)
    assert queue.counts()[Lane.IN_FLIGHT] == 2


def test_memory_stays_flat_however_often_everything_moves() -> None:
    clock = Clock()
    queue = InstanceQueue(clock, limit=1_000)

    def one_round(start: int) -> None:
        for instance in range(start, start + 1_200):
            queue.put(instance, instance % 5, float(instance), model_id=instance % 50)
        for step, taken in enumerate(queue.take_nowait(800)):
            if step % 3 == 0:
                queue.park(taken.id, taken.model_id, Cure.CAPACITY, "fit")
            elif step % 3 == 1:
                queue.retry(taken.id, 1)
            else:
                queue.done(taken.id)
        for group in queue.wake(Cure.CAPACITY):
            queue.activate(group.key)
        clock.now += 2

    tracemalloc.start()
    try:
        peaks = []
        for number in range(12):
            one_round(number * 600)
            peaks.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(queue) <= 1_000
    assert max(peaks[6:]) < 1.3 * max(peaks[1:5])
