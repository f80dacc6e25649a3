"""Services start in order, stop in reverse order, and the one that fails is named."""

from __future__ import annotations

import anyio
import pytest
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.service import BackgroundTasks, running
from gpustackd.errors import Contended, DatabaseUnavailable
from tests.waiting import until

pytestmark = pytest.mark.anyio


class Loop:
    """Writes down what happens to it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name = name
        self.events = events
        self.fails: Exception | None = None
        self.go = anyio.Event()
        self.ready = anyio.Event()
        self.ready.set()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        self.events.append(f"{self.name} starts")
        await self.ready.wait()
        task_status.started()
        try:
            await self.go.wait()
            if self.fails is not None:
                raise self.fails
        finally:
            self.events.append(f"{self.name} ends")


async def test_services_start_in_order_and_stop_in_reverse_order() -> None:
    events: list[str] = []
    async with running([Loop(name, events) for name in "abc"]):
        events.append("work")
    assert events == ["a starts", "b starts", "c starts", "work", "c ends", "b ends", "a ends"]


async def test_a_service_starts_when_the_one_before_it_is_ready() -> None:
    events: list[str] = []
    first, second = Loop("a", events), Loop("b", events)
    first.ready = anyio.Event()

    async def all_of_them() -> None:
        async with running([first, second]):
            events.append("work")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(all_of_them)
        await anyio.wait_all_tasks_blocked()
        assert events == ["a starts"]
        first.ready.set()
    assert events[:3] == ["a starts", "b starts", "work"]


async def test_the_service_that_fails_is_named_and_the_body_and_the_others_end() -> None:
    events: list[str] = []
    failures: list[tuple[str, str]] = []
    first, second, third = (Loop(name, events) for name in "abc")
    second.fails = DatabaseUnavailable("gone")

    async def all_of_them() -> None:
        async with running([first, second, third], lambda name, e: failures.append((name, str(e)))):
            second.go.set()
            await anyio.sleep_forever()

    with pytest.raises(DatabaseUnavailable, match="gone"):
        await all_of_them()
    assert failures == [("b", "gone")]
    assert events[-3:] == ["b ends", "c ends", "a ends"]


async def test_one_that_fails_before_it_is_ready_stops_the_start() -> None:
    events: list[str] = []
    failures: list[str] = []
    good, bad, never = (Loop(name, events) for name in "abc")

    async def fail(*, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        raise ValueError("no")

    bad.run = fail  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no"):
        async with running([good, bad, never], lambda name, _: failures.append(name)):
            events.append("work")
    assert failures == ["b"]
    assert events == ["a starts", "a ends"]


async def test_one_that_returns_is_done_and_the_others_go_on() -> None:
    events: list[str] = []
    first, second = Loop("a", events), Loop("b", events)
    async with running([first, second]):
        second.go.set()
        await anyio.wait_all_tasks_blocked()
        assert events[-1] == "b ends"
    assert events[-1] == "a ends"


async def test_an_error_of_the_body_stops_them_in_reverse_order_too() -> None:
    events: list[str] = []
    with pytest.raises(KeyError):
        async with running([Loop(name, events) for name in "ab"]):
            raise KeyError
    assert events[-2:] == ["b ends", "a ends"]


async def test_a_cancellation_from_outside_ends_them_all() -> None:
    events: list[str] = []
    with anyio.CancelScope() as scope:
        async with running([Loop(name, events) for name in "ab"]):
            scope.cancel()
            await anyio.sleep_forever()
    assert sorted(events[-2:]) == ["a ends", "b ends"]


async def test_one_that_does_not_stop_in_time_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpustackd.daemon.service._ORDERLY", 0.01)
    events: list[str] = []
    slow = Loop("slow", events)
    release = anyio.Event()

    async def run(*, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await release.wait()

    slow.run = run  # type: ignore[method-assign]
    first = Loop("a", events)

    async def all_of_them() -> None:
        async with running([first, slow]):
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(all_of_them)
        await until(lambda: "a ends" in events, "the first service ends", shows=lambda: str(events))
        release.set()


async def test_background_tasks_run_and_a_lock_timeout_in_one_is_reported() -> None:
    contended: list[str] = []
    done: list[int] = []
    tasks = BackgroundTasks(contended.append)

    async def work(n: int) -> None:
        done.append(n)

    async def wait_too_long() -> None:
        raise Contended("lock timeout")

    async with running([tasks]):
        tasks.start_soon(work, 7)
        tasks.start_soon(wait_too_long)
        await anyio.wait_all_tasks_blocked()
    assert done == [7]
    assert contended == ["reading a model"]


async def test_a_background_task_that_fails_fails_the_service() -> None:
    async def fail() -> None:
        raise DatabaseUnavailable("gone")

    failures: list[str] = []
    tasks = BackgroundTasks(lambda _: None)

    async def all_of_them() -> None:
        async with running([tasks], lambda name, _: failures.append(name)):
            tasks.start_soon(fail)
            await anyio.sleep_forever()

    with pytest.raises(DatabaseUnavailable):
        await all_of_them()
    assert failures == ["background tasks"]


def test_a_background_task_needs_the_service() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        BackgroundTasks(lambda _: None).start_soon(anyio.sleep_forever)
