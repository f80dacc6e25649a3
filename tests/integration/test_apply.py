"""`gpustackd apply` against PostgreSQL: rows by name, one transaction a file, running instances adopted."""

from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from gpustackd.demo.models.examples import folder
from gpustackd.errors import Refused
from gpustackd.store.audit.audit import audit
from gpustackd.store.documents.apply import Applied, apply_documents
from gpustackd.store.documents.reading import read_documents
from gpustackd.store.postgres.connect import Connection, connected

pytestmark = pytest.mark.anyio

GIB = 2**30

FLEET = """
kind: Cluster
name: lab
---
kind: Worker
name: w1
cluster: lab
state: READY
labels: {zone: a}
ram_total: 64GiB
ram_reserved: 4GiB
vram_reserved: 1GiB
gpus:
- {type: cuda, index: 0, vram_total: 24GiB}
- {type: cuda, index: 1, vram_total: 24GiB}
---
kind: Worker
name: w2
state: READY
ram_total: 64GiB
gpus: [{type: cuda, index: 0, vram_total: 48GiB}, {type: cuda, index: 1, vram_total: 48GiB}]
---
kind: Worker
name: pool
state: READY
unified_memory: true
ram_total: 128GiB
gpus: [{type: cuda, index: 0, vram_total: 128GiB}]
---
kind: Model
name: m
source: local_path
local_path: /models/m
"""

RUNNING = """
kind: ModelInstance
name: i1
model: m
state: RUNNING
worker: w1
gpu_type: cuda
gpu_indexes: [0, 1]
computed_resource_claim: {vram: {0: 20GiB, 1: 20GiB}, ram: 2GiB, vram_utilization: 0.9}
"""


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    async with connected(database, "test apply") as made:
        yield made


async def apply(connection: Connection, text: str) -> list[Applied]:
    return await apply_documents(connection, read_documents(text, "x.yaml"))


async def actions(connection: Connection, text: str) -> list[str]:
    return [a.action for a in await apply(connection, text)]


async def refusal(connection: Connection, text: str) -> str:
    with pytest.raises(Refused) as caught:
        await apply(connection, text)
    return str(caught.value)


async def one(connection: Connection, sql: str, *arguments: Any) -> Any:
    return await connection.fetchval(sql, *arguments)


async def instance(connection: Connection, name: str) -> dict[str, Any]:
    return dict(await connection.fetchrow("SELECT * FROM model_instances WHERE name = $1", name))


