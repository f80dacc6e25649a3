"""Rows that people get wrong: a clear answer for them, no harm for anybody else."""

from __future__ import annotations

import json

import asyncpg
import pytest

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.ports import CommitCode
from gpustackd.store.postgres.inventory import InventoryReads
from tests.integration.world import GIB, World
from tests.waiting import listening

pytestmark = pytest.mark.anyio


async def works(world: World) -> None:
    """Another instance is placed as ever."""
    worker, (gpu,) = await world.worker(80 * GIB)
    await world.placed(await world.part(worker, [gpu], GIB, GIB))
    await world.clean()


async def test_an_instance_of_an_unknown_model_is_refused_by_name_of_the_reference(world: World) -> None:
    with pytest.raises(asyncpg.ForeignKeyViolationError) as refused:
        await world.insert("model_instances", name="x", model_id=4711)
    assert "(model_id)=(4711)" in (refused.value.detail or "")
    await works(world)


async def test_one_bad_row_of_a_statement_takes_the_statement_and_nothing_else(world: World) -> None:
    model = await world.model()
    async with listening(world.url) as ear:
        with pytest.raises(asyncpg.UniqueViolationError):
            await world.sql.execute(
                "INSERT INTO model_instances (name, model_id) VALUES ('a', $1), ('b', $1), ('a', $1)", model
            )
        assert await ear.heard() == []
    assert await world.sql.fetchval("SELECT count(*) FROM model_instances") == 0
    await works(world)


async def test_gaps_between_gpu_indexes_are_no_trouble(world: World) -> None:
    worker, _ = await world.worker()
    gpus = [
        await world.insert("gpu_devices", worker_id=worker, index=n, type="cuda", vram_total=80 * GIB)
        for n in (7, 2, 4000)
    ]
    instance = await world.placed(await world.part(worker, gpus, GIB))
    row = await world.row("model_instances", instance)
    assert row["gpu_indexes"] == [7, 2, 4000]
    assert row["computed_resource_claim"]["vram"] == {"7": GIB, "2": GIB, "4000": GIB}
    await world.clean()


async def test_a_megabyte_of_labels_is_carried_and_costs_no_heartbeat_a_version(world: World) -> None:
    labels = {f"key-{n}": "x" * 1000 for n in range(1000)}
    assert len(json.dumps(labels)) > 1_000_000
    async with listening(world.url) as ear:
        worker, (gpu,) = await world.worker(80 * GIB, labels=labels)
        payloads = await ear.heard()
    assert all(len(p) < 100 for p in payloads)
    changes = await world.store.fleet_changes(None)
    assert changes.workers[0].labels == labels
    before = (await world.row("workers", worker))["version"]
    await world.sql.execute("UPDATE workers SET heartbeat_at = now(), labels = $1", labels)
    assert (await world.row("workers", worker))["version"] == before
    await world.placed(await world.part(worker, [gpu], GIB, GIB))
    await world.clean()


@pytest.mark.parametrize("labels", ["text", 5, ["a"], True])
async def test_labels_that_are_no_map_are_refused(world: World, labels: object) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match="labels_are_a_map"):
        await world.insert("workers", name="x", labels=labels)
    await works(world)


async def test_a_json_null_in_place_of_labels_reads_as_none(world: World) -> None:
    await world.sql.execute("INSERT INTO workers (name, labels) VALUES ('x', NULL)")
    changes = await world.store.fleet_changes(None)
    assert changes.workers[0].labels == {}


@pytest.mark.parametrize("column", ["categories", "backend_parameters", "env", "lora_list", "gpu_selector"])
async def test_a_model_with_a_column_of_the_wrong_shape_is_told_and_hurts_no_other(
    world: World, column: str
) -> None:
    wrong = {"gpu_ids": "all"} if column == "gpu_selector" else "text"
    bad = await world.model(**{column: wrong})
    good = await world.model()
    found = {m.id: m for m in await world.store.models([bad, good])}
    assert found[bad].spec is None
    assert column in found[bad].error
    assert found[good].spec is not None
    await works(world)


async def test_reasons_that_somebody_scribbled_over_do_not_stop_the_reading_of_the_queue(
    world: World,
) -> None:
    ids = [await world.instance() for _ in range(5)]
    for i, scribble in zip(ids, ["text", 5, {}, [], [1, "x", {}]], strict=True):
        await world.update("model_instances", i, reasons=scribble)
    assert {w.id for w in await world.store.waiting(None)} == set(ids)
    assert len(await world.claims(*ids)) == 5


