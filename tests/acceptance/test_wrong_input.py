"""Wrong input against running daemons: a clear message, and nobody else is disturbed.

Two daemons and a bystander live through all tests of this file; each test works in a cluster of its own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from tests.acceptance.daemons import Crew, crew, gpustackd, within
from tests.acceptance.machines import GIB, Site, W, model_directory, site_on
from tests.acceptance.record import Record
from tests.conftest import Server, fresh_database
from tests.waiting import until

pytestmark = pytest.mark.anyio

MIB = 2**20
_numbers = count(1)


@dataclass
class Town:
    """A cluster with what happens around it. `user` is another user's session."""

    site: Site
    user: Site
    record: Record
    daemons: Crew
    path: str
    cluster: int

    async def worker(self, ram: float = 64, gpus: str = "1x24", name: str = "", **more: Any) -> int:
        name = name or f"t{next(_numbers)}"
        indexes = more.pop("indexes", None)
        return await self.site.worker(W(name, ram, gpus), indexes=indexes, cluster_id=self.cluster, **more)

    async def model(self, **columns: Any) -> int:
        return await self.site.model(
            **{"source": "local_path", "local_path": self.path, "cluster_id": self.cluster, **columns}
        )


@pytest.fixture(scope="module")
def town_database(postgres_server: Server) -> Iterator[str]:
    with fresh_database(postgres_server, postgres_server.migrated_template()) as url:
        yield url


@pytest.fixture(scope="module")
async def whole_town(
    town_database: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncIterator[tuple[Town, list[int]]]:
    folder = tmp_path_factory.mktemp("town")
    path = model_directory(folder / "model", need=14)
    async with (
        site_on(town_database, folder / "models") as site,
        site_on(town_database, folder / "models") as user,
    ):
        record = await Record.install(site.sql)
        bystander = await site.insert("clusters", name="bystanders")
        await site.worker(W("bystander", 64, "2x24"), cluster_id=bystander)
        model = await site.model(source="local_path", local_path=str(path), cluster_id=bystander)
        async with crew(site.url, folder / "logs", lease=30, rescan_interval=600) as daemons:
            await daemons.start(2)
            ids = await site.instances(model, 2)
            await site.placed(ids)
            yield Town(site, user, record, daemons, str(path), bystander), ids


@pytest.fixture
async def town(whole_town: tuple[Town, list[int]]) -> AsyncIterator[Town]:
    """A fresh cluster; afterwards the bystander's rows are untouched and every daemon works on."""
    found, bystanders = whole_town
    where = "SELECT id, xmin::text, ctid::text FROM model_instances WHERE id = ANY ($1) ORDER BY id"
    before = await found.site.sql.fetch(where, bystanders)
    cluster = await found.site.insert("clusters", name=f"c{next(_numbers)}")
    yield Town(found.site, found.user, found.record, found.daemons, found.path, cluster)
    assert await found.site.sql.fetch(where, bystanders) == before
    assert all(d.running for d in found.daemons.all)
    await found.site.clean()
    assert await found.record.broken() == []


# -- refused by the database, with its words -----------------------------------------------------------------


async def test_an_instance_of_an_unknown_model_is_refused(town: Town) -> None:
    with pytest.raises(asyncpg.ForeignKeyViolationError, match=r"model_id.*999999.*models"):
        await town.site.sql.execute("INSERT INTO model_instances (name, model_id) VALUES ('lost', 999999)")


@pytest.mark.parametrize(
    ("document", "said"),
    [
        pytest.param(
            {"kind": "ModelInstance", "name": "x", "model": "nosuch"}, ("nosuch", "model"), id="unknown model"
        ),
        pytest.param({"kind": "Worker", "name": "x", "ram_total": -1}, ("ram_total", "x"), id="negative"),
        pytest.param({"kind": "Worker", "name": "x", "colour": 1}, ("colour", "x"), id="unknown field"),
    ],
)
async def test_apply_names_what_is_wrong_and_writes_nothing(
    town: Town, tmp_path: Path, document: dict[str, Any], said: tuple[str, ...]
) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(f"kind: Cluster\nname: never\n---\n{json.dumps(document)}\n")
    code, _, err = await gpustackd(town.site.url, "apply", "-f", str(file))
    assert code == 1
    assert all(word in err for word in said), err
    assert "Traceback" not in err
    assert not await town.site.sql.fetchval("SELECT count(*) FROM clusters WHERE name = 'never'")


async def test_names_are_unique(town: Town) -> None:
    model = await town.model(name=f"twice{next(_numbers)}")
    host = await town.worker(name=f"twice{next(_numbers)}")
    (instance,) = await town.site.instances(model)
    for table, id_ in (("models", model), ("workers", host), ("model_instances", instance)):
        row = await town.site.row(table, id_)
        same = {"name": row["name"]} | ({"model_id": model} if table == "model_instances" else {})
        with pytest.raises(asyncpg.UniqueViolationError, match="name"):
            await town.site.insert(table, **same)
    with pytest.raises(asyncpg.UniqueViolationError, match="worker_id, type, index"):
        await town.site.insert("gpu_devices", worker_id=host, index=0, type="cuda", vram_total=GIB)
    await town.site.placed([instance])


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("workers", "ram_total"),
        ("workers", "ram_reserved"),
        ("workers", "vram_reserved"),
        ("gpu_devices", "vram_total"),
        ("gpu_devices", "vram_used"),
        ("models", "replicas"),
        ("model_files", "size"),
    ],
)
async def test_negative_sizes_are_refused_by_a_check_that_says_so(
    town: Town, table: str, column: str
) -> None:
    host = await town.worker()
    base: dict[str, Any] = {
        "workers": {"name": f"n{next(_numbers)}"},
        "gpu_devices": {"worker_id": host, "index": 9, "type": "cuda"},
        "models": {"name": f"n{next(_numbers)}"},
        "model_files": {"worker_id": host, "source_index": "x"},
    }
    with pytest.raises(asyncpg.CheckViolationError, match="not_negative"):
        await town.site.insert(table, **base[table], **{column: -1})


