"""What is booked, what is given back, and what a change of capacity does to it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import asyncpg
import pytest

from gpustackd.ports import CommitCode
from tests.integration.world import GIB, World, connected
from tests.waiting import blocked

pytestmark = pytest.mark.anyio


# --- capacity ----------------------------------------------------------------------------------------------


async def test_a_gpu_offers_its_total_less_the_workers_reserve_while_the_worker_is_ready(
    world: World,
) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, vram_reserved=2 * GIB)

    async def offer() -> tuple[int | None, bool]:
        row = await world.row("gpu_devices", gpu)
        return row["capacity"], row["open"]

    assert await offer() == (78 * GIB, True)
    await world.update("workers", worker, vram_reserved=90 * GIB)
    assert await offer() == (0, True)
    await world.update("workers", worker, state="UNREACHABLE", vram_reserved=0)
    assert await offer() == (80 * GIB, False)
    await world.update("workers", worker, state="READY")
    await world.update("gpu_devices", gpu, schedulable=False)
    assert await offer() == (80 * GIB, False)
    await world.update("gpu_devices", gpu, schedulable=True, vram_total=None)
    assert await offer() == (None, True)
    await world.clean()


async def test_what_the_schema_keeps_is_put_right_when_somebody_writes_over_it(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, ram_total=64 * GIB)
    await world.update("gpu_devices", gpu, capacity=10**15, open=False)
    row = await world.row("gpu_devices", gpu)
    assert (row["capacity"], row["open"]) == (80 * GIB, True)
    await world.update("workers", worker, ram_capacity=10**15)
    assert (await world.row("workers", worker))["ram_capacity"] == 64 * GIB


async def test_a_gpu_added_to_a_worker_that_is_not_ready_waits_for_it(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, state="PROVISIONING")
    assert not (await world.row("gpu_devices", gpu))["open"]
    await world.update("workers", worker, state="READY")
    assert (await world.row("gpu_devices", gpu))["open"]


async def test_a_gpu_inserted_while_its_worker_changes_state_ends_up_in_step_with_it(world: World) -> None:
    worker, _ = await world.worker(state="NOT_READY")
    other = await connected(world.url)
    transaction = other.transaction()
    await transaction.start()
    await other.execute(
        "INSERT INTO gpu_devices (worker_id, index, type, vram_total) VALUES ($1, 0, 'cuda', 1)", worker
    )
    async with blocked(world.url, "UPDATE workers SET state = 'READY' WHERE id = $1", worker) as finished:
        await transaction.commit()
        await finished()
    assert await world.sql.fetchval("SELECT open FROM gpu_devices WHERE worker_id = $1", worker)
    await world.clean()
    await other.close()


@pytest.mark.parametrize("by", ["total", "unknown", "reserve"])
async def test_capacity_that_shrinks_under_bookings_marks_the_gpu_and_never_blocks(
    world: World, by: str
) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    first = await world.placed(await world.part(worker, [gpu], 30 * GIB))
    second = await world.placed(await world.part(worker, [gpu], 30 * GIB))
    if by == "reserve":
        await world.update("workers", worker, vram_reserved=40 * GIB)
    else:
        await world.update("gpu_devices", gpu, vram_total=40 * GIB if by == "total" else None)
    row = await world.row("gpu_devices", gpu)
    assert (row["over_committed"], row["vram_allocated"]) == (True, 60 * GIB)
    await world.clean()

    refused = await world.place(await world.instance(), await world.part(worker, [gpu], 0))
    assert (refused.code, refused.gpu_ids) == (CommitCode.CONFLICT, (gpu,))

    await world.delete("model_instances", first)
    # as soon as it fits again, the mark is gone; of unknown capacity only nothing fits
    assert (await world.row("gpu_devices", gpu))["over_committed"] is (by == "unknown")
    await world.delete("model_instances", second)
    assert not (await world.row("gpu_devices", gpu))["over_committed"]
    await world.clean()


async def test_a_mark_goes_when_capacity_grows_again(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, ram_total=16 * GIB)
    await world.placed(await world.part(worker, [gpu], 60 * GIB, 8 * GIB))
    await world.update("gpu_devices", gpu, vram_total=10 * GIB)
    await world.update("workers", worker, ram_reserved=10 * GIB)
    assert (await world.row("workers", worker))["over_committed"]
    await world.update("gpu_devices", gpu, vram_total=60 * GIB)
    await world.update("workers", worker, ram_reserved=8 * GIB)
    assert not (await world.row("gpu_devices", gpu))["over_committed"]
    assert not (await world.row("workers", worker))["over_committed"]
    assert (await world.place(await world.instance(), await world.part(worker, [gpu], 0))).code is None
    await world.clean()


async def test_ram_that_shrinks_under_bookings_marks_the_worker(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, ram_total=64 * GIB)
    await world.placed(await world.part(worker, [gpu], GIB, 40 * GIB))
    await world.update("workers", worker, ram_total=32 * GIB)
    row = await world.row("workers", worker)
    assert (row["over_committed"], row["ram_capacity"], row["ram_allocated"]) == (True, 32 * GIB, 40 * GIB)
    refused = await world.place(await world.instance(), await world.part(worker, [gpu], GIB, GIB))
    assert (refused.code, refused.worker_ids) == (CommitCode.CONFLICT, (worker,))
    # what needs no RAM does not care
    assert (await world.place(await world.instance(), await world.part(worker, [gpu], GIB))).code is None
    await world.update("workers", worker, ram_total=None)
    await world.clean()


@pytest.mark.parametrize("table", ["gpu_devices", "workers"])
async def test_booking_more_than_there_is_breaks_a_check_whoever_writes(world: World, table: str) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, ram_total=64 * GIB)
    id_, column = (gpu, "vram_allocated") if table == "gpu_devices" else (worker, "ram_allocated")
    with pytest.raises(asyncpg.CheckViolationError, match="fits"):
        await world.update(table, id_, **{column: 81 * GIB})
    await world.update(table, id_, **{"vram_total" if table == "gpu_devices" else "ram_total": None})
    with pytest.raises(asyncpg.CheckViolationError, match="fits"):
        await world.update(table, id_, **{column: 1})


async def test_a_mark_cannot_be_wiped_off_a_row_that_does_not_fit(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    await world.placed(await world.part(worker, [gpu], 60 * GIB))
    await world.update("gpu_devices", gpu, vram_total=GIB)
    with pytest.raises(asyncpg.CheckViolationError):
        await world.update("gpu_devices", gpu, over_committed=False)


# --- unified memory ----------------------------------------------------------------------------------------


async def test_unified_memory_is_one_pool_for_ram_vram_and_both_reserves(world: World) -> None:
    worker, (gpu,) = await world.worker(
        100 * GIB, unified_memory=True, ram_total=128 * GIB, ram_reserved=2 * GIB, vram_reserved=GIB
    )
    instance = await world.placed(await world.part(worker, [gpu], 20 * GIB, 4 * GIB))
    row = await world.row("workers", worker)
    assert row["ram_capacity"] - row["ram_allocated"] == 101 * GIB
    card = await world.row("gpu_devices", gpu)
    assert card["capacity"] - card["vram_allocated"] == 79 * GIB
    claim = (await world.row("model_instances", instance))["computed_resource_claim"]
    assert claim["is_unified_memory"] is True
    # the card alone would hold it, the pool does not
    refused = await world.place(await world.instance(), await world.part(worker, [gpu], 79 * GIB, 23 * GIB))
    assert (refused.code, refused.worker_ids) == (CommitCode.CONFLICT, (worker,))
    assert (
        await world.place(await world.instance(), await world.part(worker, [gpu], 79 * GIB, 22 * GIB))
    ).code is None
    await world.clean()
    await world.delete("model_instances", instance)
    assert (await world.row("workers", worker))["ram_allocated"] == 101 * GIB
    await world.clean()


async def test_switching_unified_memory_counts_what_is_held_anew(world: World) -> None:
    worker, (gpu,) = await world.worker(64 * GIB, ram_total=64 * GIB)
    instance = await world.placed(await world.part(worker, [gpu], 50 * GIB, 10 * GIB))
    await world.update("workers", worker, unified_memory=True)
    row = await world.row("workers", worker)
    assert (row["ram_allocated"], row["over_committed"]) == (60 * GIB, False)
    await world.clean()
    await world.update("workers", worker, unified_memory=False)
    assert (await world.row("workers", worker))["ram_allocated"] == 10 * GIB
    await world.clean()
    await world.update("workers", worker, unified_memory=True, ram_total=32 * GIB)
    assert (await world.row("workers", worker))["over_committed"]
    await world.delete("model_instances", instance)
    row = await world.row("workers", worker)
    assert (row["ram_allocated"], row["over_committed"]) == (0, False)
    await world.clean()


async def test_a_delete_that_meets_a_switch_to_unified_memory_loses_no_byte(world: World) -> None:
    worker, (gpu,) = await world.worker(64 * GIB, ram_total=512 * GIB)
    kept, gone = [await world.placed(await world.part(worker, [gpu], 20 * GIB, GIB)) for _ in range(2)]
    for unified in (True, False):
        user = await connected(world.url)
        transaction = user.transaction()
        await transaction.start()
        await user.execute("UPDATE workers SET unified_memory = $2 WHERE id = $1", worker, unified)
        async with blocked(world.url, "DELETE FROM model_instances WHERE id = $1", gone) as finished:
            await transaction.commit()
            await finished()
        await world.clean()
        await user.close()
        gone = await world.placed(await world.part(worker, [gpu], 20 * GIB, GIB))
    assert await world.exists("model_instances", kept)


# --- giving back -------------------------------------------------------------------------------------------


async def held(world: World) -> int:
    """Bytes that GPUs and workers say are booked, and ledger rows."""
    total: int = await world.sql.fetchval(
        "SELECT (SELECT coalesce(sum(vram_allocated), 0) FROM gpu_devices)"
        " + (SELECT coalesce(sum(ram_allocated), 0) FROM workers) + (SELECT count(*) FROM instance_claims)"
    )
    return total


async def scene(world: World) -> dict[str, Any]:
    """Two workers (one unified), one instance across both, one on the first GPU, one on the processor."""
    model = await world.model()
    first, a = await world.worker(80 * GIB, 80 * GIB)
    second, b = await world.worker(80 * GIB, unified_memory=True)
    across = await world.placed(
        await world.part(first, a, 30 * GIB, GIB), await world.part(second, b, 20 * GIB, GIB), model_id=model
    )
    alone = await world.placed(await world.part(first, a[:1], 10 * GIB), model_id=model)
    on_cpu = await world.placed(await world.part(second, ram=GIB), model_id=model)
    return {"model": model, "first": first, "second": second, "a": a, "b": b, "across": across,
            "alone": alone, "on_cpu": on_cpu}  # fmt: skip


@pytest.mark.parametrize("statement", [
    "DELETE FROM models",
    "DELETE FROM model_instances",
    "DELETE FROM models WHERE id IN (SELECT model_id FROM model_instances)",
    "WITH gone AS (DELETE FROM model_instances RETURNING model_id) SELECT count(*) FROM gone",
])  # fmt: skip
async def test_a_plain_delete_gives_back_everything_in_the_same_transaction(
    world: World, statement: str
) -> None:
    await scene(world)
    async with world.sql.transaction():
        await world.sql.execute(statement)
        assert await held(world) == 0
    await world.clean()


async def test_a_delete_that_is_rolled_back_gives_back_nothing(world: World) -> None:
    await scene(world)
    before = await held(world)
    transaction = world.sql.transaction()
    await transaction.start()
    await world.sql.execute("DELETE FROM models")
    await transaction.rollback()
    assert await held(world) == before
    await world.clean()


async def test_deleting_one_of_several_gives_back_its_part_alone(world: World) -> None:
    s = await scene(world)
    await world.delete("model_instances", s["across"])
    assert [await world.allocated(g) for g in (*s["a"], *s["b"])] == [10 * GIB, 0, 0]
    assert (await world.row("workers", s["second"]))["ram_allocated"] == GIB
    await world.clean()


async def test_a_lost_gpu_sends_every_instance_with_a_part_there_back_to_pending(world: World) -> None:
    s = await scene(world)
    await world.delete("gpu_devices", s["b"][0])
    row = await world.row("model_instances", s["across"])
    assert (row["state"], row["placement_epoch"]) == ("PENDING", 2)
    cleared = ("worker_id", "worker_name", "worker_ip", "gpu_type", "gpu_indexes", "computed_resource_claim",
               "distributed_servers", "scheduled_at", "next_attempt_at")  # fmt: skip
    assert [row[c] for c in cleared] == [None] * len(cleared)
    assert "GPU" in row["state_message"]
    assert await world.ledger(s["across"]) == []
    for other in ("alone", "on_cpu"):
        assert (await world.row("model_instances", s[other]))["state"] == "SCHEDULED"
    assert [await world.allocated(g) for g in s["a"]] == [10 * GIB, 0]
    await world.clean()


async def test_a_lost_worker_sends_back_what_it_held_part_by_part_and_on_the_processor(world: World) -> None:
    s = await scene(world)
    await world.delete("workers", s["second"])
    rows = [await world.row("model_instances", s[i]) for i in ("across", "alone", "on_cpu")]
    assert [(r["state"], r["placement_epoch"]) for r in rows] == [
        ("PENDING", 2), ("SCHEDULED", 1), ("PENDING", 2),
    ]  # fmt: skip
    assert "worker" in rows[2]["state_message"]
    await world.clean()


@pytest.mark.parametrize("order", list(permutations(["gpu", "first", "second"])))
async def test_workers_and_gpus_lost_in_any_order_give_back_everything(
    world: World, order: tuple[str, ...]
) -> None:
    s = await scene(world)
    for what in order:
        if what == "gpu":
            await world.delete("gpu_devices", s["a"][0])
        else:
            await world.delete("workers", s[what])
        await world.clean()
    assert await held(world) == 0
    rows = await world.sql.fetch("SELECT state, placement_epoch FROM model_instances")
    assert [tuple(r) for r in rows] == [("PENDING", 2)] * 3


@pytest.mark.parametrize("order", list(permutations(["gpu_devices", "workers", "models"])))
async def test_everything_deleted_in_one_transaction_in_any_order_leaves_nothing(
    world: World, order: tuple[str, ...]
) -> None:
    await scene(world)
    async with world.sql.transaction():
        for table in order:
            await world.sql.execute(f"DELETE FROM {table}")
    assert await held(world) == 0
    await world.clean()


async def test_several_workers_deleted_by_one_statement_evict_each_instance_once(world: World) -> None:
    s = await scene(world)
    await world.sql.execute("DELETE FROM workers")
    rows = await world.sql.fetch("SELECT state, placement_epoch FROM model_instances")
    assert [tuple(r) for r in rows] == [("PENDING", 2)] * 3
    assert await world.exists("models", s["model"])
    await world.clean()


async def test_a_running_instance_and_one_in_error_lose_their_place_with_their_worker_too(
    world: World,
) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    running, failed = [await world.placed(await world.part(worker, [gpu], GIB)) for _ in range(2)]
    await world.update("model_instances", running, state="RUNNING")
    await world.update("model_instances", failed, state="ERROR")
    await world.delete("workers", worker)
    for instance in (running, failed):
        row = await world.row("model_instances", instance)
        assert (row["state"], row["placement_epoch"]) == ("PENDING", 2)
    await world.clean()


async def test_an_instance_in_error_whose_placement_is_cleared_gives_back(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    instance = await world.placed(await world.part(worker, [gpu], GIB, GIB))
    await world.update("model_instances", instance, state="ERROR")
    await world.clean()
    await world.update(
        "model_instances",
        instance,
        worker_id=None,
        gpu_type=None,
        gpu_indexes=None,
        computed_resource_claim=None,
    )
    assert await held(world) == 0
    await world.clean()


async def test_sending_an_instance_back_by_hand_gives_back(world: World) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    instance = await world.placed(await world.part(worker, [gpu], GIB, GIB))
    await world.sql.execute("SELECT gpustackd_evict(ARRAY[$1::bigint], 'drained')", instance)
    row = await world.row("model_instances", instance)
    assert (row["state"], row["state_message"], row["placement_epoch"]) == ("PENDING", "drained", 2)
    assert await held(world) == 0
    await world.clean()


async def test_a_placement_that_loses_a_ledger_row_is_void_as_a_whole(world: World) -> None:
    s = await scene(world)
    await world.sql.execute("DELETE FROM instance_claims WHERE gpu_device_id = $1", s["b"][0])
    row = await world.row("model_instances", s["across"])
    assert (row["state"], row["placement_epoch"]) == ("PENDING", 2)
    assert await world.ledger(s["across"]) == []
    await world.clean()


@pytest.mark.parametrize("table", [
    "clusters", "workers", "gpu_devices", "models", "model_instances", "instance_claims", "model_files",
    "inference_backends", "instance_types", "scheduling_decisions",
])  # fmt: skip
async def test_truncate_is_refused_with_the_way_out(world: World, table: str) -> None:
    s = await scene(world)
    with pytest.raises(asyncpg.FeatureNotSupportedError) as refused:
        await world.sql.execute(f"TRUNCATE {table} CASCADE")
    assert "DELETE" in (refused.value.hint or "")
    assert await world.exists("model_instances", s["alone"])


async def test_a_ledger_row_is_never_updated(world: World) -> None:
    s = await scene(world)
    with pytest.raises(asyncpg.FeatureNotSupportedError) as refused:
        await world.sql.execute(
            "UPDATE instance_claims SET vram = vram - 1 WHERE instance_id = $1", s["alone"]
        )
    assert "written once" in (refused.value.hint or "")


@pytest.mark.parametrize("change", [{"worker_id": "other"}, {"index": 7}, {"type": "rocm"}])
@pytest.mark.parametrize("used", [True, False])
async def test_a_gpu_row_never_becomes_another_card(world: World, change: dict[str, Any], used: bool) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    other, _ = await world.worker()
    if used:
        await world.placed(await world.part(worker, [gpu], GIB))
    if "worker_id" in change:
        change = {"worker_id": other}
    with pytest.raises(asyncpg.CheckViolationError, match="cannot become") as refused:
        await world.update("gpu_devices", gpu, **change)
    assert "insert another" in (refused.value.hint or "")


# --- versions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [False, True])
async def test_a_heartbeat_and_a_usage_sample_raise_no_version(world: World, marked: bool) -> None:
    worker, (gpu,) = await world.worker(80 * GIB, unified_memory=True)
    await world.placed(await world.part(worker, [gpu], 60 * GIB, GIB))
    if marked:
        await world.update("gpu_devices", gpu, vram_total=GIB)
        await world.update("workers", worker, ram_total=GIB)
    mark = (await world.store.fleet_changes(None)).mark

    async def versions() -> list[tuple[int, int]]:
        rows = [await world.row("workers", worker), await world.row("gpu_devices", gpu)]
        return [(r["version"], r["changed_in"]) for r in rows]

    before = await versions()
    await world.sql.execute("UPDATE workers SET heartbeat_at = now(), state = state, labels = labels")
    await world.sql.execute("UPDATE gpu_devices SET vram_used = 5, vram_used_at = now(), index = index")
    assert await versions() == before
    changes = await world.store.fleet_changes(mark)
    assert (list(changes.workers), list(changes.gpus)) == ([], [])


@pytest.mark.parametrize(("table", "change"), [
    ("workers", {"state": "NOT_READY"}), ("workers", {"labels": {"zone": "a"}}),
    ("workers", {"ram_total": GIB}), ("workers", {"ram_reserved": 1}), ("workers", {"name": "other"}),
    ("workers", {"cpu_arch": "arm64"}), ("workers", {"unified_memory": True}),
    ("gpu_devices", {"vram_total": GIB}), ("gpu_devices", {"schedulable": False}),
    ("gpu_devices", {"links": {"1": "NVLINK"}}), ("gpu_devices", {"compute_capability": "9.0"}),
])  # fmt: skip
async def test_what_a_decision_looks_at_raises_the_version(
    world: World, table: str, change: dict[str, Any]
) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    id_ = worker if table == "workers" else gpu
    before = await world.row(table, id_)
    await world.update(table, id_, **change)
    after = await world.row(table, id_)
    assert after["version"] == before["version"] + 1
    assert after["changed_in"] > before["changed_in"]


async def test_booking_and_giving_back_raise_the_versions_of_the_rows_they_touch(world: World) -> None:
    worker, (a, b) = await world.worker(80 * GIB, 80 * GIB)

    async def versions() -> list[int]:
        rows = [await world.row("workers", worker), *[await world.row("gpu_devices", g) for g in (a, b)]]
        return [r["version"] for r in rows]

    assert await versions() == [0, 0, 0]
    instance = await world.placed(await world.part(worker, [a], GIB))
    assert await versions() == [0, 1, 0]
    await world.placed(await world.part(worker, [b], GIB, GIB))
    assert await versions() == [1, 1, 1]
    await world.delete("model_instances", instance)
    assert await versions() == [1, 2, 1]