async def allocated(connection: Connection) -> dict[str, int]:
    """GiB booked by `worker:index`, those of nothing left out."""
    rows = await connection.fetch(
        "SELECT w.name || ':' || g.index AS card, g.vram_allocated AS n FROM gpu_devices g"
        " JOIN workers w ON w.id = g.worker_id WHERE g.vram_allocated > 0"
        " UNION ALL SELECT name, ram_allocated FROM workers WHERE ram_allocated > 0"
    )
    return {r["card"]: r["n"] // GIB for r in rows}


async def assert_clean(connection: Connection) -> None:
    assert (await audit(connection)).breaches == ()


async def test_what_is_new_is_created_and_what_is_the_same_is_left_alone(connection: Connection) -> None:
    assert await actions(connection, FLEET) == ["created"] * 5
    before = await one(connection, "SELECT sum(version) FROM workers")
    assert await actions(connection, FLEET) == ["unchanged"] * 5
    assert await one(connection, "SELECT sum(version) FROM workers") == before
    assert await one(connection, "SELECT count(*) FROM gpu_devices WHERE open") == 5


async def test_only_the_fields_of_the_document_are_changed(connection: Connection) -> None:
    await apply(connection, FLEET)
    assert await actions(connection, "kind: Worker\nname: w1\nstate: MAINTENANCE") == ["updated"]
    row = dict(await connection.fetchrow("SELECT * FROM workers WHERE name = 'w1'"))
    assert (row["state"], row["labels"], row["ram_total"]) == ("MAINTENANCE", {"zone": "a"}, 64 * GIB)
    assert await one(connection, "SELECT count(*) FROM gpu_devices WHERE open") == 3


async def test_null_gives_a_column_its_default_back(connection: Connection) -> None:
    await apply(connection, FLEET)
    text = "kind: Worker\nname: w1\nstate: null\nlabels: null\nvram_reserved: null\ncluster: null"
    assert await actions(connection, text) == ["updated"]
    row = dict(await connection.fetchrow("SELECT * FROM workers WHERE name = 'w1'"))
    wanted = ("NOT_READY", None, 0, None)
    assert (row["state"], row["labels"], row["vram_reserved"], row["cluster_id"]) == wanted


async def test_a_file_may_name_what_comes_later_in_it(connection: Connection) -> None:
    documents = FLEET.split("---\n")
    text = "---\n".join(["kind: ModelInstance\nname: p\nmodel: m\n", *reversed(documents)])
    found = await apply(connection, text)
    assert [a.kind for a in found] == ["ModelInstance", "Model", "Worker", "Worker", "Worker", "Cluster"]
    assert {a.action for a in found} == {"created"}
    assert (await instance(connection, "p"))["state"] == "PENDING"


async def test_a_name_that_nothing_has_refuses_the_whole_file(connection: Connection) -> None:
    said = await refusal(connection, "kind: Cluster\nname: c\n---\nkind: Worker\nname: w\ncluster: nowhere\n")
    assert "x.yaml, document 2 (Worker w), cluster: there is no Cluster nowhere" in said
    assert await one(connection, "SELECT count(*) FROM clusters") == 0


async def test_a_rule_of_the_schema_is_told_in_terms_of_the_document(connection: Connection) -> None:
    await apply(connection, FLEET + "---" + RUNNING)
    said = await refusal(connection, "kind: ModelInstance\nname: i1\nmodel: m\nstate: SCHEDULED")
    assert "document 1 (ModelInstance i1): instance i1 cannot go from RUNNING to SCHEDULED" in said
    said = await refusal(connection, "kind: Worker\nname: w9\ncluster_id: 4711")
    assert "document 1 (Worker w9): Key (cluster_id)=(4711) is not present" in said


async def test_gpus_that_are_not_listed_go_and_their_instances_wait_again(connection: Connection) -> None:
    await apply(connection, FLEET + "---" + RUNNING)
    (done,) = await apply(
        connection, "kind: Worker\nname: w1\ngpus: [{type: cuda, index: 1, vram_total: 25GiB, name: L4}]"
    )
    assert (done.action, done.note) == (
        "updated",
        "1 GPU changed, 1 GPU removed, 1 instance sent back to PENDING",
    )
    row = await instance(connection, "i1")
    assert (row["state"], row["worker_id"], row["gpu_indexes"]) == ("PENDING", None, None)
    assert await allocated(connection) == {}
    await assert_clean(connection)


async def test_a_worker_without_gpus_keeps_those_it_has(connection: Connection) -> None:
    await apply(connection, FLEET)
    await apply(connection, "kind: Worker\nname: w1\nip: 10.0.0.1")
    assert await one(connection, "SELECT count(*) FROM gpu_devices") == 5
    await apply(connection, "kind: Worker\nname: w1\ngpus: []")
    assert await one(connection, "SELECT count(*) FROM gpu_devices") == 3


async def test_a_running_instance_is_taken_over_with_all_that_it_holds(connection: Connection) -> None:
    await apply(connection, FLEET)
    (done,) = await apply(connection, RUNNING)
    assert (done.action, done.note) == ("adopted", "on w1")
    row = await instance(connection, "i1")
    assert (row["state"], row["worker_name"], row["gpu_indexes"]) == ("RUNNING", "w1", [0, 1])
    assert row["computed_resource_claim"]["vram"] == {"0": 20 * GIB, "1": 20 * GIB}
    assert row["computed_resource_claim"]["vram_utilization"] == 0.9
    assert await allocated(connection) == {"w1:0": 20, "w1:1": 20, "w1": 2}
    await assert_clean(connection)


async def test_every_part_of_a_distributed_instance_is_booked(connection: Connection) -> None:
    await apply(connection, FLEET)
    await apply(
        connection,
        RUNNING
        + """
distributed_servers:
  mode: initialize_later
  subordinate_workers:
  - worker: w2
    gpu_type: cuda
    gpu_indexes: [1]
    computed_resource_claim: {vram: {1: 40GiB}, ram: 3GiB}
  - worker_name: pool
    gpu_type: cuda
    gpu_indexes: [0]
    computed_resource_claim: {vram: {0: 50GiB}, ram: 1GiB}
""",
    )
    assert await allocated(connection) == {
        "w1:0": 20, "w1:1": 20, "w1": 2, "w2:1": 40, "w2": 3, "pool:0": 50, "pool": 51,
    }  # fmt: skip
    servers = (await instance(connection, "i1"))["distributed_servers"]
    assert [s["worker_name"] for s in servers["subordinate_workers"]] == ["w2", "pool"]
    parts = await connection.fetch("SELECT part, count(*) AS n FROM instance_claims GROUP BY 1 ORDER BY 1")
    assert [tuple(p) for p in parts] == [("main", 3), ("subordinate", 4)]
    await assert_clean(connection)


async def test_applying_it_again_changes_nothing(connection: Connection) -> None:
    await apply(connection, FLEET)
    await apply(connection, RUNNING)
    before = await instance(connection, "i1")
    assert await actions(connection, RUNNING) == ["unchanged"]
    assert await instance(connection, "i1") == before


async def test_what_does_not_fit_is_refused_with_the_card_and_the_bytes(connection: Connection) -> None:
    await apply(connection, FLEET + "---" + RUNNING)
    rival = RUNNING.replace("i1", "i2").replace("[0, 1]", "[1]").replace("{0: 20GiB, 1: 20GiB}", "{1: 4GiB}")
    said = await refusal(connection, "kind: Cluster\nname: extra\n---" + rival)
    assert "document 2 (ModelInstance i2), computed_resource_claim: it does not fit on w1:cuda:1" in said
    assert f"{4 * GIB} bytes are needed, {3 * GIB} of {23 * GIB} are free" in said
    assert await one(connection, "SELECT count(*) FROM clusters WHERE name = 'extra'") == 0
    assert await one(connection, "SELECT count(*) FROM model_instances") == 1
    await assert_clean(connection)


async def test_ram_that_is_not_there_refuses_as_well(connection: Connection) -> None:
    await apply(connection, FLEET)
    said = await refusal(connection, RUNNING.replace("ram: 2GiB", "ram: 61GiB"))
    assert f"does not fit into the RAM of worker w1: {61 * GIB} bytes are needed, {60 * GIB}" in said
    pooled = (
        RUNNING.replace("w1", "pool").replace("[0, 1]", "[0]").replace("{0: 20GiB, 1: 20GiB}", "{0: 100GiB}")
    )
    said = await refusal(connection, pooled.replace("ram: 2GiB", "ram: 29GiB"))
    assert f"RAM of worker pool: {129 * GIB} bytes are needed, {128 * GIB} of" in said


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("worker: w1", "worker: w7"), "worker: there is no worker w7"),
        (("worker: w1\n", ""), "worker: is missing, while other fields of a placement are there"),
        (("[0, 1]", "[0, 2]"), "gpu_indexes: are [0, 2], but computed_resource_claim.vram is for [0, 1]"),
        (("gpu_type: cuda", "gpu_type: rocm"), "worker w1 has no rocm GPU 0 (it has none)"),
        (("gpu_type: cuda\n", ""), "gpu_type: is missing"),
        (("state: RUNNING", "state: PENDING"), "state: must be one of"),
        (("1: 20GiB}", "1: -3}"), "computed_resource_claim.vram: must map GPU indexes to bytes"),
        (("computed_resource_claim:", "x-claim:"), "computed_resource_claim: is missing"),
    ],
)
async def test_half_a_placement_is_refused_with_what_is_wrong(
    connection: Connection, change: tuple[str, str], expected: str
) -> None:
    await apply(connection, FLEET)
    said = await refusal(connection, RUNNING.replace(*change))
    assert "document 1 (ModelInstance i1)" in said
    assert expected in said
    assert await one(connection, "SELECT count(*) FROM model_instances") == 0