async def test_an_instance_cannot_be_inserted_with_a_place_or_in_another_state(town: Town) -> None:
    model, host = await town.model(), await town.worker()
    for extra in ({"state": "RUNNING"}, {"worker_id": host}, {"state": "SCHEDULED", "worker_id": host}):
        with pytest.raises(asyncpg.CheckViolationError) as caught:
            await town.site.insert("model_instances", name=f"n{next(_numbers)}", model_id=model, **extra)
        assert "gpustackd apply" in str(caught.value.hint)


@pytest.mark.parametrize(
    "table",
    [
        "clusters", "workers", "gpu_devices", "models", "model_instances", "instance_claims", "model_files",
        "inference_backends", "instance_types", "scheduling_decisions",
    ],
)  # fmt: skip
async def test_truncate_is_refused_with_the_way_to_go(town: Town, table: str) -> None:
    with pytest.raises(asyncpg.FeatureNotSupportedError, match="TRUNCATE") as caught:
        await town.site.sql.execute(f"TRUNCATE {table} CASCADE")
    assert "DELETE" in str(caught.value.hint)


# -- taken, and answered by the scheduler --------------------------------------------------------------------


async def test_a_model_of_another_cluster_waits_and_is_told_so(town: Town) -> None:
    await town.worker()
    elsewhere = await town.site.insert("clusters", name=f"c{next(_numbers)}")
    (id_,) = await town.site.instances(await town.model(cluster_id=elsewhere))
    (row,) = await town.site.refused([id_], timeout=within(5))
    assert "cluster" in row["state_message"]
    assert any("cluster" in r["code"] for r in row["reasons"])


