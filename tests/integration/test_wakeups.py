"""Which writes wake the scheduler, how often, and which never do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gpustackd.ports import Wake
from gpustackd.store.postgres.listen import parse_notification
from tests.integration.world import GIB, World
from tests.waiting import Ear, listening

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ear(world: World) -> AsyncIterator[Ear]:
    async with listening(world.url) as opened:
        yield opened


async def test_one_insert_is_one_notification_with_its_id(world: World, ear: Ear) -> None:
    model = await world.model()
    assert await ear.heard() == []  # a model alone is nothing to do
    instance = await world.instance(model)
    assert await ear.heard() == [f"created {instance}"]
    assert parse_notification(f"created {instance}") == Wake("created", (instance,))


async def test_many_rows_of_one_statement_are_one_notification_of_bounded_size(
    world: World, ear: Ear
) -> None:
    model = await world.model()
    statement = (
        "INSERT INTO model_instances (name, model_id) SELECT $1 || n, $2 FROM generate_series(1, $3) n"
    )
    await world.sql.execute(statement, "few", model, 300)
    (payload,) = await ear.heard()
    assert len(parse_notification(payload).ids) == 300
    assert len(payload) < 8000
    await world.sql.execute(statement, "many", model, 5000)
    assert await ear.heard() == ["created"]  # look yourself
    assert parse_notification("created") == Wake("created", ())


async def test_a_notification_of_300_long_ids_still_fits(world: World, ear: Ear) -> None:
    model = await world.model()
    await world.sql.execute(
        "INSERT INTO model_instances (id, name, model_id)"
        " SELECT 9223372036854775000 + n, 'i' || n, $1 FROM generate_series(1, 300) n",
        model,
    )
    assert [len(parse_notification(p).ids) for p in await ear.heard()] == [300]


async def test_a_statement_that_inserts_nothing_or_is_rolled_back_says_nothing(
    world: World, ear: Ear
) -> None:
    model = await world.model()
    await world.sql.execute("INSERT INTO model_instances (name, model_id) SELECT 'x', 1 WHERE false")
    transaction = world.sql.transaction()
    await transaction.start()
    await world.instance(model)
    await transaction.rollback()
    assert await ear.heard() == []


@pytest.mark.parametrize("statement", [
    "UPDATE workers SET heartbeat_at = now()",
    "UPDATE workers SET heartbeat_at = now(), state = state, labels = labels, ram_total = ram_total",
    "UPDATE workers SET state_message = 'fine', hostname = 'h'",
    "UPDATE workers SET state = 'MAINTENANCE'",
    "UPDATE workers SET ram_total = ram_total - 1",
    "UPDATE workers SET vram_reserved = 5",
    "UPDATE gpu_devices SET vram_used = 7, vram_used_at = now()",
    "UPDATE gpu_devices SET schedulable = false",
    "UPDATE gpu_devices SET vram_total = vram_total - 1",
    "UPDATE models SET meta = '{}'",
    "UPDATE models SET replicas = NULL, scaling_schedule = NULL, roles = NULL",
    "DELETE FROM model_instances",
    "UPDATE models SET categories = categories",
    "UPDATE model_files SET state = 'ERROR'",
    "UPDATE model_instances SET state_message = 'x'",
    "INSERT INTO model_files (worker_id, source_index) SELECT id, 'other' FROM workers",
])  # fmt: skip
async def test_what_helps_nobody_wakes_nobody(world: World, ear: Ear, statement: str) -> None:
    worker, _ = await world.worker(GIB)
    await world.insert("model_files", worker_id=worker, source_index="a", state="READY")
    await world.instance()
    await ear.heard()
    await world.sql.execute(statement)
    assert await ear.heard() == []


@pytest.mark.parametrize(("statement", "kinds"), [
    ("UPDATE workers SET state = 'READY' WHERE state = 'NOT_READY'", ["capacity", "worker"]),
    ("UPDATE workers SET labels = '{\"zone\": \"b\"}'", ["worker"]),
    ("UPDATE workers SET cluster_id = NULL", ["worker"]),
    ("UPDATE workers SET cpu_arch = 'arm64'", ["worker"]),
    ("UPDATE workers SET ram_total = ram_total + 1", ["capacity"]),
    ("UPDATE workers SET vram_reserved = 0", ["capacity"]),
    ("UPDATE workers SET unified_memory = true", ["worker"]),
    ("UPDATE gpu_devices SET vram_total = vram_total + 1", ["capacity"]),
    ("UPDATE gpu_devices SET vram_total = 5 WHERE vram_total IS NULL", ["capacity"]),
    ("UPDATE gpu_devices SET schedulable = true", ["capacity"]),
    ("UPDATE gpu_devices SET compute_capability = '9.0'", ["worker"]),
    ("INSERT INTO workers (name) VALUES ('new'), ('newer')", ["worker"]),
    ("INSERT INTO gpu_devices (worker_id, index, type) SELECT id, 9, 'cuda' FROM workers", ["worker"]),
    ("DELETE FROM gpu_devices", ["deleted"]),
    ("DELETE FROM workers", ["deleted", "files"]),
    ("UPDATE model_files SET state = 'READY'", ["files"]),
    ("INSERT INTO model_files (worker_id, source_index, state) SELECT id, 'x', 'READY' FROM workers",
     ["files"]),
    ("DELETE FROM model_files", ["files"]),
    ("INSERT INTO inference_backends (name) VALUES ('vLLM')", ["backends"]),
    ("INSERT INTO instance_types (name) VALUES ('t')", ["backends"]),
    ("UPDATE clusters SET devices = '[]'", ["backends"]),
])  # fmt: skip
async def test_what_could_help_is_told_once_a_kind_however_many_rows(
    world: World, ear: Ear, statement: str, kinds: list[str]
) -> None:
    cluster = await world.insert("clusters", name="c")
    for n in range(3):
        worker, (gpu, _) = await world.worker(
            GIB, None, cluster_id=cluster, vram_reserved=9, state="NOT_READY" if n else "READY"
        )
        await world.update("gpu_devices", gpu, schedulable=False)
        await world.insert("model_files", worker_id=worker, source_index="a")
    await ear.heard()
    await world.sql.execute(statement)
    assert sorted(await ear.heard()) == kinds


async def test_an_edited_model_is_named(world: World, ear: Ear) -> None:
    model = await world.model()
    for change in (
        {"backend_parameters": ["-x"]},
        {"gpu_selector": {}},
        {"priority": 4},
        {"env": {"A": "1"}},
    ):
        await world.update("models", model, **change)
        assert await ear.heard() == [f"model {model}"]
    # where replicas share picked GPUs out, their number is an edit too
    await world.update("models", model, replicas=7)
    assert sorted(await ear.heard()) == [f"model {model}", f"replicas {model}"]


async def test_the_daemons_own_writes_wake_nobody(world: World, ear: Ear) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB, unified_memory=True)
    model = await world.model()
    ids = [await world.instance(model) for _ in range(3)]
    await ear.heard()
    first, second, third = await world.claims(*ids)
    await world.store.renew(world.owner, ids, 60)
    await world.commit(await world.proposal(first, await world.part(worker, gpus, GIB, GIB)))
    await world.commit(  # a clash
        await world.proposal(second, await world.part(worker, gpus, 90 * GIB))
    )
    await world.refuse(second)
    assert await world.store.autofill(model, 0, {"categories": ["llm"], "gpu_selector": {}})
    await world.expire(third.id)
    await world.store.expire_leases()
    assert await ear.heard() == []


async def test_a_shutdown_tells_the_others_what_it_hands_back(world: World, ear: Ear) -> None:
    ids = [await world.instance() for _ in range(2)]
    await world.claims(*ids)
    await ear.heard()
    await world.store.hand_back(world.owner)
    assert await ear.heard() == [f"created {ids[0]},{ids[1]}"]
    await world.store.hand_back(world.owner)
    assert await ear.heard() == []


async def test_capacity_that_is_given_back_is_told_once_a_transaction(world: World, ear: Ear) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB)
    for _ in range(5):
        await world.placed(await world.part(worker, gpus, GIB, GIB))
    await ear.heard()
    await world.sql.execute("DELETE FROM models")
    assert await ear.heard() == ["capacity"]


async def test_an_evicted_instance_is_told_as_a_new_one(world: World, ear: Ear) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    ids = [await world.placed(await world.part(worker, [gpu], GIB)) for _ in range(2)]
    await ear.heard()
    await world.delete("workers", worker)
    assert sorted(await ear.heard()) == [
        "capacity", *[f"created {i}" for i in ids], "deleted", "files",
    ]  # fmt: skip


async def test_a_marked_row_that_fits_again_is_told(world: World, ear: Ear) -> None:
    worker, (gpu,) = await world.worker(80 * GIB)
    await world.placed(await world.part(worker, [gpu], 60 * GIB))
    await world.update("gpu_devices", gpu, vram_total=10 * GIB)
    await ear.heard()
    await world.update("gpu_devices", gpu, vram_used=1)
    assert await ear.heard() == []
    await world.update("gpu_devices", gpu, vram_total=60 * GIB)
    assert await ear.heard() == ["capacity"]


def test_a_payload_that_nobody_understands_asks_for_a_full_look() -> None:
    assert parse_notification("created 1,two") == Wake("overflow")
