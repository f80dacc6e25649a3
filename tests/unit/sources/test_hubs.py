"""Hugging Face and ModelScope against a hub on loopback: what is asked, what is kept, how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.access import ReaderOptions
from gpustackd.sources.reader import Reader
from tests.hub import Answer, Hub, Repo, Sparse, repo_of, safetensors, size_of
from tests.safetensors_files import encode
from tests.specs import a_model, known_models

pytestmark = pytest.mark.anyio
CONFIG = known_models()["Qwen/Qwen2.5-0.5B-Instruct"]["hf_config"]
TENSORS = [("model.embed_tokens.weight", "BF16", [151936, 896]), ("norm.weight", "F32", [896])]
NAME = "Qwen/small"
SOURCES = ["huggingface", "model_scope"]
API = {"huggingface": f"/api/models/{NAME}", "model_scope": f"/api/v1/models/{NAME}/repo/files"}


def repo(**files: Any) -> Repo:
    return repo_of(CONFIG, TENSORS, **files)


def spec(source: str = "huggingface", name: str = NAME, **columns: Any) -> Any:
    where = {"huggingface": {"huggingface_repo_id": name}, "model_scope": {"model_scope_model_id": name}}[
        source
    ]
    return a_model(source=source, **where, **columns)


def options(hub: Hub, **more: Any) -> ReaderOptions:
    return ReaderOptions(huggingface_endpoint=hub.url, modelscope_endpoint=hub.url, **more)


async def refused(hub: Hub, asked: Any, **more: Any) -> ModelUnreadable:
    async with Reader(options(hub, **more)) as reader:
        with pytest.raises(ModelUnreadable) as raised:
            await reader.facts(asked)
    return raised.value


@pytest.mark.parametrize("source", SOURCES)
async def test_a_repository_is_sized_and_its_config_read(source: str) -> None:
    async with Hub({NAME: repo(pytorch_model__bin=b"x" * 999)}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec(source))
        assert facts.weight_bytes == size_of(hub.repos[NAME].files["model.safetensors"])
        assert facts.hyper is not None
        assert facts.hyper.num_hidden_layers == 24
        assert facts.categories == ("llm",)
        assert facts.warnings == ()


@pytest.mark.parametrize("source", SOURCES)
async def test_weights_are_read_by_range_and_never_beyond_their_beginning(source: str) -> None:
    async with Hub({NAME: repo()}) as hub, Reader(options(hub)) as reader:
        await reader.facts(spec(source))
        assert [r for _, r in hub.ranges] == ["bytes=0-65535"]
        assert hub.bytes_sent < 100_000


async def test_a_large_header_takes_a_second_range_up_to_its_end() -> None:
    many = [(f"model.layers.{i}.mlp.experts.{i}.weight", "BF16", [16, 16]) for i in range(2000)]
    length = len(encode(many))
    assert length > 65536
    async with Hub({NAME: repo_of(CONFIG, many)}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec())
        assert [r for _, r in hub.ranges] == ["bytes=0-65535", f"bytes=65536-{length - 1}"]
        assert facts.weight_bytes == length + 2000 * 512


@pytest.mark.parametrize("source", SOURCES)
async def test_what_was_read_is_kept_on_disk_and_a_restart_asks_nothing(source: str, tmp_path: Path) -> None:
    async with Hub({NAME: repo()}) as hub:
        for _ in range(3):
            async with Reader(options(hub, cache_dir=tmp_path)) as reader:
                assert (await reader.facts(spec(source))).weight_bytes
        assert set(hub.requests.values()) == {1} or source == "model_scope"
        assert hub.requests[API[source]] == 1


async def test_a_branch_is_looked_up_again_after_a_while_and_a_commit_is_not_read_twice(
    tmp_path: Path,
) -> None:
    wall, clock = [1000.0], [0.0]
    hub = Hub({NAME: repo()})
    async with (
        hub,
        Reader(options(hub, cache_dir=tmp_path), clock=lambda: clock[0], wall=lambda: wall[0]) as reader,
    ):
        first = await reader.facts(spec())
        wall[0] += 3601
        clock[0] += 3601
        assert await reader.facts(spec()) is first
        assert hub.requests[API["huggingface"]] == 2
        assert len(hub.ranges) == 1
        hub.repos[NAME] = repo_of(CONFIG, [("a", "F32", [10])])
        wall[0] += 3601
        clock[0] += 3601
        assert (await reader.facts(spec())).weight_bytes != first.weight_bytes
        assert len(hub.ranges) == 2


async def test_a_revision_is_asked_for_by_its_name() -> None:
    async with Hub({NAME: repo()}) as hub:
        commit = hub.repos[NAME].commit
        async with Reader(options(hub)) as reader:
            assert (await reader.facts(spec(revision=commit))).weight_bytes
            assert hub.requests[f"/api/models/{NAME}/revision/{commit}"] == 1
        error = await refused(hub, spec(revision="v9"))
    assert error.code == "revision_not_found"


async def test_a_gated_repository_wants_the_token_and_says_so() -> None:
    async with Hub({NAME: Repo(repo().files, gated=True)}) as hub:
        error = await refused(hub, spec())
        assert (error.code, error.retryable) == ("hub_unauthorized", False)
        assert "GPUSTACKD_HUGGINGFACE_TOKEN" in error.remedy
        async with Reader(options(hub, huggingface_token=hub.token)) as reader:
            assert (await reader.facts(spec())).weight_bytes


async def test_a_hub_on_this_host_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with Hub({NAME: repo()}) as hub, Reader(options(hub)) as reader:
        assert (await reader.facts(spec())).weight_bytes


async def test_files_behind_a_redirect_are_followed() -> None:
    async with Hub({NAME: repo()}) as hub, Reader(options(hub)) as reader:
        hub.redirect_files = True
        assert (await reader.facts(spec())).weight_bytes
        assert any(path.startswith("/cdn/") for path, _ in hub.ranges)


@pytest.mark.parametrize("source", SOURCES)
async def test_an_unknown_repository_is_not_tried_again(source: str) -> None:
    async with Hub({}) as hub:
        error = await refused(hub, spec(source))
    assert (error.code, error.retryable) == ("hub_not_found", False)
    assert NAME in error.problem


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("answer", "code", "retryable"),
    [
        (Answer(401), "hub_unauthorized", False),
        (Answer(403), "hub_unauthorized", False),
        (Answer(404), "hub_not_found", False),
        (Answer(429, headers={"retry-after": "30"}), "hub_busy", True),
        (Answer(500), "hub_error", True),
        (Answer(503), "hub_error", True),
        (Answer(418), "hub_error", False),
        (Answer(200, b"<html>portal</html>"), "bad_json", False),
        (Answer(200, b"[]"), "bad_json", False),
        (Answer(200, b'{"sha": 5, "Code": 200, "Data": {}}'), "hub_broken", True),
        (Answer(200, b"{}", {"content-encoding": "gzip"}), "hub_broken", True),
        (Answer(302, headers={"location": "/api/models/Qwen/small"}), "hub_broken", True),
        (Answer(302, headers={"location": "ftp://x/"}), "hub_broken", True),
    ],
)
async def test_bad_answers_to_the_listing_have_a_name(
    source: str, answer: Answer, code: str, retryable: bool
) -> None:
    async with Hub({NAME: repo()}) as hub:
        hub.fail["/api/"] = answer
        error = await refused(hub, spec(source))
    assert (error.code, error.retryable) == (code, retryable)
    assert len(str(error)) < 400


async def test_the_wait_that_a_busy_hub_asks_for_is_told() -> None:
    async with Hub({NAME: repo()}) as hub:
        hub.fail["/api/"] = Answer(429, headers={"retry-after": "30"})
        assert "30 s" in (await refused(hub, spec())).problem


async def test_a_hub_that_is_away_is_unreachable_and_worth_another_try() -> None:
    async with Hub({}) as hub:
        url = hub.url
    async with Reader(ReaderOptions(huggingface_endpoint=url)) as reader:
        with pytest.raises(ModelUnreadable) as raised:
            await reader.facts(spec())
    assert (raised.value.code, raised.value.retryable) == ("hub_unreachable", True)


@pytest.mark.parametrize("prefix", ["/api/", "/Qwen/"])
async def test_a_hub_that_does_not_answer_ends_in_a_time_out(prefix: str) -> None:
    async with Hub({NAME: repo()}) as hub:
        hub.hold(prefix)
        error = await refused(hub, spec(), hub_seconds=0.3)
    assert (error.code, error.retryable) in {("hub_timeout", True), ("timeout", True)}


async def test_an_unreachable_hub_is_no_obstacle_where_the_row_says_the_claim_or_a_copy_is_known() -> None:
    async with Hub({}) as hub:
        url = hub.url
    told = ReaderOptions(huggingface_endpoint=url)
    env = {"GPUSTACK_SKIP_MODEL_EVALUATION": "1"}
    async with Reader(told) as reader:
        facts = await reader.facts(spec(backend="Custom"))
        assert facts.weight_bytes is None
        assert "cannot be reached" in facts.unknown_because
        assert (await reader.facts(spec(env=env))).weight_bytes is None
    asked = spec(backend="Custom")
    sizes = {asked.source_index: 4096}
    async with Reader(told, known_size=sizes.get) as reader:
        facts = await reader.facts(asked)
        assert facts.weight_bytes == 4096
        assert "downloaded copy" in facts.warnings[-1]


async def test_a_refusal_answers_for_a_while_and_an_edit_asks_again() -> None:
    now = [0.0]
    async with Hub({}) as hub, Reader(options(hub), clock=lambda: now[0]) as reader:
        for version in (1, 1, 1, 2):
            with pytest.raises(ModelUnreadable):
                await reader.facts(spec(version=version))
        assert hub.requests[API["huggingface"]] == 2
        now[0] = 11.0
        with pytest.raises(ModelUnreadable):
            await reader.facts(spec(version=2))
        assert hub.requests[API["huggingface"]] == 3


async def test_a_hub_without_ranges_is_not_downloaded_and_its_listing_has_to_do() -> None:
    async with Hub({NAME: repo()}) as hub, Reader(options(hub)) as reader:
        hub.ignore_ranges = True
        facts = await reader.facts(spec())
        assert facts.weight_bytes == size_of(hub.repos[NAME].files["model.safetensors"])
        assert "listing" in facts.warnings[0]
        assert hub.bytes_sent < 5_000_000


async def test_a_hub_that_fails_in_the_middle_leaves_its_listing() -> None:
    async with Hub({NAME: repo()}) as hub, Reader(options(hub)) as reader:
        commit = hub.repos[NAME].commit
        hub.fail[f"/{NAME}/resolve/{commit}/model.safetensors"] = Answer(503)
        facts = await reader.facts(spec())
        assert facts.weight_bytes
        assert "503" in facts.warnings[0]


@pytest.mark.parametrize("source", SOURCES)
async def test_a_hostile_header_condemns_that_model_alone(source: str) -> None:
    bad = Sparse((2**40).to_bytes(8, "little") + b"{}", 2**41)
    repos = {NAME: Repo({**repo().files, "model.safetensors": bad}), "Qwen/good": repo()}
    async with Hub(repos) as hub, Reader(options(hub)) as reader:
        with pytest.raises(ModelUnreadable, match=str(2**40)):
            await reader.facts(spec(source))
        assert (await reader.facts(spec(source, "Qwen/good"))).weight_bytes
        assert hub.bytes_sent < 500_000


async def test_a_config_that_ends_early_is_refused_as_json() -> None:
    async with Hub({NAME: Repo({**repo().files, "config.json": b'{"a": '})}) as hub:
        error = await refused(hub, spec())
    assert error.code == "bad_json"


async def test_a_config_beyond_its_limit_is_not_fetched() -> None:
    async with Hub({NAME: Repo({**repo().files, "config.json": Sparse(b"{", 10**12)})}) as hub:
        error = await refused(hub, spec())
        assert error.code == "too_large"
        assert hub.bytes_sent < 200_000


@pytest.mark.parametrize("source", SOURCES)
async def test_shards_of_an_index_are_counted_from_the_listing(source: str) -> None:
    shards = {
        f"model-{i:05d}-of-00040.safetensors": safetensors([(f"t{i}", "BF16", [64, i])]) for i in range(1, 41)
    }
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(shards, 1)}}
    files = {"config.json": json.dumps(CONFIG).encode(), "x.safetensors": safetensors([("x", "F32", [9])]),
             "model.safetensors.index.json": json.dumps(index).encode(), **shards}  # fmt: skip
    async with Hub({NAME: Repo(files)}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec(source))
        assert facts.weight_bytes == sum(size_of(f) for f in shards.values())
        assert hub.ranges == []


@pytest.mark.parametrize("source", SOURCES)
async def test_a_pipeline_of_a_hub_counts_its_components(source: str) -> None:
    index = {"_diffusers_version": "0.35", "vae": ["diffusers", "A"], "text_encoder": ["transformers", "B"]}
    vae, text = safetensors([("a", "F16", [50])]), safetensors([("b", "F16", [70])])
    files = {"model_index.json": json.dumps(index).encode(), "vae/diffusion_pytorch_model.safetensors": vae,
             "text_encoder/model.safetensors": text, "text_encoder/pytorch_model.bin": b"x" * 500,
             "all-in-one.safetensors": safetensors([("c", "F16", [900])])}  # fmt: skip
    async with Hub({NAME: Repo(files)}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec(source))
        assert facts.categories == ("image",)
        assert facts.weight_bytes == size_of(vae) + size_of(text)


async def test_a_model_index_that_cannot_be_read_means_no_pipeline() -> None:
    async with (
        Hub({NAME: Repo({**repo().files, "model_index.json": b"{"})}) as hub,
        Reader(options(hub)) as reader,
    ):
        facts = await reader.facts(spec())
        assert facts.categories == ("llm",)
        assert "model_index.json" in facts.warnings[0]


async def test_adapters_come_from_the_hub_that_their_entry_names() -> None:
    adapter = Repo({"adapter_model.safetensors": safetensors([("lora", "F16", [8, 64])])})
    size = size_of(adapter.files["adapter_model.safetensors"])
    loras = [
        {"lora_name": "me/one"},
        {"lora_name": "alias", "lora_repo_name": "me/one", "source": "model_scope"},
        {"lora_name": "me/none"},
    ]
    async with Hub({NAME: repo(), "me/one": adapter}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec(lora_list=loras))
        assert facts.lora_bytes == 2 * size
        assert "me/none" in facts.warnings[0]


async def test_a_draft_model_is_sized_where_that_is_wanted() -> None:
    draft = repo_of({}, [("d", "F16", [100])])
    speculative = {"draft_model": "Qwen/draft"}
    async with Hub({NAME: repo(), "Qwen/draft": draft}) as hub:
        async with Reader(options(hub)) as reader:
            assert (await reader.facts(spec(speculative_config=speculative))).draft_bytes == 0
        async with Reader(options(hub, size_draft=True)) as reader:
            found = (await reader.facts(spec(speculative_config=speculative))).draft_bytes
            assert found == size_of(draft.files["model.safetensors"])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    "name", ["../../etc", "a/b/c", "a//b", "..%2fa/b", "a/..", "a b/c", "x/" + "y" * 200]
)
async def test_names_that_are_none_never_become_an_address(source: str, name: str) -> None:
    async with Hub({}) as hub:
        error = await refused(hub, spec(source, name))
        assert error.code == "bad_name"
        assert not hub.requests


async def test_the_token_goes_to_its_hub_and_to_no_other_host() -> None:
    async with Hub({NAME: repo()}) as other, Hub({NAME: repo()}) as hub:
        commit = hub.repos[NAME].commit
        elsewhere = f"{other.url}/{NAME}/resolve/main/config.json"
        hub.fail[f"/{NAME}/resolve/{commit}/config.json"] = Answer(302, headers={"location": elsewhere})
        async with Reader(options(hub, huggingface_token="secret")) as reader:
            assert (await reader.facts(spec())).hyper is not None
        assert set(hub.tokens) == {"Bearer secret"}
        assert sum(other.requests.values()) == 1
        assert other.tokens == []
