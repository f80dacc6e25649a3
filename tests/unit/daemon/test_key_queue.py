"""The queue of keys: what coalesces, what waits, and that no key is ever lost or doubled."""

from __future__ import annotations

from random import Random

import anyio
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gpustackd.daemon.backoff import Backoff
from gpustackd.daemon.queue.key_queue import KeyQueue
from tests.exploring import explored
from tests.waiting import TimelessLoop

pytestmark = pytest.mark.anyio


class Clock:
    """Stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


BACKOFF = Backoff(Random(1))


def taken(queue: KeyQueue[str]) -> list[str]:
    keys = []
    while (key := queue.get_nowait()) is not None:
        keys.append(key)
    return keys


def test_keys_come_in_the_order_in_which_they_were_first_added() -> None:
    queue: KeyQueue[str] = KeyQueue(Clock(), BACKOFF)
    for key in "abcab":
        queue.add(key)
    assert len(queue) == queue.busy == 3
    assert taken(queue) == ["a", "b", "c"]


def test_what_comes_while_a_key_is_at_work_is_one_further_pass() -> None:
    queue: KeyQueue[str] = KeyQueue(Clock(), BACKOFF)
    queue.add("a")
    assert taken(queue) == ["a"]
    for _ in range(5):
        queue.add("a")
    assert taken(queue) == []
    queue.done("a")
    assert taken(queue) == ["a"]
    queue.done("a")
    assert taken(queue) == []
    assert len(queue) == queue.busy == 0


def test_what_was_put_off_melts_into_what_comes_first() -> None:
    clock = Clock()
    queue: KeyQueue[str] = KeyQueue(clock, BACKOFF)
    queue.add_after("a", 5)
    queue.add_after("b", 3)
    queue.add("a")
    assert taken(queue) == ["a"]
    queue.add_after("a", 9)
    queue.add_after("a", 1)
    clock.now = 2.0
    assert taken(queue) == []  # at work still
    queue.done("a")
    assert taken(queue) == ["a"]
    queue.done("a")
    clock.now = 20.0
    assert taken(queue) == ["b"]


def test_failures_are_counted_by_key_until_it_works() -> None:
    queue: KeyQueue[str] = KeyQueue(Clock(), Backoff(Random(1), first=1, ceiling=300, spread=0))
    assert [queue.backoff("a") for _ in range(10)] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300]
    assert queue.backoff("b") == 1
    queue.forget("a")
    assert (queue.backoff("a"), queue.backoff("b")) == (1, 2)


@pytest.fixture
def anyio_backend() -> tuple[str, object]:
    """Waiting takes no time."""
    return "asyncio", {"loop_factory": TimelessLoop}


async def test_who_waits_is_woken_by_a_word_and_by_the_time() -> None:
    queue: KeyQueue[str] = KeyQueue(anyio.current_time, BACKOFF)
    got: list[str] = []

    async def take() -> None:
        while True:
            key = await queue.get()
            got.append(key)
            queue.done(key)
            if len(got) == 2:
                return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take)
        await anyio.wait_all_tasks_blocked()
        queue.add_after("late", 3600)
        queue.add("now")
    assert got == ["now", "late"]


KEYS = st.sampled_from("abcd")


class Machine(RuleBasedStateMachine):
    """Against what must hold: what is said of a key is followed by a pass, never two passes at once, and what
    is put off comes when it is due, unless more was said before."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: KeyQueue[str] = KeyQueue(self.clock, BACKOFF)
        self.owed: set[str] = set()
        self.later: dict[str, float] = {}
        self.at_work: set[str] = set()

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.owed.add(key)
        self.later.pop(key, None)

    @rule(key=KEYS, delay=st.sampled_from([0.0, 1.0, 5.0]))
    def add_after(self, key: str, delay: float) -> None:
        self.queue.add_after(key, delay)
        self.later[key] = self.clock.now + delay

    @rule()
    def take(self) -> None:
        taken_now = self.queue.get_nowait()
        for key in [k for k, due in self.later.items() if due <= self.clock.now]:
            del self.later[key]
            self.owed.add(key)
        if taken_now is not None:
            assert taken_now not in self.at_work
            assert taken_now in self.owed
            self.at_work.add(taken_now)
            self.owed.discard(taken_now)

    @rule(key=KEYS)
    def done(self, key: str) -> None:
        if key in self.at_work:
            self.queue.done(key)
            self.at_work.discard(key)

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @invariant()
    def no_more_wait_than_are_owed(self) -> None:
        assert len(self.queue) <= len(self.owed) + len(self.later)

    def teardown(self) -> None:
        """Everything that is owed comes, and then nothing more."""
        for key in sorted(self.at_work):
            self.done(key)
        left = self.owed | self.later.keys()
        for _ in range(20):
            self.clock.now += 10.0
            while (key := self.queue.get_nowait()) is not None:
                left.discard(key)
                self.queue.done(key)
        assert left == set()
        assert len(self.queue) == 0


TestWorkQueue = Machine.TestCase
TestWorkQueue.settings = explored(60, stateful_step_count=40)
