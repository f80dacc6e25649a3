"""The port for replicas: both stores see the same rows, guard the same way and give the same outcomes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpustackd.ports import ReplicaSnapshot, ReplicaStore, SyncResult
from gpustackd.replicas.sync_plan import NewInstances, SyncPlan
from gpustackd.store.memory.store import MemoryStore
from gpustackd.store.postgres.replicas import PostgresReplicaStore
from gpustackd.store.postgres.store import PostgresStore
from tests.conformance.scenes import Scene
from tests.memory_replicas import MemoryReplicas

pytestmark = pytest.mark.anyio


@pytest.fixture
def kept(scene: Scene) -> ReplicaStore:
    if isinstance(scene.store, PostgresStore):
        return PostgresReplicaStore(scene.store.connections)
    assert isinstance(scene.store, MemoryStore)
    return MemoryReplicas(scene.store)


async def seen(kept: ReplicaStore, model: int) -> ReplicaSnapshot:
    found = await kept.replicas(model)
    assert found is not None
    return found


async def test_which_models_are_uneven(scene: Scene, kept: ReplicaStore) -> None:
    short = await scene.insert("models", name="short", replicas=2)
    even = await scene.insert("models", name="even", replicas=1)
    free = await scene.insert("models", name="free")
    planned = await scene.insert("models", name="planned", scaling_schedule={"enabled": True})
    await scene.insert("models", name="off", scaling_schedule={"enabled": False})
    bad = [
        await scene.insert("models", name=f"bad {b}", scaling_schedule=b) for b in ([], {"enabled": "yes"})
    ]
    strays = await scene.insert("models", name="strays", replicas=1)
    for name, model in (("a", short), ("b", even), ("c", free)):
        await scene.insert("model_instances", name=name, model_id=model)
    await scene.insert("model_instances", name="d", model_id=strays, role="prefill", group_id="g")
    assert list(await kept.out_of_sync(None)) == [short, planned, *bad, strays]
    assert list(await kept.out_of_sync([strays, even, short, 999])) == [short, strays]
    assert list(await kept.out_of_sync([])) == []
    urgent = await scene.insert("models", name="urgent", replicas=1, priority=7)
    assert list(await kept.out_of_sync([short, urgent])) == [urgent, short]
    assert await kept.replicas(999) is None


async def test_steps_are_written_where_all_is_as_seen(scene: Scene, kept: ReplicaStore) -> None:
    model = await scene.insert("models", name="m", replicas=3, placement_strategy="binpack")
    first = await scene.insert("model_instances", name="m-1", model_id=model)
    looked = await seen(kept, model)
    assert (looked.name, looked.replicas, looked.names) == ("m", 3, {"m-1"})
    assert looked.placement_strategy == "binpack"
    assert [(r.id, r.state, r.placed, r.draining_for) for r in looked.instances] == [
        (first, "PENDING", False, None)
    ]
    steps = SyncPlan(add=(NewInstances(2),))
    assert await kept.sync(looked, 4, steps, [["m-2", "m-3"]]) is SyncResult.CHANGED
    assert await kept.sync(looked, 3, steps, [["m-1", "m-2", "m-3"]]) is SyncResult.DONE
    assert await kept.sync(looked, 3, steps, [["m-4", "m-5"]]) is SyncResult.CHANGED
    looked = await seen(kept, model)
    assert looked.names == {"m-1", "m-2", "m-3"}
    assert await kept.sync(looked, 3, SyncPlan(add=(NewInstances(1),)), [["m-1", "m-2"]]) is SyncResult.TAKEN
    ids = [r.id for r in looked.instances]
    assert await kept.sync(looked, 3, SyncPlan(delete=(ids[1],), drain=(ids[2],)), []) is SyncResult.DONE
    looked = await seen(kept, model)
    assert [r.draining_for is None for r in looked.instances] == [True, False]
    stale = looked
    assert await kept.sync(looked, 3, SyncPlan(undrain=(ids[2],)), []) is SyncResult.DONE
    assert await kept.sync(stale, 3, SyncPlan(delete=(ids[2],)), []) is SyncResult.CHANGED
    group = SyncPlan(add=(NewInstances(1, "prefill", "g"), NewInstances(2, "decode", "g")))
    names = [["m-prefill-1"], ["m-decode-1", "m-decode-2", "m-decode-3"]]
    assert await kept.sync(await seen(kept, model), 3, group, names) is SyncResult.DONE
    found = [(r.role, r.group_id) for r in (await seen(kept, model)).instances]
    assert found == [(None, None), (None, None), ("prefill", "g"), ("decode", "g"), ("decode", "g")]
    await scene.delete("models", model)
    assert await kept.sync(looked, 3, steps, [["m-8", "m-9"]]) is SyncResult.GONE


async def test_a_schedules_number_is_written_while_it_stands(scene: Scene, kept: ReplicaStore) -> None:
    model = await scene.insert("models", name="m", scaling_schedule={"enabled": True})
    looked = await seen(kept, model)
    assert not await kept.set_replicas(looked, 4, looked.now - timedelta(seconds=1))
    assert not await kept.set_replicas(replace(looked, schedule_digest="another"), 4, None)
    assert await kept.set_replicas(looked, 4, looked.now + timedelta(hours=1))
    assert (await seen(kept, model)).replicas == 4
    assert not await kept.set_replicas(looked, 4, None)