async def test_a_worker_that_is_not_ready_takes_nobody_over(connection: Connection) -> None:
    await apply(connection, FLEET)
    await apply(connection, "kind: Worker\nname: w1\nstate: MAINTENANCE")
    assert "w1:cuda:0: its worker is MAINTENANCE" in await refusal(
        connection, RUNNING.replace("ram: 2GiB", "ram: 0")
    )
    assert "worker w1 is MAINTENANCE" in await refusal(connection, RUNNING)


async def test_other_cards_are_booked_by_the_same_commit_and_the_old_ones_given_back(
    connection: Connection,
) -> None:
    await apply(connection, FLEET + "---" + RUNNING)
    epoch = (await instance(connection, "i1"))["placement_epoch"]
    moved = RUNNING.replace("[0, 1]", "[1]").replace("{0: 20GiB, 1: 20GiB}", "{1: 22GiB}")
    assert await actions(connection, moved) == ["moved"]
    row = await instance(connection, "i1")
    assert (row["state"], row["gpu_indexes"]) == ("RUNNING", [1])
    assert row["placement_epoch"] > epoch
    assert await allocated(connection) == {"w1:1": 22, "w1": 2}
    too_much = moved.replace("22GiB", "24GiB")
    await refusal(connection, too_much)
    assert await allocated(connection) == {"w1:1": 22, "w1": 2}
    await assert_clean(connection)