@pytest.mark.parametrize("size", [0, 1, 2**62, 2**63 - 1])
async def test_sizes_at_the_ends_of_what_a_column_holds_are_booked_exactly(world: World, size: int) -> None:
    worker, (gpu,) = await world.worker(size, ram_total=size)
    instance = await world.placed(await world.part(worker, [gpu], size, size))
    assert await world.allocated(gpu) == size
    if size:
        result = await world.place(await world.instance(), await world.part(worker, [gpu], 1))
        assert result.code is CommitCode.CONFLICT
    await world.clean()
    await world.delete("model_instances", instance)
    assert await world.allocated(gpu) == 0


async def test_a_reserve_larger_than_the_machine_leaves_nothing_and_breaks_nothing(world: World) -> None:
    worker, (gpu,) = await world.worker(GIB, ram_total=GIB, ram_reserved=2**62, vram_reserved=2**62)
    assert (await world.row("gpu_devices", gpu))["capacity"] == 0
    assert (await world.row("workers", worker))["ram_capacity"] == 0
    result = await world.place(await world.instance(), await world.part(worker, [gpu], 1))
    assert result.code is CommitCode.CONFLICT
    await works(world)


async def test_names_may_hold_anything(world: World) -> None:
    name = "тест; DROP TABLE models; -- \"'\\ \n€" + "x" * 5000
    worker, (gpu,) = await world.worker(80 * GIB, name=name)
    model = await world.model(name=name)
    instance = await world.instance(model, name=name)
    assert (await world.place(instance, await world.part(worker, [gpu], GIB))).code is None
    assert (await world.row("model_instances", instance))["worker_name"] == name
    await world.clean()


@pytest.mark.parametrize("statement", [
    "TRUNCATE models CASCADE", "TRUNCATE workers CASCADE", "UPDATE instance_claims SET vram = 0",
    "INSERT INTO model_instances (name, model_id, state) VALUES ('x', 1, 'RUNNING')",
    "UPDATE gpu_devices SET worker_id = worker_id + 1", "UPDATE gpu_devices SET index = index + 1",
    "UPDATE model_instances SET model_id = model_id + 1", "UPDATE model_instances SET state = 'PENDING'",
    "UPDATE gpu_devices SET vram_allocated = vram_total + 1",
])  # fmt: skip
async def test_a_refused_statement_says_what_to_do_instead_and_leaves_everything(
    world: World, statement: str
) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    model = await world.model()
    await world.placed(await world.part(worker, [gpu], GIB, GIB), model_id=model)
    before = await world.ledger()
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.FeatureNotSupportedError)) as refused:
        await world.sql.execute(statement)
    assert refused.value.hint or refused.value.constraint_name
    assert await world.ledger() == before
    await works(world)


async def test_jsonb_that_no_reader_takes_costs_its_own_row_alone(world: World) -> None:
    good = await world.model()
    bad = {
        "env": json.dumps("[" * 3000),
        "gather": "[" * 3000 + "]" * 3000,
        "backend_parameters": "[" + "9" * 5000 + "]",
    }
    ids = {}
    for column, text in bad.items():
        ids[column] = await world.model()
        await world.sql.execute(
            f"UPDATE models SET {column} = $1::text::jsonb WHERE id = $2", text, ids[column]
        )
    found = {r.id: r for r in await world.store.models([good, *ids.values()])}
    assert found[good].spec is not None
    for column, model in ids.items():
        assert found[model].spec is None
        assert column in str(found[model].error)


async def test_an_index_beyond_32_bits_is_an_index(world: World) -> None:
    worker, _ = await world.worker()
    gpu = await world.insert("gpu_devices", worker_id=worker, index=2**40, type="cuda", vram_total=80 * GIB)
    fleet = Fleet()
    changes = await world.store.fleet_changes(None)
    for row in changes.workers:
        fleet.put_worker(row)
    for device in changes.gpus:
        fleet.put_gpu(device)
    assert 2**40 in fleet.gpu_index
    await world.placed(await world.part(worker, [gpu], GIB))
    await world.clean()


async def test_sizes_whose_sum_is_beyond_64_bits_are_listed(world: World) -> None:
    largest = 2**63 - 1
    await world.worker(largest, largest, largest)
    (row,) = await InventoryReads(world.sql).rows("workers", None)
    assert row["vram_total"] == largest


async def test_a_worker_with_thousands_of_gpus_is_refused_whole_and_one_with_256_is_not(world: World) -> None:
    worker, _ = await world.worker()
    many = (
        "INSERT INTO gpu_devices (worker_id, index, type, vram_total)"
        " SELECT $1, n, 't' || n, 1073741824 FROM generate_series(1, $2) n"
    )
    with pytest.raises(asyncpg.PostgresError, match="256 GPUs") as refused:
        await world.sql.execute(many, worker, 257)
    assert refused.value.hint == "Split it into several workers."
    assert await world.sql.fetchval("SELECT count(*) FROM gpu_devices WHERE worker_id = $1", worker) == 0
    await world.sql.execute(many, worker, 256)
    await works(world)
