"""Moves of an instance, whoever writes: the trigger says what `domain.lifecycle.lawful` says."""

from __future__ import annotations

from itertools import product
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from gpustackd.domain.lifecycle import PLACED, InstanceState, lawful
from tests.integration.world import GIB, World

pytestmark = pytest.mark.anyio

NOTHING: dict[str, Any] = dict.fromkeys(
    ("worker_id", "worker_name", "gpu_type", "gpu_indexes", "computed_resource_claim", "distributed_servers")
)
LEASE = "now() + interval '1 hour'"


async def put(world: World, instance: int, state: InstanceState, placement: dict[str, Any]) -> None:
    """The row in a state, past every trigger (but no CHECK)."""
    await world.sql.execute("SET session_replication_role = replica")
    await write(world, instance, state, placement | {"placement_epoch": 5})
    await world.sql.execute("SET session_replication_role = origin")


async def write(world: World, instance: int, state: InstanceState, columns: dict[str, Any]) -> None:
    owner = UUID(int=1) if state is InstanceState.ANALYZING else None
    names = ", ".join(f"{c} = ${n}" for n, c in enumerate(columns, 4))
    await world.sql.execute(
        f"UPDATE model_instances SET state = $2, lease_owner = $3::uuid,"
        f" lease_until = CASE WHEN $3::uuid IS NULL THEN NULL ELSE {LEASE} END{',' if names else ''} {names}"
        " WHERE id = $1",
        instance,
        state,
        owner,
        *columns.values(),
    )


def variants() -> list[tuple[InstanceState, bool, InstanceState, bool]]:
    """(old state, whether it holds a placement, new state, whether the write clears it)."""
    found = []
    for old, new in product(InstanceState, InstanceState):
        for held in {True, False} if old is InstanceState.ERROR else {old in PLACED}:
            for cleared in (False, True):
                keeps = held and not cleared
                # what a CHECK refuses is no question of moves
                if (new in PLACED and not keeps and old is not InstanceState.ANALYZING) or (
                    new in PLACED and cleared
                ):
                    continue
                found.append((old, held, new, cleared))
    return found


async def test_the_trigger_and_the_domain_agree_on_every_pair_of_states(world: World) -> None:
    worker, _ = await world.worker()
    place = {"worker_id": worker, "worker_name": "w", "computed_resource_claim": {"ram": 0, "vram": {}}}
    instance = await world.instance()
    differ = []
    checked = 0
    for old, held, new, cleared in variants():
        await put(world, instance, old, place if held else NOTHING)
        change: dict[str, Any] = {}
        if cleared:
            change = NOTHING | {"placement_epoch": 6}
        elif new in PLACED and not held:
            change = place  # as a commit does
        try:
            async with world.sql.transaction():
                await write(world, instance, new, change)
            went = True
        except asyncpg.CheckViolationError:
            went = False
        expected = lawful(old, new, placement_cleared=cleared)
        if new in (InstanceState.PENDING, InstanceState.ANALYZING) and held and not cleared:
            expected = False  # a CHECK: waiting rows hold nothing
        checked += 1
        if went is not expected:
            differ.append(f"{old}{' placed' if held else ''} -> {new}{' cleared' if cleared else ''}: {went}")
    assert differ == []
    assert checked > 100


@pytest.mark.parametrize("missing", ["placement_epoch", "worker_id"])
async def test_back_to_pending_takes_a_cleared_placement_and_a_raised_epoch(
    world: World, missing: str
) -> None:
    worker, (gpu,) = await world.worker(GIB)
    instance = await world.placed(await world.part(worker, [gpu], GIB))
    change = NOTHING | {"placement_epoch": 2}
    del change[missing]
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await world.update("model_instances", instance, state="PENDING", **change)
    assert "placement_epoch raised" in (refused.value.hint or "")


@pytest.mark.parametrize("columns", [
    {"state": "ANALYZING"}, {"state": "SCHEDULED"}, {"state": "RUNNING"}, {"state": "ERROR"},
    {"worker_id": 1}, {"computed_resource_claim": {}}, {"gpu_indexes": [0]}, {"placement_epoch": 1},
    {"lease_owner": UUID(int=1)},
])  # fmt: skip
async def test_a_plain_insert_is_pending_and_holds_nothing(world: World, columns: dict[str, Any]) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="must be PENDING and hold nothing") as refused:
        await world.instance(**columns)
    assert "gpustackd apply" in (refused.value.hint or "")


async def test_an_instance_never_changes_its_model_its_worker_or_to_an_older_epoch(world: World) -> None:
    worker, (gpu,) = await world.worker(GIB)
    other, _ = await world.worker()
    model = await world.model()
    instance = await world.placed(await world.part(worker, [gpu], GIB))
    for change, problem in (
        ({"model_id": model}, "belongs to model"),
        ({"worker_id": other}, "cannot move from worker"),
        ({"placement_epoch": 0}, "never falls"),
        ({"state": "RUNNING", "placement_epoch": 0}, "never falls"),
    ):
        with pytest.raises(asyncpg.CheckViolationError, match=problem):
            await world.update("model_instances", instance, **change)
    await world.clean()


async def test_a_placement_appears_only_by_a_commit(world: World) -> None:
    worker, _ = await world.worker()
    instance = await world.instance()
    place = {"worker_id": worker, "computed_resource_claim": {}}
    with pytest.raises(asyncpg.CheckViolationError):
        await world.update("model_instances", instance, **place)
    await world.refuse(await world.claim(instance), to_error=True)
    for state in ("ERROR", "SCHEDULED"):
        with pytest.raises(asyncpg.CheckViolationError, match="cannot be given worker"):
            await world.update("model_instances", instance, state=state, **place)


async def test_a_worker_reports_states_and_a_restart_in_place(world: World) -> None:
    worker, (gpu,) = await world.worker(GIB)
    instance = await world.placed(await world.part(worker, [gpu], GIB))
    way = ["INITIALIZING", "DOWNLOADING", "STARTING", "RUNNING", "RUNNING", "UNREACHABLE", "RUNNING", "ERROR",
           "SCHEDULED", "STARTING", "UNREACHABLE", "ERROR"]  # fmt: skip
    for state in way:
        await world.update("model_instances", instance, state=state)
        await world.clean()
    assert (await world.row("model_instances", instance))["placement_epoch"] == 1


async def test_an_instance_in_error_without_a_place_is_sent_back_by_raising_its_epoch(world: World) -> None:
    instance = await world.instance()
    await world.refuse(await world.claim(instance), to_error=True)
    with pytest.raises(asyncpg.CheckViolationError):
        await world.update("model_instances", instance, state="PENDING")
    await world.update("model_instances", instance, state="PENDING", placement_epoch=2)
    assert [w.id for w in await world.store.waiting(None)] == [instance]
