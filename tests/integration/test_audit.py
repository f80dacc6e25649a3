"""`audit`: silent where every rule holds, and finds each breach, however it came about."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gpustackd.store.audit.rules import RULES, TITLES
from tests.integration.world import GIB, World

pytestmark = pytest.mark.anyio


async def scene(world: World) -> dict[str, int]:
    """One placed, one waiting, one being decided, one in error; a unified machine too."""
    worker, (a, b) = await world.worker(80 * GIB, 80 * GIB, name="w", vram_reserved=GIB)
    unified, (u,) = await world.worker(64 * GIB, name="u", unified_memory=True)
    placed = await world.placed(await world.part(worker, [a], 10 * GIB, GIB))
    await world.placed(await world.part(unified, [u], 10 * GIB, GIB))
    waiting, deciding, error = [await world.instance() for _ in range(3)]
    await world.claim(deciding)
    await world.refuse(await world.claim(error), to_error=True)
    for name, id_ in (("placed", placed), ("waiting", waiting), ("deciding", deciding), ("error", error)):
        await world.update("model_instances", id_, name=name)
    return {"worker": worker, "a": a, "b": b, "unified": unified, "u": u, "placed": placed,
            "waiting": waiting, "deciding": deciding, "error": error}  # fmt: skip


async def test_a_sound_database_has_no_breach_and_its_rows_are_counted(world: World) -> None:
    await scene(world)
    found = await world.audit()
    assert found.clean
    assert found.counts == {"workers": 2, "gpus": 3, "instances": 5, "claims": 4, "over_committed": 0}


async def test_marked_rows_are_no_breach_and_are_counted(world: World) -> None:
    s = await scene(world)
    await world.update("gpu_devices", s["a"], vram_total=GIB)
    await world.update("workers", s["worker"], ram_total=5)
    found = await world.audit()
    assert found.clean
    assert found.counts["over_committed"] == 2


CLAIM = "INSERT INTO instance_claims (instance_id, worker_id, gpu_device_id, vram, ram) VALUES"
GROUP = "UPDATE model_instances SET group_id = 'g', group_size = 2"
PLACED = "INSERT INTO scheduling_decisions (instance_id, placement_epoch, outcome)"

BREACHES: list[tuple[int, str, str, str]] = [
    # rule, what people see of it, statement, words
    (1, "gpu w:cuda:0", "UPDATE gpu_devices SET vram_total = 5 WHERE id = {a}", "claims"),
    (1, "gpu w:cuda:0", "UPDATE gpu_devices SET vram_total = NULL WHERE id = {a}", "unknown"),
    (2, "worker w", "UPDATE workers SET ram_total = 5, ram_allocated = 0 WHERE id = {worker}", "total 5"),
    (2, "worker u", "UPDATE workers SET ram_total = 5, ram_allocated = 0 WHERE id = {unified}", "total 5"),
    (3, "gpu w:cuda:1", "UPDATE gpu_devices SET vram_allocated = 7 WHERE id = {b}", "allocated 7, claims 0"),
    (3, "gpu w:cuda:0", "UPDATE gpu_devices SET vram_allocated = 7 WHERE id = {a}", "allocated 7"),
    (3, "worker w", "UPDATE workers SET ram_allocated = 7 WHERE id = {worker}", "allocated 7"),
    (3, "worker u", "UPDATE workers SET ram_allocated = ram_allocated - 1 WHERE id = {unified}", "allocated"),
    (3, "gpu w:cuda:1", "UPDATE gpu_devices SET capacity = 5 WHERE id = {b}", "disagrees"),
    (3, "gpu w:cuda:1", "UPDATE gpu_devices SET open = false WHERE id = {b}", "disagrees"),
    (3, "gpu w:cuda:1", "UPDATE gpu_devices SET unified = true WHERE id = {b}", "disagrees"),
    (3, "worker w", "UPDATE workers SET ram_capacity = 10 + ram_allocated WHERE id = {worker}", "disagrees"),
    (3, "claim", CLAIM + " ({placed}, 999, NULL, 0, 0)", "does not exist"),
    (3, "claim", CLAIM + " ({placed}, {worker}, 999, 0, 0)", "does not exist"),
    (3, "claim", CLAIM + " ({placed}, {unified}, {b}, 0, 0)", "does not exist"),
    (3, "claim", CLAIM + " (999, {worker}, NULL, 0, 0)", "does not exist"),
    (4, "instance placed", "DELETE FROM instance_claims WHERE instance_id = {placed}", "without"),
    (4, "instance placed", "UPDATE model_instances SET worker_id = 999 WHERE id = {placed}", "without"),
    (4, "instance waiting", CLAIM + " ({waiting}, {worker}, NULL, 0, 0)", "PENDING with"),
    (4, "instance deciding", CLAIM + " ({deciding}, {worker}, NULL, 0, 0)", "ANALYZING with"),
    (4, "instance error", CLAIM + " ({error}, {worker}, NULL, 0, 0)", "half a placement"),
    (4, "instance placed", "UPDATE model_instances SET gpu_indexes = '[0, 0]' WHERE id = {placed}", "twice"),
    (4, "instance placed", "UPDATE model_instances SET gpu_indexes = '[5]' WHERE id = {placed}",
     "does not exist"),
    (4, "instance placed", "UPDATE model_instances SET gpu_type = 'rocm' WHERE id = {placed}",
     "does not exist"),
    (4, "instance placed", "UPDATE model_instances SET gpu_indexes = '[1]' WHERE id = {placed}", "disagree"),
    (4, "instance placed", "UPDATE model_instances SET gpu_indexes = NULL WHERE id = {placed}", "disagree"),
    (4, "instance placed", "UPDATE model_instances SET gpu_indexes = '0' WHERE id = {placed}", "disagree"),
    (5, "group g", GROUP + " WHERE id IN ({placed}, {waiting})", "1 of 2"),
    (7, "instance 1", PLACED + " VALUES ({placed}, 1, 'PLACED')", "2 times"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "what", "statement", "how"), BREACHES)
async def test_a_breach_is_found_and_named(
    world: World, rule: int, what: str, statement: str, how: str
) -> None:
    s = await scene(world)
    await world.sql.execute(  # as after a crash of everything that should have held it
        "SET session_replication_role = replica;"
        " ALTER TABLE gpu_devices DROP CONSTRAINT gpu_devices_vram_fits;"
        " ALTER TABLE workers DROP CONSTRAINT workers_ram_fits;"
        " DROP INDEX scheduling_decisions_placed_once_key"
    )
    await world.sql.execute(statement.format(**s))
    found = (await world.audit()).breaches
    assert rule in {b.rule for b in found}
    assert any(b.rule == rule and b.what.startswith(what) and re.search(how, b.how) for b in found), found


async def test_a_lease_that_does_not_go_with_the_state_is_found(world: World) -> None:
    s = await scene(world)
    await world.sql.execute(
        "SET session_replication_role = replica;"
        " ALTER TABLE model_instances DROP CONSTRAINT model_instances_lease_while_analyzing"
    )
    await world.update("model_instances", s["deciding"], lease_owner=None)
    assert [(b.rule, b.what) for b in (await world.audit()).breaches] == [(6, "instance deciding")]


async def test_subordinates_are_looked_at_as_well(world: World) -> None:
    first, (a,) = await world.worker(80 * GIB)
    second, (b,) = await world.worker(80 * GIB)
    instance = await world.placed(
        await world.part(first, [a], GIB), await world.part(second, [b], GIB), mode="delegated"
    )
    await world.clean()
    row = await world.row("model_instances", instance)
    servers: dict[str, Any] = row["distributed_servers"]
    servers["subordinate_workers"][0]["gpu_indexes"] = [3]
    await world.sql.execute("SET session_replication_role = replica")
    await world.update("model_instances", instance, distributed_servers=servers)
    assert {b.rule for b in (await world.audit()).breaches} == {4}


async def test_a_flood_of_breaches_is_cut_and_every_rule_has_a_title_and_a_name(world: World) -> None:
    for _ in range(5):
        await world.worker(GIB)
    await world.sql.execute("SET session_replication_role = replica")
    await world.sql.execute("UPDATE gpu_devices SET vram_allocated = 1")
    found = await world.audit(limit=2)
    assert len(found.breaches) == 2
    assert {rule.number for rule in RULES} == TITLES.keys() == set(range(1, 8))
    assert len({rule.name for rule in RULES}) == len(RULES)
