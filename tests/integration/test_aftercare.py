"""Placed instances that nobody takes, that fail, or that are to leave: the writes and what they expect."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from gpustackd.domain.placement_hints import AvoidedPlace, ClaimRaise
from gpustackd.domain.timeouts import Timeouts
from gpustackd.store.postgres.instance_recovery import FailedRow, InstanceRecoveryStore, LeavingRow
from gpustackd.store.postgres.worker_health import MovedInstance, WorkerHealthStore
from tests.integration.world import GIB, World, world_of
from tests.waiting import until

pytestmark = pytest.mark.anyio

SPANS = Timeouts()
SLACK = 20.0
"""Seconds that may pass between two statements of a test on a busy machine."""
LONG = 10_000.0


async def host(world: World, **columns: Any) -> tuple[int, list[int]]:
    """A worker with two GPUs that beats."""
    worker, gpus = await world.worker(80 * GIB, 80 * GIB, **columns)
    await world.sql.execute("UPDATE workers SET heartbeat_at = clock_timestamp() WHERE id = $1", worker)
    return worker, gpus


async def placed(
    world: World, at: tuple[int, list[int]], state: str = "SCHEDULED", message: str | None = None, **more: Any
) -> int:
    instance = await world.placed(await world.part(at[0], at[1][:1], GIB), **more)
    if state != "SCHEDULED":
        await world.update("model_instances", instance, state=state, state_message=message)
    return instance


async def aged(world: World, column: str, seconds: float) -> None:
    """A moment of all instances, as if so much time had passed since."""
    await world.sql.execute(
        f"UPDATE model_instances SET {column} = clock_timestamp() - make_interval(secs => $1)", seconds
    )


async def overdue(world: World, watched: float = LONG) -> list[MovedInstance]:
    return await WorkerHealthStore(world.store.connections, SPANS).requeue_overdue(watched)


async def failed(world: World) -> list[FailedRow]:
    return await InstanceRecoveryStore(world.store.connections).failed()


async def leaving(world: World) -> dict[int, LeavingRow]:
    return {r.id: r for r in await InstanceRecoveryStore(world.store.connections).leaving()}


# -- the pick-up window ------------------------------------------------------------------------------------


async def test_a_row_that_its_worker_does_not_take_is_fenced_and_prefers_another_place(world: World) -> None:
    at = await host(world)
    instance = await placed(world, at)
    await aged(world, "scheduled_at", 60 - SLACK)
    assert await overdue(world) == []
    await aged(world, "scheduled_at", 61)
    assert await overdue(world, watched=59) == []
    (moved,) = await overdue(world)
    row = await world.row("model_instances", instance)
    assert (moved.kind, row["state"], row["worker_id"], row["placement_epoch"]) == (
        "untaken", "PENDING", None, 2
    )  # fmt: skip
    assert "did not take it within 60 s" in row["state_message"]
    assert await world.allocated(at[1][0]) == 0
    (waiting,) = await world.store.waiting(None)
    assert waiting.hints.avoid == (AvoidedPlace(at[0]),)
    # what it would write now, the old worker may not
    with pytest.raises(Exception, match="cannot go from PENDING to INITIALIZING"):
        await world.update("model_instances", instance, state="INITIALIZING")
    await world.clean()


async def test_a_row_that_was_taken_is_left_alone_however_old(world: World) -> None:
    at = await host(world)
    for state in ("INITIALIZING", "DOWNLOADING", "STARTING", "RUNNING", "ERROR"):
        await placed(world, at, state)
    await aged(world, "scheduled_at", 5000)
    assert await overdue(world) == []


async def test_workers_without_a_heartbeat_take_rows_when_they_like(world: World) -> None:
    await placed(world, await world.worker(80 * GIB))
    await aged(world, "scheduled_at", 5000)
    assert await overdue(world) == []


async def test_no_row_is_fenced_while_the_workers_of_its_cluster_are_down_together(world: World) -> None:
    hosts = [await host(world) for _ in range(3)]
    await placed(world, hosts[0])
    await world.sql.execute("UPDATE workers SET heartbeat_at = clock_timestamp() - interval '400 s'")
    await aged(world, "scheduled_at", 61)
    assert await overdue(world) == []


async def test_an_expired_place_is_avoided_no_more(world: World) -> None:
    at = await host(world)
    await placed(world, at)
    await aged(world, "scheduled_at", 61)
    await WorkerHealthStore(world.store.connections, replace(SPANS, pickup=0.001)).requeue_overdue(LONG)
    ends = "(avoid -> 0 ->> 'until')::numeric"
    over = f"SELECT {ends} < extract(epoch FROM clock_timestamp()) FROM model_instances"
    await until(lambda: world.sql.fetchval(over), "the window is over")
    (waiting,) = await world.store.waiting(None)
    assert waiting.hints.avoid == ()


async def test_what_cannot_be_read_of_places_to_avoid_counts_as_not_there(world: World) -> None:
    instance = await world.instance()
    for junk in ("null", "[]", "{}", '[1, {"until": "x"}]', '[{"until": 1e300, "worker_id": "w"}]'):
        await world.sql.execute(
            "UPDATE model_instances SET avoid = $2::text::jsonb, claim_raise = $2::text::jsonb WHERE id = $1",
            instance,
            junk,
        )
        (waiting,) = await world.store.waiting(None)
        assert (waiting.hints.avoid, waiting.hints.claim_raise) == ((), None)


async def test_unreachable_on_a_worker_that_is_there_has_a_bounded_wait(world: World) -> None:
    at = await host(world)
    instance = await placed(world, at, "UNREACHABLE")
    await aged(world, "state_since", 900 - SLACK)
    assert await overdue(world) == []
    await aged(world, "state_since", 901)
    assert [(m.kind, m.id) for m in await overdue(world)] == [("adrift", instance)]


# -- failures ------------------------------------------------------------------------------------------------


async def test_failures_are_counted_in_the_row_and_forgotten_after_stable_running(world: World) -> None:
    at = await host(world)
    instance = await placed(world, at)
    for n in (1, 2):
        for state in ("STARTING", "RUNNING", "ERROR"):
            await world.update("model_instances", instance, state=state)
        (row,) = await failed(world)
        assert (row.failures, row.restart_count) == (n, n - 1)
        assert await InstanceRecoveryStore(world.store.connections).restart([row]) == {instance}
    await world.update("model_instances", instance, state="RUNNING")
    await aged(world, "state_since", 600 - SLACK)
    await overdue(world)
    assert (await world.row("model_instances", instance))["restart_count"] == 2
    await aged(world, "state_since", 601)
    await overdue(world)
    row = await world.row("model_instances", instance)
    assert (row["restart_count"], row["failures"], row["state"]) == (0, 0, "RUNNING")


async def test_a_restart_in_place_states_epoch_and_counter_and_has_the_window_anew(world: World) -> None:
    at = await host(world)
    instance = await placed(world, at, "ERROR", "boom")
    await aged(world, "scheduled_at", 5000)
    (row,) = await failed(world)
    lifecycle = InstanceRecoveryStore(world.store.connections)
    assert await lifecycle.restart([replace(row, epoch=0)]) == set()
    assert await lifecycle.restart([replace(row, restart_count=1)]) == set()
    assert await lifecycle.restart([row]) == {instance}
    assert await lifecycle.restart([row]) == set()
    after = await world.row("model_instances", instance)
    assert (after["state"], after["worker_id"], after["restart_count"], after["placement_epoch"]) == (
        "SCHEDULED", at[0], 1, 1
    )  # fmt: skip
    assert after["last_restart_time"] is not None
    assert after["state_message"] is None
    assert await overdue(world) == []
    await world.clean()


async def test_the_delay_is_measured_from_the_last_restart_else_from_the_failure(world: World) -> None:
    instance = await placed(world, await host(world), "ERROR", "boom")
    await aged(world, "state_since", 50)
    assert 50 <= (await failed(world))[0].since < 50 + SLACK
    await aged(world, "last_restart_time", 20)
    assert 20 <= (await failed(world))[0].since < 20 + SLACK
    assert instance


async def test_models_that_are_not_to_restart_and_lost_workers_are_left_alone(world: World) -> None:
    at, lost = await host(world), await host(world)
    await placed(world, at, "ERROR", model_id=await world.model(restart_on_error=False))
    await placed(world, lost, "ERROR")
    await world.update("workers", lost[0], state="NOT_READY")
    draining = await placed(world, at, "ERROR")
    await world.sql.execute("UPDATE model_instances SET draining_since = now() WHERE id = $1", draining)
    assert await failed(world) == []


async def test_a_failed_instance_gives_its_place_up_with_what_it_learnt(world: World) -> None:
    at = await host(world)
    instance = await placed(world, at, "ERROR", "Xid 79")
    (row,) = await failed(world)
    more = ClaimRaise(vram=2 * GIB, first_vram=GIB, times=1, model_version=row.model_version)
    lifecycle = InstanceRecoveryStore(world.store.connections)
    avoid = AvoidedPlace(at[0], tuple(at[1][:1]))
    assert not await lifecycle.replace(replace(row, restart_count=5), "moved", avoid, 60, more)
    assert await lifecycle.replace(row, "moved", avoid, 60, more)
    assert not await lifecycle.replace(row, "moved", avoid, 60, more)
    (waiting,) = await world.store.waiting(None)
    assert (waiting.id, waiting.epoch) == (instance, 2)
    assert waiting.hints.avoid == (avoid,)
    assert waiting.hints.claim_raise == more
    after = await world.row("model_instances", instance)
    assert (after["failures"], after["restart_count"], after["state_message"]) == (0, 1, "moved")
    await world.clean()


# -- draining a worker ---------------------------------------------------------------------------------------


async def drained(world: World, at: tuple[int, list[int]], **more: Any) -> None:
    await world.update("workers", at[0], state="MAINTENANCE", maintenance={"drain": True, **more})


async def test_maintenance_alone_moves_nothing_and_a_drain_lists_what_has_to_go(world: World) -> None:
    at = await host(world)
    serving, starting = await placed(world, at, "RUNNING"), await placed(world, at, "STARTING")
    await world.update("workers", at[0], state="MAINTENANCE", maintenance={"drain": False})
    assert await leaving(world) == {}
    await drained(world, at)
    assert (await WorkerHealthStore(world.store.connections, SPANS).sweep(LONG)).draining == 1
    assert list(await leaving(world)) == [starting, serving]


async def test_a_drain_never_goes_below_the_available_minimum(world: World) -> None:
    for columns, running, least, goes in (
        ({"replicas": 3}, 3, 2, True),
        ({"replicas": 3}, 2, 2, False),
        ({"replicas": 1}, 1, 0, True),
        ({}, 3, 2, True),
        ({"replicas": 3, "min_available": 3}, 3, 3, False),
        ({"replicas": 3, "min_available": 0}, 1, 0, True),
    ):
        at, other = await host(world), await host(world)
        model = await world.model(**columns)
        first = await placed(world, at, "RUNNING", model_id=model)
        for n in range(1, columns.get("replicas", 3)):
            await placed(world, other, "RUNNING" if n < running else "STARTING", model_id=model)
        await drained(world, at)
        row = (await leaving(world))[first]
        assert (row.running, row.min_running) == (running, least), columns
        assert await InstanceRecoveryStore(world.store.connections).drain(row) is goes, columns
        after = await world.row("model_instances", first)
        assert after["state"] == ("PENDING" if goes else "RUNNING"), columns


async def test_two_daemons_drain_one_replica_at_a_time(world: World, database: str) -> None:
    at = await host(world)
    model = await world.model(replicas=4)
    for _ in range(4):
        await placed(world, at, "RUNNING", model_id=model)
    await drained(world, at)
    rows = list((await leaving(world)).values())
    went: list[bool] = []

    async def drain(who: World, row: LeavingRow) -> None:
        went.append(await InstanceRecoveryStore(who.store.connections).drain(row))

    async with world_of(database) as another, anyio.create_task_group() as tasks:
        for n, row in enumerate(rows):
            tasks.start_soon(drain, (world, another)[n % 2], row)
    assert sum(went) <= 1
    count = await world.sql.fetchval("SELECT count(*) FROM model_instances WHERE state = 'RUNNING'")
    assert count == 4 - sum(went) >= 3


async def test_after_its_deadline_a_drain_waits_for_no_minimum(world: World) -> None:
    at = await host(world)
    model = await world.model(replicas=1, min_available=1)
    instance = await placed(world, at, "RUNNING", model_id=model)
    for deadline, overdue_ in (("2999-01-01T00:00:00Z", False), ("soon", False), (7, False)):
        await drained(world, at, deadline=deadline)
        row = (await leaving(world))[instance]
        assert row.overdue is overdue_
        assert not await InstanceRecoveryStore(world.store.connections).drain(row)
    await drained(world, at, deadline="2020-01-01T00:00:00Z")
    row = (await leaving(world))[instance]
    assert row.overdue
    assert await InstanceRecoveryStore(world.store.connections).drain(row)


async def test_a_drain_that_was_called_off_moves_nothing_more(world: World) -> None:
    at = await host(world)
    instance = await placed(world, at, "STARTING")
    await drained(world, at)
    row = (await leaving(world))[instance]
    await world.update("workers", at[0], state="READY")
    assert not await InstanceRecoveryStore(world.store.connections).drain(row)
    assert not await InstanceRecoveryStore(world.store.connections).drain(replace(row, epoch=7))
    assert (await world.row("model_instances", instance))["state"] == "STARTING"
