"""The unique queue against a naive one: a list of records, searched and sorted at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.queue.lanes import Lane
from gpustackd.domain.outcome import Cure
from tests.exploring import explored

LIMIT = 6
IDS = st.integers(1, 9)
CURES = st.sampled_from([*Cure.ANY, Cure.NONE, Cure.ANY, Cure.CAPACITY | Cure.WORKER])
MODELS = st.none() | st.sets(st.integers(0, 2), max_size=2)


@dataclass
class Record:
    id: int
    priority: int
    created: float
    scan: int
    lane: Lane = Lane.ACTIVE
    due: float = 0.0
    key: Any = None
    cures: Cure = Cure.NONE
    signature: str | None = None
    again: bool = False
    missed: Cure = Cure.NONE

    @property
    def model(self) -> int:
        return self.id % 3

    @property
    def rank(self) -> tuple[float, ...]:
        return (-self.priority, self.created, self.id % 3, self.id)

    def is_of(self, models: set[int] | None) -> bool:
        return models is None or self.model in models


class QueueAgainstNaive(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = InstanceQueue(lambda: self.now, LIMIT)
        self.naive: dict[int, Record] = {}
        self.group_cures: dict[Any, Cure] = {}
        self.dropped = 0
        self.scan = 0
        self.taken: set[int] = set()

    # -- the naive side -------------------------------------------------------------------------------

    def in_lane(self, *lanes: Lane) -> list[Record]:
        return sorted((r for r in self.naive.values() if r.lane in lanes), key=lambda r: r.rank)

    def wait_in(self, record: Record, lane: Lane, key: Any = None) -> None:
        record.lane, record.key = lane, key
        if key is not None:
            self.group_cures[key] = self.group_cures.get(key, Cure.NONE) | record.cures

    def tidy(self) -> None:
        alive = {r.key for r in self.naive.values() if r.key is not None}
        self.group_cures = {k: c for k, c in self.group_cures.items() if k in alive}

    def activate(self, record: Record) -> None:
        record.lane, record.key = Lane.ACTIVE, None

    def came_back(self, instance: int, cures: Cure) -> Record | None:
        """The record where its outcome stands; None where it is active at once."""
        self.taken.discard(instance)
        record = self.naive[instance]
        record.scan = self.scan
        again, cured = record.again, bool(record.missed & cures)
        record.again, record.missed = False, Cure.NONE
        if again or cured:
            self.activate(record)
            return None
        return record

    def picked(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from(sorted(self.taken))) if self.taken else None

    # -- steps ----------------------------------------------------------------------------------------

    @rule(
        instance=IDS, priority=st.integers(0, 2), created=st.integers(0, 3), due_in=st.sampled_from([0, 0, 5])
    )
    def put(self, instance: int, priority: int, created: int, due_in: float) -> None:
        there = self.queue.put(instance, priority, created, model_id=instance % 3, due_in=due_in)
        record = self.naive.get(instance)
        if record is None:
            new = Record(instance, priority, created, self.scan)
            if len(self.naive) == LIMIT:
                self.dropped += 1
                waiting = [r for r in self.naive.values() if r.lane is not Lane.IN_FLIGHT]
                worst = min([*waiting, new], key=lambda r: (r.priority, -r.created, -r.id))
                if worst is new:
                    assert not there
                    return
                del self.naive[worst.id]
            record = self.naive[instance] = new
            self.start(record, due_in)
        else:
            record.priority, record.created, record.scan = priority, created, self.scan
            if record.lane is Lane.IN_FLIGHT:
                record.again = True
        assert there
        self.tidy()

    def start(self, record: Record, due_in: float) -> None:
        record.lane, record.due, record.cures = Lane.ACTIVE, self.now + due_in, Cure.MODEL
        if due_in:
            record.lane = Lane.BACKOFF

    @rule(limit=st.integers(1, 4))
    def take(self, limit: int) -> None:
        for record in self.in_lane(Lane.BACKOFF):
            if record.due <= self.now:
                self.activate(record)
        batch = [taken.id for taken in self.queue.take_nowait(limit)]
        assert not self.taken & set(batch), "an id is worked on twice at once"
        expected = self.in_lane(Lane.ACTIVE)[:limit]
        assert batch == [record.id for record in expected]
        for record in expected:
            record.lane = Lane.IN_FLIGHT
        self.taken |= set(batch)

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        if (instance := self.picked(data)) is None:
            return
        self.queue.done(instance)
        if (record := self.came_back(instance, Cure.NONE)) is not None:
            del self.naive[record.id]

    @rule(data=st.data(), delay=st.integers(1, 9), cures=CURES)
    def retry(self, data: st.DataObject, delay: int, cures: Cure) -> None:
        if (instance := self.picked(data)) is None:
            return
        self.queue.retry(instance, delay, cures)
        if (record := self.came_back(instance, cures)) is not None:
            record.lane, record.due, record.cures = Lane.BACKOFF, self.now + delay, cures

    @rule(data=st.data(), cures=CURES, variant=st.integers(0, 1), signature=st.sampled_from([None, "a", "b"]))
    def park(self, data: st.DataObject, cures: Cure, variant: int, signature: str | None) -> None:
        if (instance := self.picked(data)) is None:
            return
        key = (instance % 3, variant)
        self.queue.park(instance, key, cures, signature)
        if (record := self.came_back(instance, cures | Cure.MODEL)) is not None:
            record.cures, record.signature = cures | Cure.MODEL, signature
            self.wait_in(record, Lane.PARKED, key)

    @rule(cure=CURES, models=MODELS)
    def wake(self, cure: Cure, models: set[int] | None) -> None:
        groups = self.queue.wake(cure, models)
        for record in self.naive.values():
            if record.is_of(models):
                if record.lane is Lane.IN_FLIGHT:
                    record.missed |= cure
                elif record.lane is Lane.BACKOFF and record.cures & cure:
                    self.activate(record)
        expected: dict[Any, list[Record]] = {}
        for record in self.in_lane(Lane.PARKED):
            if record.is_of(models) and self.group_cures[record.key] & cure:
                expected.setdefault(record.key, []).append(record)
        assert [group.key for group in groups] == list(expected)
        for group in groups:
            members = expected[group.key]
            assert group.count == len(members)
            assert (group.priority, group.created) == (members[0].priority, members[0].created)
            assert group.signatures == {record.signature for record in members}
            assert group.cures == self.group_cures[group.key]

    @rule(data=st.data(), n=st.none() | st.integers(0, 3))
    def activate_best_of_a_group(self, data: st.DataObject, n: int | None) -> None:
        if not self.group_cures:
            return
        key = data.draw(st.sampled_from(sorted(self.group_cures, key=repr)))
        expected = [record for record in self.in_lane(Lane.PARKED) if record.key == key][:n]
        assert self.queue.activate(key, n) == len(expected)
        for record in expected:
            self.activate(record)
        self.tidy()

    @rule(data=st.data(), signature=st.sampled_from(["a", "b"]))
    def activate_those_told_otherwise(self, data: st.DataObject, signature: str) -> None:
        if not self.group_cures:
            return
        key = data.draw(st.sampled_from(sorted(self.group_cures, key=repr)))
        changed = [r for r in self.naive.values() if r.key == key and r.signature != signature]
        assert self.queue.activate_changed(key, signature) == len(changed)
        for record in changed:
            self.activate(record)
        self.tidy()

    @rule(data=st.data(), cures=CURES)
    def set_cures(self, data: st.DataObject, cures: Cure) -> None:
        keys = sorted(self.group_cures)
        if keys:
            key = data.draw(st.sampled_from(keys))
            self.queue.set_cures(key, cures)
            self.group_cures[key] = cures | Cure.MODEL

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def rescan_starts(self) -> None:
        self.queue.rescan_started()
        self.scan += 1

    @rule()
    def rescan_finishes(self) -> None:
        unseen = [r for r in self.naive.values() if r.scan < self.scan - 1 and r.lane is not Lane.IN_FLIGHT]
        assert self.queue.rescan_finished() == len(unseen)
        for record in unseen:
            del self.naive[record.id]
        self.tidy()

    # -- always ---------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost_and_all_stand_where_they_should(self) -> None:
        assert {i: self.queue.lane_of(i) for i in range(1, 10) if self.queue.lane_of(i)} == {
            record.id: record.lane for record in self.naive.values()
        }
        assert self.queue.counts() == {lane: len(self.in_lane(lane)) for lane in Lane}

    @invariant()
    def the_bound_holds_and_what_was_dropped_is_counted(self) -> None:
        assert len(self.queue) == len(self.naive) <= LIMIT
        assert self.queue.dropped == self.dropped


TestQueueAgainstNaive = QueueAgainstNaive.TestCase
TestQueueAgainstNaive.settings = explored(100, stateful_step_count=60)
pytestmark = pytest.mark.timeout(170)
