"""Paths that only workers have (estimate spec sections 2.2 and 6.3): the first good answer counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.access import ReaderOptions
from gpustackd.sources.reader import Reader
from gpustackd.sources.worker_files import Hosts, WorkerFiles, WorkerHost, hosts_of
from tests.specs import a_model, known_models
from tests.worker_api import WorkerApi

pytestmark = pytest.mark.anyio
CONFIG = known_models()["Qwen/Qwen2.5-0.5B-Instruct"]["hf_config"]
PATH = "/mnt/models/foo"
FILES = {f"{PATH}/config.json": CONFIG, PATH: 988_097_824}


def spec(**columns: Any) -> Any:
    return a_model(source="local_path", local_path=PATH, **columns)


async def test_facts_come_from_workers_where_this_host_does_not_have_the_path() -> None:
    async with WorkerApi({"w1": {}, "w2": FILES}, token="secret") as api:
        options = ReaderOptions(worker_token="secret")
        async with Reader(options, hosts=lambda _: api.hosts()) as reader:
            facts = await reader.facts(spec())
            assert (facts.weight_bytes, facts.categories) == (988_097_824, ("llm",))
            assert facts.hyper is not None
            assert facts.hyper.num_attention_heads == 14
            assert reader.cached(spec()) is facts
        assert ("w2", f"{PATH}/config.json") in api.asked
        assert ("w2", PATH) in api.asked


async def test_a_directory_that_is_empty_here_is_asked_of_the_workers(tmp_path: Path) -> None:
    files = {f"{tmp_path}/config.json": CONFIG, str(tmp_path): 4096}
    asked = a_model(source="local_path", local_path=str(tmp_path))
    async with WorkerApi({"w1": files}) as api, Reader(hosts=lambda _: api.hosts()) as reader:
        assert (await reader.facts(asked)).weight_bytes == 4096
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable, match="is empty on this host"):
            await reader.facts(asked)


async def test_a_pipeline_on_workers_is_an_image_model() -> None:
    files = {f"{PATH}/model_index.json": {"_diffusers_version": "0.35"}, PATH: 57_699_249_390}
    async with WorkerApi({"w1": files}) as api, Reader(hosts=lambda _: api.hosts()) as reader:
        facts = await reader.facts(spec())
        assert (facts.categories, facts.weight_bytes) == (("image",), 57_699_249_390)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"status": 404}, "does not have the file"),
        ({"status": 403}, "403"),
        ({"status": 400}, "400"),
        ({"status": 401}, "token"),
        ({"status": 500}, "500"),
        ({"body": b"{broken"}, "not valid JSON"),
        ({"body": b"{}"}, "empty"),
        ({"body": b"null"}, "empty"),
        ({"body": b'["x"]'}, "other than a JSON object"),
        ({"body": b"x" * 10_000_001}, "more than"),
        ({"silent": True}, "did not answer"),
    ],
)
async def test_each_worker_that_cannot_help_says_why(how: dict[str, Any], reason: str) -> None:
    api = WorkerApi({"w1": {}})
    if how.get("silent"):
        api.silent = {"w1"}
    if "status" in how:
        api.status["w1"] = how["status"]
    if "body" in how:
        api.bodies["w1"] = how["body"]
    async with api:
        files = WorkerFiles(total=5.0 if "silent" not in how else 0.3)
        with pytest.raises(ModelUnreadable, match="w1") as raised:
            await files.json_file(api.hosts(), f"{PATH}/config.json")
        await files.aclose()
    assert reason in raised.value.problem
    assert raised.value.retryable


async def test_three_reasons_are_shown_and_the_rest_counted() -> None:
    async with WorkerApi({f"w{i}": {} for i in range(7)}) as api:
        files = WorkerFiles()
        with pytest.raises(ModelUnreadable, match="7 workers") as raised:
            await files.json_file(api.hosts(), f"{PATH}/config.json")
        await files.aclose()
    assert "+4 more" in raised.value.problem
    assert len(raised.value.problem) < 600


async def test_a_worker_that_refuses_connections_does_not_spoil_the_others() -> None:
    async with WorkerApi({"w2": FILES}) as api:
        files = WorkerFiles()
        dead = WorkerHost("w1", "http://127.0.0.1:1")
        size, winner = await files.weight_size(Hosts((dead, *api.hosts().hosts)), PATH)
        assert (size, winner) == (988_097_824, "w2")
        with pytest.raises(ModelUnreadable, match="cannot be reached"):
            await files.weight_size(Hosts((dead,)), PATH)
        await files.aclose()


@pytest.mark.parametrize("size", [0, -5, "1 GB", True, None, 2.5, 2**70, {"a": 1}])
async def test_an_answer_that_is_no_size_is_none_and_zero_is_not_taken_for_one(size: Any) -> None:
    async with WorkerApi({"w1": {PATH: size}, "w2": {}}) as api:
        files = WorkerFiles()
        with pytest.raises(ModelUnreadable) as raised:
            await files.weight_size(api.hosts(), PATH)
        await files.aclose()
    assert raised.value.retryable


async def test_an_empty_worker_does_not_win_over_one_that_has_the_weights() -> None:
    async with WorkerApi({"w1": {PATH: 0}, "w2": {PATH: 7}}) as api:
        files = WorkerFiles()
        assert await files.weight_size(api.hosts(), PATH) == (7, "w2")
        await files.aclose()


async def test_a_size_that_no_worker_tells_is_unknown_with_the_reasons() -> None:
    async with (
        WorkerApi({"w1": {f"{PATH}/config.json": CONFIG}}) as api,
        Reader(hosts=lambda _: api.hosts()) as reader,
    ):
        facts = await reader.facts(spec())
        assert facts.weight_bytes is None
        assert "w1: does not have the file" in facts.unknown_because


async def test_nobody_to_ask_is_said_with_who_was_left_out() -> None:
    async with Reader(hosts=lambda _: Hosts(dropped=("w1 is NOT_READY", "w2 lacks label zone=a"))) as reader:
        with pytest.raises(ModelUnreadable, match="w1 is NOT_READY") as raised:
            await reader.facts(spec())
    assert raised.value.code == "no_workers"


async def test_whether_a_path_exists_is_asked_of_one_worker() -> None:
    async with WorkerApi({"w1": FILES, "w2": {}}) as api:
        files = WorkerFiles()
        assert await files.exists(api.host("w1"), PATH)
        assert not await files.exists(api.host("w2"), PATH)
        api.status["w2"] = 500
        with pytest.raises(ModelUnreadable, match="w2"):
            await files.exists(api.host("w2"), PATH)
        await files.aclose()


async def test_adapters_on_workers_are_sized_there() -> None:
    lora = {"lora_name": "a", "source": "local_path", "local_path": "/mnt/loras/a"}
    async with (
        WorkerApi({"w1": {**FILES, "/mnt/loras/a": 4096}}) as api,
        Reader(hosts=lambda _: api.hosts()) as reader,
    ):
        assert (await reader.facts(spec(lora_list=[lora]))).lora_bytes == 4096


def row(name: str, **more: Any) -> WorkerRow:
    number = int(name[1:])
    told = {"cluster_id": 1, "state": "READY", "ip": f"10.0.0.{number}", "port": 10150, **more}
    return WorkerRow(id=number, name=name, **told)


def test_workers_are_chosen_by_cluster_picked_gpus_labels_and_state() -> None:
    rows = [
        row("w1", labels={"zone": "a"}),
        row("w2", labels={"zone": "b"}),
        row("w3", labels={"zone": "a"}, state="MAINTENANCE"),
        row("w4", labels={"zone": "a"}, cluster_id=2),
        row("w5", labels={"zone": "a"}, advertise_address="fd00::5"),
        row("w6", labels={"zone": "a"}, port=None),
        row("w7", labels={"zone": "a"}),
    ]
    picked = {"gpu_ids": [f"w{i}:cuda:0" for i in range(1, 7)]}
    hosts = hosts_of(
        spec(cluster_id=1, worker_selector={"zone": "a"}, gpu_selector=picked), rows, having_file={5}
    )
    assert [h.url for h in hosts.hosts] == ["http://[fd00::5]:10150", "http://10.0.0.1:10150"]
    assert len(hosts.dropped) == 4
    assert any("w7" in d and "GPUs" in d for d in hosts.dropped)


def test_labels_that_cannot_be_read_drop_everybody_with_that_reason() -> None:
    hosts = hosts_of(spec(worker_selector={"terms": [{"key": "a", "operator": "Near"}]}), [row("w1")])
    assert hosts.hosts == ()
    assert "worker_selector" in hosts.dropped[0]
