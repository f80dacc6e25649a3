"""Many models at once: one read each, sixteen at a time, nobody waits for a model that is not theirs."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from gpustackd.domain.facts import ModelFacts
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.access import ReaderOptions
from gpustackd.sources.cache.single_flight import SingleFlight
from gpustackd.sources.reader import Reader
from tests.hub import Hub, repo_of
from tests.specs import a_model, known_models

pytestmark = pytest.mark.anyio
CONFIG = known_models()["Qwen/Qwen2.5-0.5B-Instruct"]["hf_config"]


def repos(count: int) -> dict[str, Any]:
    return {f"o/m{i}": repo_of(CONFIG, [("a", "BF16", [10 + i])]) for i in range(count)}


def spec(i: int, **columns: Any) -> Any:
    return a_model(id=i, huggingface_repo_id=f"o/m{i}", **columns)


async def test_one_model_asked_for_by_many_is_read_once() -> None:
    async with Hub(repos(1)) as hub, Reader(ReaderOptions(huggingface_endpoint=hub.url)) as reader:
        go = hub.hold("/api/")
        found: list[ModelFacts] = []

        async def ask() -> None:
            found.append(await reader.facts(spec(0)))

        async with anyio.create_task_group() as tasks:
            for _ in range(50):
                tasks.start_soon(ask)
            await hub.arrived.wait()
            go.set()
        assert len(found) == 50
        assert all(f is found[0] for f in found)
        assert hub.requests["/api/models/o/m0"] == 1


async def test_sixteen_models_are_read_at_once_and_no_more() -> None:
    async with Hub(repos(40)) as hub, Reader(ReaderOptions(huggingface_endpoint=hub.url)) as reader:
        go = hub.hold("/api/")
        async with anyio.create_task_group() as tasks:
            for i in range(40):
                tasks.start_soon(reader.facts, spec(i))
            await hub.arrivals(16)
            await anyio.wait_all_tasks_blocked()
            assert len([p for p in hub.requests if p.startswith("/api/")]) == 16
            go.set()
        assert len([p for p in hub.requests if p.startswith("/api/")]) == 40


async def test_models_that_are_known_are_answered_while_every_place_is_taken() -> None:
    async with Hub(repos(40)) as hub, Reader(ReaderOptions(huggingface_endpoint=hub.url)) as reader:
        known = [await reader.facts(spec(i)) for i in range(20)]
        go = hub.hold("/api/")
        async with anyio.create_task_group() as tasks:
            for i in range(20, 40):
                tasks.start_soon(reader.facts, spec(i))
            await hub.arrivals(16)
            for i in range(20):
                assert reader.cached(spec(i)) is known[i]
                assert await reader.facts(spec(i)) is known[i]
            go.set()


async def test_a_reader_that_gives_up_does_not_take_the_others_with_it() -> None:
    async with Hub(repos(1)) as hub, Reader(ReaderOptions(huggingface_endpoint=hub.url)) as reader:
        go = hub.hold("/api/")
        found: list[ModelFacts] = []

        async def ask() -> None:
            found.append(await reader.facts(spec(0)))

        async with anyio.create_task_group() as tasks:
            first = await tasks.start(_cancellable, ask)
            await hub.arrived.wait()
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            await hub.arrivals(1)
            go.set()
        assert len(found) == 1


async def _cancellable(call: Any, *, task_status: Any) -> None:
    with anyio.CancelScope() as scope:
        task_status.started(scope)
        await call()


async def test_the_next_in_line_takes_over_from_one_that_was_cancelled() -> None:
    flights: SingleFlight[int] = SingleFlight()
    started, calls = anyio.Event(), 0

    async def slow() -> int:
        nonlocal calls
        calls += 1
        started.set()
        if calls == 1:
            await anyio.sleep_forever()
        return calls

    results: list[int] = []

    async def second() -> None:
        results.append(await flights.run("k", slow))

    async with anyio.create_task_group() as tasks:
        leader = await tasks.start(_cancellable, lambda: flights.run("k", slow))
        await started.wait()
        tasks.start_soon(second)
        await anyio.wait_all_tasks_blocked()
        leader.cancel()
    assert results == [2]


async def test_everyone_who_waits_gets_the_error_and_the_next_ask_starts_anew() -> None:
    flights: SingleFlight[int] = SingleFlight()
    go, calls = anyio.Event(), 0

    async def fail() -> int:
        nonlocal calls
        calls += 1
        await go.wait()
        raise ModelUnreadable("x", "broken", "mend it", retryable=True)

    errors: list[ModelUnreadable] = []

    async def ask() -> None:
        try:
            await flights.run("k", fail)
        except ModelUnreadable as e:
            errors.append(e)

    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        go.set()
    assert calls == 1
    assert [(e.code, e.remedy, e.retryable) for e in errors] == [("x", "mend it", True)] * 3
    await ask()
    assert calls == 2
