"""Sizes of downloaded copies (estimate spec section 2 (d)): they go before hubs and workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.origin import adapter_origins
from gpustackd.sources.access import ReaderOptions
from gpustackd.sources.model_facts import with_copy_size
from gpustackd.sources.reader import Reader
from tests.hub import Hub, repo_of, size_of
from tests.specs import a_model, known_models
from tests.worker_api import WorkerApi

pytestmark = pytest.mark.anyio
CONFIG = known_models()["Qwen/Qwen2.5-0.5B-Instruct"]["hf_config"]
TENSORS = [("model.embed_tokens.weight", "BF16", [151936, 896])]
NAME = "Qwen/small"


def read(weights: int | None = 100, listed: int | None = 150, **more: Any) -> ModelFacts:
    return ModelFacts(weights, listed_bytes=listed, digest="d", **more)


@pytest.mark.parametrize(
    ("facts", "copy", "weights"),
    [
        (read(), None, 100), (read(), 0, 100), (read(), -1, 100),
        (read(), 100, 100),
        (read(), 130, 100),  # all that is listed, or a part of it with the weights
        (read(), 150, 100), (read(), 153, 100),
        (read(), 154, 154), (read(), 99, 99),  # another revision than what is listed now
        (read(listed=None), 130, 130),
        (read(None, None, unknown_because="silent"), 77, 77),
        (read(on_this_host=True), 77, 100),
        (read(gguf=object()), 77, 100),
    ],
)  # fmt: skip
def test_a_copy_goes_before_its_source_unless_the_listing_explains_it(
    facts: ModelFacts, copy: int | None, weights: int
) -> None:
    found = with_copy_size(facts, copy)
    assert found.weight_bytes == weights
    assert (found is facts) == (weights == facts.weight_bytes)
    if found is not facts:
        assert (found.digest == facts.digest, found.unknown_because) == (False, "")
        assert "downloaded copy" in found.warnings[-1]


async def test_a_download_is_seen_by_facts_that_are_kept_and_the_hub_is_not_asked_again() -> None:
    asked = a_model(huggingface_repo_id=NAME)
    copies: dict[str, int] = {}
    repo = repo_of(CONFIG, TENSORS, pytorch_model__bin=b"x" * 999)
    listed = sum(size_of(f) for f in repo.files.values())
    weights = size_of(repo.files["model.safetensors"])
    async with Hub({NAME: repo}) as hub:
        options = ReaderOptions(huggingface_endpoint=hub.url)
        async with Reader(options, known_size=copies.get) as reader:
            assert (await reader.facts(asked)).weight_bytes == weights
            requests = hub.requests.total()
            copies[asked.source_index] = listed  # the same weights in both formats, and the configuration
            assert reader.cached(asked) is reader.cached(asked)
            assert (await reader.facts(asked)).weight_bytes == weights
            copies[asked.source_index] = weights // 2
            found = reader.cached(asked)
            assert found is not None
            assert found.weight_bytes == weights // 2
            assert found is await reader.facts(asked)
            del copies[asked.source_index]
            assert (await reader.facts(asked)).weight_bytes == weights
            assert hub.requests.total() == requests


async def test_adapters_count_what_their_copies_weigh_and_are_not_asked_for() -> None:
    lora = {"lora_name": "lab/adapter"}
    asked = a_model(huggingface_repo_id=NAME, lora_list=[lora])
    [origin] = adapter_origins(asked)
    async with Hub({NAME: repo_of(CONFIG, TENSORS)}) as hub:
        options = ReaderOptions(huggingface_endpoint=hub.url)
        async with Reader(options, known_size={origin.index: 4096}.get) as reader:
            assert (await reader.facts(asked)).lora_bytes == 4096
        assert not [path for path in hub.requests if "adapter" in path]


async def test_a_copy_goes_before_the_word_of_a_worker_but_not_before_the_files_of_this_host(
    tmp_path: Path,
) -> None:
    path = "/mnt/models/foo"
    asked = a_model(source="local_path", local_path=path)
    files = {f"{path}/config.json": CONFIG, path: 988_097_824}
    async with WorkerApi({"w1": files}) as api:
        known = {asked.source_index: 500_000_000}.get
        async with Reader(ReaderOptions(), hosts=lambda _: api.hosts(), known_size=known) as reader:
            assert (await reader.facts(asked)).weight_bytes == 500_000_000
    (tmp_path / "model.bin").write_bytes(b"x" * 4096)
    here = a_model(source="local_path", local_path=str(tmp_path), backend="Custom", categories=["llm"])
    async with Reader(known_size={here.source_index: 17}.get) as reader:
        assert (await reader.facts(here)).weight_bytes == 4096
