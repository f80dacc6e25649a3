"""`gpustackd plan` over a real database: k of n, what is left, exit codes, and that nothing is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from gpustackd.cli.plan import plan_documents
from gpustackd.errors import Refused
from gpustackd.settings import load
from gpustackd.store.documents.apply import apply_documents
from gpustackd.store.documents.reading import read_documents
from gpustackd.store.postgres.snapshot import IDLE, snapshot
from tests.acceptance.daemons import gpustackd
from tests.acceptance.machines import GIB, model_directory
from tests.hub import Hub
from tests.integration.world import connected
from tests.waiting import soon, until

pytestmark = pytest.mark.anyio

TABLES = (
    "clusters", "workers", "gpu_devices", "models", "model_instances", "instance_claims", "model_files",
    "scheduling_decisions",
)  # fmt: skip


def worker(name: str, cards: int = 2, size: int = 80, **more: Any) -> dict[str, Any]:
    gpus = [
        {"index": i, "type": "cuda", "vendor": "nvidia", "name": "H100", "vram_total": size * GIB}
        for i in range(cards)
    ]
    return {"kind": "Worker", "name": name, "state": "READY", "ram_total": 512 * GIB, "gpus": gpus, **more}


def model(name: str, path: Path, **more: Any) -> dict[str, Any]:
    return {
        "kind": "Model", "name": name, "source": "local_path", "local_path": str(path), "backend": "vLLM",
        "categories": ["llm"], **more,
    }  # fmt: skip


async def applied(url: str, documents: Sequence[dict[str, Any]]) -> None:
    sql = await connected(url)
    try:
        await apply_documents(sql, read_documents(json.dumps(list(documents)), "before"))
    finally:
        await sql.close()


async def plan(url: str, documents: Sequence[dict[str, Any]]) -> tuple[int, dict[str, Any], str]:
    """Exit code, the answer as data, and what a refusal says; every row is as it was afterwards."""
    sql = await asyncpg.connect(url)
    told: dict[str, Any] = {}
    said = ""
    try:
        before = [await sql.fetch(f"SELECT xmin::text, t::text FROM {t} t ORDER BY 2") for t in TABLES]
        try:
            told = await plan_documents(
                load(None, {"database_url": url}), url, [(json.dumps(list(documents)), "plan")]
            )
        except Refused as error:
            said = str(error)
        after = [await sql.fetch(f"SELECT xmin::text, t::text FROM {t} t ORDER BY 2") for t in TABLES]
        assert before == after
    finally:
        await sql.close()
    return (0 if told.get("fits") else 1), told, said


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model that takes one card of 80 GB."""
    return model_directory(tmp_path / "small", 40)


async def test_so_many_of_so_many_replicas_fit_and_the_rest_is_told_why(database: str, small: Path) -> None:
    await applied(database, [worker("w1")])
    code, told, _ = await plan(database, [model("m", small, replicas=3)])
    assert code == 1
    assert told["fits"] is False
    assert told["models"] == [
        {"name": "m", "new": True, "instances": 3, "placed": 2, "added": 3, "fits": False, "peak": None}
    ]
    assert [p["instance"] for p in told["placements"]] == ["m-1", "m-2"]
    assert {(p["worker"], *p["gpu_indexes"]) for p in told["placements"]} == {("w1", 0), ("w1", 1)}
    (left_out,) = told["unplaced"]
    assert left_out["instance"] == "m-3"
    assert "not enough free GPU memory" in left_out["message"]
    (kind,) = told["left"]["kinds"]
    assert (kind["gpus"], kind["untouched"], kind["free_bytes"]) == (2, 0, 2 * 8 * GIB)


