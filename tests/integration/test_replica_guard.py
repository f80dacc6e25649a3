"""What is told of models' numbers, and the guarded write: it holds only where all is as it was seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from gpustackd.ports import ReplicaSnapshot, SyncResult
from gpustackd.replicas.sync_plan import NewInstances, SyncPlan
from gpustackd.store.postgres.replicas import PostgresReplicaStore
from tests.integration.world import GIB, World, connected
from tests.waiting import Ear, listening

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ear(world: World) -> AsyncIterator[Ear]:
    async with listening(world.url) as opened:
        yield opened


@pytest.fixture
def kept(world: World) -> PostgresReplicaStore:
    return PostgresReplicaStore(world.store.connections)


async def seen(kept: PostgresReplicaStore, model: int) -> ReplicaSnapshot:
    found = await kept.replicas(model)
    assert found is not None
    return found


async def running(world: World, model: int, worker: int) -> int:
    """An instance that runs, written past the guards."""
    instance = await world.instance(model)
    async with world.sql.transaction():
        await world.sql.execute("SET LOCAL session_replication_role = replica")
        await world.sql.execute(
            "UPDATE model_instances SET state = 'RUNNING', worker_id = $2, gpu_type = 'cuda',"
            " gpu_indexes = $3, computed_resource_claim = $4 WHERE id = $1",
            instance,
            worker,
            [0],
            {"ram": 0, "vram": {"0": 1}},
        )
    return instance


async def test_numbers_are_told_by_model_and_those_without_one_tell_nothing(world: World, ear: Ear) -> None:
    quiet = await world.model()
    assert await ear.heard() == []
    model = await world.model(replicas=0)
    assert await ear.heard() == [f"replicas {model}"]
    for change in ({"replicas": 2}, {"scaling_schedule": {"enabled": False}}):
        await world.update("models", model, **change)
        assert await ear.heard() == [f"replicas {model}"]
    await world.update("models", model, roles=[])
    assert sorted(await ear.heard()) == [f"model {model}", f"replicas {model}"]
    instance, _ = await world.instance(model), await world.instance(quiet)
    heard = await ear.heard()
    assert [h for h in heard if h.startswith("replicas")] == [f"replicas {model}"]
    await world.sql.execute("UPDATE model_instances SET state_message = 'x'")
    assert await ear.heard() == []
    await world.delete("model_instances", instance)
    assert await ear.heard() == [f"replicas {model}"]
    await world.sql.execute("DELETE FROM model_instances")
    assert await ear.heard() == []
    await world.sql.execute("UPDATE models SET replicas = NULL, scaling_schedule = NULL")
    assert await ear.heard() == []
    await world.sql.execute(
        "INSERT INTO models (name, replicas) SELECT 'many-' || n, 1 FROM generate_series(1, 301) n"
    )
    assert await ear.heard() == ["replicas"]  # look yourself


async def test_steps_are_written_as_a_whole_and_tell_the_scheduler_alone(
    world: World, ear: Ear, kept: PostgresReplicaStore
) -> None:
    model = await world.model(name="m", replicas=3)
    before = await world.instance(model)
    taken = await world.insert("model_instances", name="m-1", model_id=await world.model())
    await ear.heard()
    looked = await seen(kept, model)
    names = [["m-1", "m-2", "m-3", "m-4"]]
    assert await kept.sync(looked, 3, SyncPlan(add=(NewInstances(2),)), names) is SyncResult.DONE
    rows = await world.sql.fetch(
        "SELECT id, name FROM model_instances WHERE model_id = $1 ORDER BY id", model
    )
    assert [r["name"] for r in rows][1:] == ["m-2", "m-3"]  # m-1 is somebody else's
    (told,) = await ear.heard()
    assert told == f"created {rows[1]['id']},{rows[2]['id']}"
    assert await world.exists("model_instances", taken)
    looked = await seen(kept, model)
    both = SyncPlan(add=(NewInstances(1),), delete=(before,))
    assert await kept.sync(looked, 3, both, [["m-1", "m-2"]]) is SyncResult.TAKEN
    assert not await world.exists("model_instances", before)
    assert await ear.heard() == []


async def test_nothing_is_written_once_anything_is_otherwise(
    world: World, kept: PostgresReplicaStore
) -> None:
    worker, _ = await world.worker(80 * GIB)
    model = await world.model(name="m", replicas=1)
    ids = [await running(world, model, worker) for _ in range(3)]
    away = SyncPlan(delete=(ids[0],))
    looked = await seen(kept, model)
    assert {r.state for r in looked.instances} == {"RUNNING"}

    async def refused(found: ReplicaSnapshot = looked) -> None:
        assert await kept.sync(found, 1, away, []) is SyncResult.CHANGED
        assert await world.exists("model_instances", ids[0])

    await world.update("models", model, replicas=2)
    await refused()
    await world.update("models", model, replicas=1)
    # a neighbour that fails, a worker that is lost, a row that comes or goes, one that drains
    await world.update("model_instances", ids[1], state="ERROR")
    await refused()
    looked = await seen(kept, model)
    await world.update("workers", worker, state="NOT_READY")
    await refused(looked)
    looked = await seen(kept, model)
    await world.instance(model)
    await refused(looked)
    looked = await seen(kept, model)
    await world.delete("model_instances", ids[2])
    await refused(looked)
    looked = await seen(kept, model)
    await world.sql.execute("UPDATE model_instances SET draining_since = now() WHERE id = $1", ids[1])
    await refused(looked)
    # what only moves on its way to a place changes nothing
    looked = await seen(kept, model)
    waiting = await world.sql.fetchval("SELECT id FROM model_instances WHERE state = 'PENDING'")
    assert await world.store.claim(world.owner, [(waiting, 0)], 30)
    assert await kept.sync(looked, 1, away, []) is SyncResult.DONE
    assert not await world.exists("model_instances", ids[0])
    # deleted with all that it held
    assert (
        await kept.sync(await seen(kept, model), 1, SyncPlan(delete=(ids[1], waiting)), []) is SyncResult.DONE
    )
    await world.delete("models", model)
    assert await kept.replicas(model) is None
    assert await kept.sync(looked, 1, away, []) is SyncResult.GONE


async def test_whoever_holds_the_model_or_a_row_is_not_waited_for(
    world: World, kept: PostgresReplicaStore
) -> None:
    model = await world.model(name="m", replicas=1)
    ids = [await world.instance(model) for _ in range(2)]
    looked = await seen(kept, model)
    away = SyncPlan(delete=(ids[0],))
    other = await connected(world.url)
    try:
        for statement in (
            "UPDATE models SET meta = '{}'",
            f"UPDATE model_instances SET state_message = 'x' WHERE id = {ids[1]}",
        ):
            async with other.transaction():
                await other.execute(statement)
                assert await kept.sync(looked, 1, away, []) is SyncResult.BUSY
        assert await kept.sync(looked, 1, away, []) is SyncResult.DONE
    finally:
        other.terminate()


async def test_draining_is_written_and_taken_back(world: World, kept: PostgresReplicaStore) -> None:
    worker, _ = await world.worker(80 * GIB)
    model = await world.model(name="m", replicas=1)
    ids = [await running(world, model, worker) for _ in range(2)]
    looked = await seen(kept, model)
    assert await kept.sync(looked, 1, SyncPlan(drain=(ids[1],)), []) is SyncResult.DONE
    assert await kept.out_of_sync([model]) == [model]
    stale, looked = looked, await seen(kept, model)
    (draining,) = [r for r in looked.instances if r.draining_for is not None]
    assert draining.id == ids[1]
    assert 0 <= (draining.draining_for or -1) < 60
    assert await kept.sync(stale, 1, SyncPlan(drain=(ids[1],)), []) is SyncResult.CHANGED
    await world.update("models", model, replicas=2)
    assert await kept.sync(looked, 2, SyncPlan(undrain=(ids[1],)), []) is SyncResult.DONE
    assert [r.draining_for for r in (await seen(kept, model)).instances] == [None, None]
    assert await kept.out_of_sync(None) == []


async def test_a_schedules_number_is_written_only_while_it_stands(
    world: World, kept: PostgresReplicaStore
) -> None:
    model = await world.model(name="m", scaling_schedule={"enabled": True})
    assert await kept.out_of_sync(None) == [model]
    looked = await seen(kept, model)
    assert not await kept.set_replicas(looked, 4, looked.now - timedelta(seconds=1))
    assert not await kept.set_replicas(replace(looked, schedule_digest="another"), 4, None)
    assert await kept.set_replicas(looked, 4, looked.now + timedelta(hours=1))
    assert (await world.row("models", model))["replicas"] == 4
    assert not await kept.set_replicas(looked, 4, None)  # it is so already


async def test_a_pause_stops_a_model_once(world: World) -> None:
    paused = {"enabled": True, "paused": True}
    born = await world.model(replicas=4, scaling_schedule=paused)
    model = await world.model(replicas=4)
    assert (await world.row("models", born))["replicas"] == 0
    await world.update("models", model, scaling_schedule={"enabled": False, "paused": True})
    assert (await world.row("models", model))["replicas"] == 4
    await world.update("models", model, scaling_schedule=paused)
    assert (await world.row("models", model))["replicas"] == 0
    await world.update("models", model, replicas=2)
    await world.update("models", model, scaling_schedule={**paused, "baseline_replicas": 1})
    assert (await world.row("models", model))["replicas"] == 2
