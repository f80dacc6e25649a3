"""The order of the unique queue: priority, then size where sizes count, then age, then batch and id."""

from __future__ import annotations

from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.domain.outcome import Cure


def ids(queue: InstanceQueue, most: int = 100) -> list[int]:
    return [taken.id for taken in queue.take_nowait(most)]


def queue() -> InstanceQueue:
    return InstanceQueue(lambda: 0.0)


def test_the_larger_of_a_priority_goes_first_whatever_its_age() -> None:
    waiting = queue()
    for instance, priority, created, size in [
        (1, 0, 1.0, 10),
        (2, 0, 2.0, 30),
        (3, 5, 3.0, 1),
        (4, 0, 0.0, 10),
    ]:
        waiting.put(instance, priority, created, model_id=instance, size=size)
    assert ids(waiting) == [3, 2, 4, 1]


def test_a_size_that_becomes_known_moves_an_instance_up_and_is_never_forgotten() -> None:
    waiting = queue()
    for instance in (1, 2, 3):
        waiting.put(instance, 0, 1.0, model_id=instance)
    waiting.put(3, 0, 1.0, model_id=3, size=7)
    waiting.put(2, 0, 1.0, model_id=2, size=9)
    waiting.put(2, 0, 1.0, model_id=2)
    assert ids(waiting) == [2, 3, 1]


def test_of_one_age_batches_follow_each_other_and_batch_nought_keeps_the_order_of_ids() -> None:
    waiting = queue()
    for instance, model, batch in [
        (1, 8, None),
        (2, 7, None),
        (3, 8, None),
        (4, 9, 0),
        (5, 2, 0),
        (6, 7, None),
    ]:
        waiting.put(instance, 0, 1.0, model_id=model, batch=batch)
    assert ids(waiting) == [4, 5, 2, 6, 1, 3]


def test_an_older_one_comes_before_any_batch() -> None:
    waiting = queue()
    waiting.put(1, 0, 2.0, model_id=1, batch=0)
    waiting.put(2, 0, 1.0, model_id=9)
    assert ids(waiting) == [2, 1]


def test_of_what_waits_for_room_the_group_of_the_largest_is_tried_first() -> None:
    waiting = queue()
    for instance, size in [(1, 5), (2, 50), (3, 20)]:
        waiting.put(instance, 0, float(instance), model_id=instance, size=size)
        ids(waiting)
        waiting.park(instance, ("demand", instance), Cure.CAPACITY)
    assert [group.model_id for group in waiting.wake(Cure.CAPACITY)] == [2, 3, 1]