async def test_a_gpu_of_unknown_memory_is_passed_over_until_it_is_known(town: Town) -> None:
    host = await town.worker(gpus="")
    card = await town.site.insert("gpu_devices", worker_id=host, index=0, type="cuda")
    (id_,) = await town.site.instances(await town.model())
    (row,) = await town.site.refused([id_], timeout=within(5))
    assert "unknown memory" in row["state_message"]
    await town.site.update("gpu_devices", card, vram_total=24 * GIB)
    (row,) = await town.site.placed([id_], timeout=within(5))
    assert row["gpu_indexes"] == [0]


async def test_gaps_in_gpu_indexes_are_no_matter(town: Town) -> None:
    await town.worker(ram=256, gpus="3x24", indexes=[0, 3, 7])
    wide, single = await town.model(backend_parameters=["--tensor-parallel-size=2"]), await town.model()
    (two,) = await town.site.placed(await town.site.instances(wide), timeout=within(5))
    (one,) = await town.site.placed(await town.site.instances(single), timeout=within(5))
    assert sorted(two["gpu_indexes"] + one["gpu_indexes"]) == [0, 3, 7]
    assert set(two["computed_resource_claim"]["vram"]) == {str(i) for i in two["gpu_indexes"]}


async def test_a_megabyte_of_labels_is_carried_and_an_answer_stays_short(town: Town) -> None:
    labels = {f"key-{n}": "v" * 90 for n in range(10_000)}
    assert len(json.dumps(labels)) > MIB
    await town.worker(labels=labels)
    fits = await town.model(worker_selector={"key-9999": "v" * 90})
    (id_,) = await town.site.instances(fits)
    await town.site.placed([id_], timeout=within(5))
    (id_,) = await town.site.instances(await town.model(worker_selector=labels | {"key-0": "other"}))
    (row,) = await town.site.refused([id_], timeout=within(5))
    assert len(row["state_message"].encode()) < 4096
    assert len(json.dumps(row["reasons"]).encode()) < 64 * 1024


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("backend_parameters", {"not": "a list"}),
        ("backend_parameters", ["--tensor-parallel-size=0"]),
        ("backend_parameters", ["--gpu-memory-utilization=7"]),
        ("env", ["not", "a", "map"]),
        ("categories", "llm"),
        ("lora_list", ["not an object"]),
        ("gpu_selector", {"gpu_ids": ["nonsense"]}),
        ("gpu_selector", {"gpu_ids": [{"a": 1}], "gpus_per_replica": "two"}),
        ("worker_selector", {"terms": [{"key": "a", "operator": "Nearby", "values": ["b"]}]}),
        ("local_path", "relative/path"),
        ("local_path", "/proc/self/mem"),
    ],
)
async def test_a_model_that_asks_nonsense_waits_with_a_reason_that_names_it(
    town: Town, column: str, value: Any
) -> None:
    await town.worker()
    good = await town.site.instances(await town.model())
    model = await town.model(**{column: value})
    (bad,) = await town.site.instances(model)
    (row,) = await town.site.refused([bad], timeout=within(5))
    assert column in row["state_message"], row["state_message"]
    await town.site.placed(good, timeout=within(5))


# -- changed under the scheduler's hands ---------------------------------------------------------------------


async def caught_in_the_act(town: Town, model: int, host: int) -> int:
    """Insert an instance and hold its commit up: the daemon has chosen `host` and waits for a lock that this
    session's open transaction holds on the GPUs there. The instance's id."""
    await town.site.sql.execute("SELECT 1 FROM gpu_devices WHERE worker_id = $1 FOR UPDATE", host)
    (id_,) = await town.user.instances(model)
    await town.user.commit_waits(await town.site.sql.fetchval("SELECT pg_backend_pid()"))
    return id_