async def test_what_fits_exits_with_nothing_wrong_and_is_drawn(database: str, small: Path) -> None:
    documents = [worker("w1"), model("m", small, replicas=2)]  # the worker is only in the file
    code, text, _ = await gpustackd(database, "plan", "-f", "-", said=json.dumps(documents).encode())
    assert code == 0
    assert "2 of 2" in text
    assert "w1" in text
    assert "everything fits; nothing was written" in text
    documents[1] |= {"replicas": 3}
    code, text, _ = await gpustackd(
        database, "plan", "-f", "-", "-o", "json", said=json.dumps(documents).encode()
    )
    assert code == 1
    assert json.loads(text)["models"][0]["placed"] == 2


async def test_replicas_beyond_those_that_are_there_take_the_lowest_free_ordinals(
    database: str, small: Path
) -> None:
    await applied(
        database,
        [
            worker("w1", 8),
            model("m", small),
            {"kind": "ModelInstance", "name": "m-2", "model": "m"},
            {"kind": "ModelInstance", "name": "mine", "model": "m"},
        ],
    )
    code, told, _ = await plan(database, [{"kind": "Model", "name": "m", "replicas": 4}])
    assert code == 0
    assert [(p["instance"], p["new"]) for p in told["placements"]] == [
        ("m-2", False), ("mine", False), ("m-1", True), ("m-3", True),
    ]  # fmt: skip
    assert told["models"][0]["instances"] == 4
    assert told["models"][0]["added"] == 2


async def test_a_number_that_no_daemon_brings_about_does_not_fit_and_takes_no_time(
    database: str, small: Path
) -> None:
    """Written by SQL, since `apply` refuses it; every daemon leaves it as it is."""
    _, _, said = await plan(database, [model("m", small, replicas=10**12)])
    assert "replicas: must be from 0 to 100000" in said
    await applied(database, [worker("w1"), model("m", small)])
    sql = await asyncpg.connect(database)
    try:
        await sql.execute("UPDATE models SET replicas = 1000000000000")
    finally:
        await sql.close()
    code, told, _ = await plan(database, [{"kind": "Model", "name": "m", "priority": 1}])
    assert code == 1
    assert told["placements"] == told["unplaced"] == []
    assert any("1000000000000 replicas; the limit of one model is 100000" in w for w in told["warnings"])


async def test_replicas_by_the_thousand_that_lack_the_same_are_told_together(
    database: str, small: Path
) -> None:
    await applied(database, [worker("w1")])
    documents = [model("m", small, replicas=3000)]
    code, text, _ = await gpustackd(database, "plan", "-f", "-", said=json.dumps(documents).encode())
    assert code == 1
    assert "m-3, m-4, m-5, m-6, m-7, m-8, m-9 … m-3000 (2998 instances) have no place:" in text
    assert "2 of 3000" in text
    assert text.count("not enough free GPU memory") == 1


async def test_documents_of_instances_are_tried_and_those_with_a_place_are_booked(
    database: str, small: Path
) -> None:
    running = {
        "kind": "ModelInstance", "name": "runs", "model": "m", "state": "RUNNING", "worker": "w1",
        "gpu_type": "cuda", "gpu_indexes": [0],
        "computed_resource_claim": {"vram": {"0": 72 * GIB}, "ram": 0},
    }  # fmt: skip
    documents = [
        worker("w1"), model("m", small), running, {"kind": "ModelInstance", "name": "waits", "model": "m"}
    ]  # fmt: skip
    code, told, _ = await plan(database, documents)
    assert code == 0
    (placed,) = told["placements"]
    assert (placed["instance"], placed["gpu_indexes"]) == ("waits", [1])
    assert told["models"][0]["placed"] == 2
    twice = [*documents, {**running, "name": "too-much"}]
    code, _, said = await plan(database, twice)
    assert code == 1
    assert "too-much" in said
    assert "does not fit where it says it is" in said


async def test_higher_priorities_come_first_and_others_that_wait_are_told_apart(
    database: str, small: Path
) -> None:
    await applied(
        database, [model("waiting", small), {"kind": "ModelInstance", "name": "w-1", "model": "waiting"}]
    )
    code, told, _ = await plan(
        database,
        [worker("w1"), model("low", small, replicas=1), model("high", small, replicas=1, priority=9)],
    )
    assert code == 1
    assert [p["instance"] for p in told["placements"]] == ["high-1"]
    assert [u["instance"] for u in told["unplaced"]] == ["low-1"]
    assert told["others"] == [{"instance": "w-1", "model": "waiting", "placed": True}]