async def test_an_instance_that_somebody_analyzes_is_taken_from_them(connection: Connection) -> None:
    await apply(connection, FLEET + "---\nkind: ModelInstance\nname: i1\nmodel: m")
    row = await instance(connection, "i1")
    owner = "00000000-0000-0000-0000-000000000001"
    claimed = await connection.fetch(
        "SELECT * FROM gpustackd_claim($1, $2, $3, $4)", owner, [row["id"]], [row["placement_epoch"]], 60.0
    )
    assert [c["epoch"] for c in claimed] == [1]
    assert await actions(connection, RUNNING) == ["adopted"]
    row = await instance(connection, "i1")
    assert (row["state"], row["lease_owner"]) == ("RUNNING", None)
    assert row["placement_epoch"] > 1  # whatever they decide comes too late
    await assert_clean(connection)


async def test_a_failed_instance_may_hold_its_place(connection: Connection) -> None:
    await apply(connection, FLEET)
    assert await actions(connection, RUNNING.replace("RUNNING", "ERROR")) == ["adopted"]
    assert (await instance(connection, "i1"))["state"] == "ERROR"
    assert await allocated(connection) == {"w1:0": 20, "w1:1": 20, "w1": 2}
    await assert_clean(connection)


async def test_an_instance_keeps_its_model(connection: Connection) -> None:
    await apply(connection, FLEET + "---" + RUNNING + "---\nkind: Model\nname: other")
    said = await refusal(connection, "kind: ModelInstance\nname: i1\nmodel: other")
    assert "model: an instance keeps its model" in said


async def test_a_new_instance_that_runs_must_say_where(connection: Connection) -> None:
    await apply(connection, FLEET)
    said = await refusal(connection, "kind: ModelInstance\nname: i1\nmodel: m\nstate: RUNNING")
    assert "state: a new instance in state RUNNING must name its place" in said


async def test_a_model_file_goes_by_the_model_it_belongs_to(connection: Connection) -> None:
    await apply(connection, FLEET)
    text = "kind: ModelFile\nworker: w1\nmodel: m\nsize: 5GiB\nstate: READY"
    assert await actions(connection, text) == ["created"]
    assert await actions(connection, text) == ["unchanged"]
    assert await actions(connection, text.replace("5GiB", "6GiB")) == ["updated"]
    row = await connection.fetchrow("SELECT * FROM model_files")
    from hashlib import sha256

    assert row["source_index"] == sha256(b"/models/m").hexdigest()


async def test_two_that_apply_the_same_file_at_once_both_succeed(database: str) -> None:
    found: list[list[Applied]] = []

    async def run() -> None:
        async with connected(database, "test apply") as connection:
            found.append(await apply(connection, FLEET + "---" + RUNNING))

    for _ in range(3):
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(run)
    assert len(found) == 12
    by_document = list(zip(*([a.action for a in f] for f in found), strict=True))
    assert all(
        sorted(set(done)) in (["created", "unchanged"], ["adopted", "unchanged"]) for done in by_document
    )
    assert [done.count("unchanged") for done in by_document] == [11] * 6
    async with connected(database, "test apply") as connection:
        await assert_clean(connection)


async def test_the_example_fleet_and_models_apply(connection: Connection) -> None:
    for name in ("fleet.yaml", "models.yaml"):
        text = (folder() / name).read_text()
        assert {a.action for a in await apply(connection, text)} == {"created"}
        assert {a.action for a in await apply(connection, text)} == {"unchanged"}
    assert await one(connection, "SELECT count(*) FROM gpu_devices WHERE open") == 45