CHANGES = {
    "maintenance": "UPDATE workers SET state = 'MAINTENANCE' WHERE id = $1",
    "cordoned": "UPDATE gpu_devices SET schedulable = false WHERE worker_id = $1",
    "deleted": "DELETE FROM workers WHERE id = $1",
    "shrunk": f"UPDATE gpu_devices SET vram_total = {8 * GIB} WHERE worker_id = $1",
    "reserved": f"UPDATE workers SET vram_reserved = {20 * GIB} WHERE id = $1",
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_worker_that_is_lost_while_it_is_being_chosen_is_not_taken(town: Town, change: str) -> None:
    host, model = await town.worker(), await town.model()
    async with town.site.sql.transaction():
        id_ = await caught_in_the_act(town, model, host)
        await town.site.sql.execute(CHANGES[change], host)
        await town.worker(name=f"rescue-{change}")
    (row,) = await town.site.placed([id_], timeout=within(5))
    assert row["worker_name"] == f"rescue-{change}"


async def test_a_model_edited_while_it_is_being_placed_is_placed_as_it_is_now(town: Town) -> None:
    host, model = await town.worker(), await town.model()
    async with town.site.sql.transaction():
        id_ = await caught_in_the_act(town, model, host)
        await town.site.update("models", model, worker_selector={"zone": "b"})
        await town.worker(name="zone-b", labels={"zone": "b"})
    (row,) = await town.site.placed([id_], timeout=within(5))
    assert row["worker_name"] == "zone-b"


async def test_an_instance_deleted_while_it_is_being_placed_leaves_nothing(town: Town) -> None:
    host, model = await town.worker(), await town.model()
    user = await town.user.sql.fetchval("SELECT pg_backend_pid()")
    for _ in range(5):
        gone = anyio.Event()

        async def delete(id_: int, gone: anyio.Event = gone) -> None:
            await town.user.delete("model_instances", id_)
            gone.set()

        async def under_way(gone: anyio.Event = gone) -> bool:
            waits = "SELECT cardinality(pg_blocking_pids($1)) > 0"
            return gone.is_set() or await town.site.sql.fetchval(waits, user)

        async with anyio.create_task_group() as tasks, town.site.sql.transaction():
            id_ = await caught_in_the_act(town, model, host)
            tasks.start_soon(delete, id_)
            await until(under_way, "the DELETE is done, or waits for the commit")
        assert not await town.site.sql.fetchval(
            "SELECT count(*) FROM instance_claims WHERE instance_id = $1", id_
        )
        assert not await town.site.rows([id_])
    (row,) = await town.site.placed(await town.site.instances(model), timeout=within(5))
    assert row["worker_id"] == host


async def test_models_deleted_against_running_commits_go_without_a_deadlock_and_free_everything(
    town: Town,
) -> None:
    await town.worker(ram=512, gpus="8x24")
    small = {"GPUSTACK_MODEL_VRAM_CLAIM": str(3 * GIB)}
    placed = 0
    for n in range(12):
        models = [
            await town.model(env=small, backend_parameters=["--gpu-memory-utilization=0.15"], priority=k)
            for k in range(4)
        ]
        for model in models:
            await town.site.instances(model, 20)
        await town.site.until(
            "SELECT count(*) > $2 FROM model_instances WHERE model_id = ANY ($1) AND worker_id IS NOT NULL",
            models,
            n * 2,
            timeout=within(5),
        )
        placed += await town.site.sql.fetchval(
            "WITH gone AS (DELETE FROM models WHERE cluster_id = $1 RETURNING id) SELECT count(*)"
            " FROM model_instances WHERE worker_id IS NOT NULL AND model_id IN (SELECT id FROM gone)",
            town.cluster,
        )
    assert placed > 0
    assert (
        await town.site.sql.fetchval(
            "SELECT sum(vram_allocated) FROM gpu_devices g JOIN workers w ON w.id = g.worker_id"
            " WHERE w.cluster_id = $1",
            town.cluster,
        )
        == 0
    )