async def test_the_peak_of_a_scaling_schedule_that_does_not_fit_is_warned_of(
    database: str, small: Path
) -> None:
    await applied(database, [worker("w1")])
    rules = [{"start_cron": "0 0 1 1 *", "duration_seconds": 60, "replicas": 5}]
    schedule = {"enabled": True, "baseline_replicas": 1, "rules": rules}
    code, told, _ = await plan(database, [model("m", small, replicas=1, scaling_schedule=schedule)])
    assert code == 0  # what would happen now does fit
    assert told["models"][0]["peak"] == {"replicas": 5, "placed": 2}
    assert any(
        "asks for 5 replicas at its peak, of which 2 would have a place" in w for w in told["warnings"]
    )
    (kind,) = told["left"]["kinds"]
    assert kind["untouched"] == 1  # the peak is given back


async def test_what_apply_would_refuse_is_refused(database: str, small: Path) -> None:
    code, _, said = await plan(database, [{"kind": "ModelInstance", "name": "i", "model": "nobody"}])
    assert code == 1
    assert "there is no Model nobody" in said
    code, _, said = await plan(database, [model("m", small, replicas=-1)])
    assert code == 1
    assert "replicas" in said


async def test_a_model_that_cannot_be_read_has_no_place_and_says_why(database: str, tmp_path: Path) -> None:
    await applied(database, [worker("w1")])
    code, told, _ = await plan(database, [model("m", tmp_path / "nowhere", replicas=1)])
    assert code == 1
    assert "could not be read" in told["unplaced"][0]["message"]


async def test_a_user_who_may_only_read_can_plan(database: str, small: Path) -> None:
    await applied(database, [worker("w1")])
    sql = await asyncpg.connect(database)
    try:
        name = await sql.fetchval("SELECT current_database()")
        await sql.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    finally:
        await sql.close()
    code, told, said = await plan(database, [model("m", small, replicas=1)])
    assert (code, said) == (0, "")
    assert told["fits"] is True


async def test_documents_that_ask_for_nothing_are_told_so(database: str) -> None:
    code, text, _ = await gpustackd(database, "plan", "-f", "-", said=b"# nothing\n")
    assert code == 0
    assert "The documents ask for no instances." in text


async def test_the_database_is_let_go_while_a_hub_takes_its_time(database: str) -> None:
    """A transaction that lies idle for long is ended by the server, and with it the plan."""
    wanted = {
        "kind": "Model", "name": "m", "source": "huggingface", "huggingface_repo_id": "a/m", "replicas": 1,
    }  # fmt: skip
    told: list[dict[str, Any]] = []
    sql = await asyncpg.connect(database)
    try:
        async with Hub() as hub, anyio.create_task_group() as tasks:
            go = hub.hold("/")

            async def ask() -> None:
                settings = load(None, {"database_url": database, "hf_endpoint": hub.url})
                told.append(await plan_documents(settings, database, [(json.dumps([wanted]), "plan")]))

            tasks.start_soon(ask)
            await soon(hub.arrived.wait(), "the hub is asked")
            none = (
                "SELECT count(*) = 0 FROM pg_stat_activity"
                " WHERE application_name = 'gpustackd plan' AND datname = current_database()"
            )
            await until(lambda: sql.fetchval(none), "the plan has no session")
            assert not told
            go.set()
    finally:
        await sql.close()
    (answered,) = told
    assert answered["unplaced"][0]["instance"] == "m-1"


async def test_a_snapshot_may_lie_idle_for_longer_than_other_sessions(database: str) -> None:
    async with snapshot(database, "gpustackd test") as (_, connection):
        idle = await connection.fetchval("SHOW idle_in_transaction_session_timeout")
    assert idle == IDLE
