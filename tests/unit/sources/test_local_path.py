"""Reading directories of this host: sizes, beginnings, and whatever a path in a row may turn out to be."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.local_files import PathAbsent, read, scan
from gpustackd.sources.reader import Reader
from tests.safetensors_files import data_bytes, encode
from tests.specs import a_model, known_models

pytestmark = pytest.mark.anyio
CONFIG = known_models()["Qwen/Qwen2.5-0.5B-Instruct"]["hf_config"]
TENSORS = [("model.embed_tokens.weight", "BF16", [151936, 896]), ("norm", "F32", [896])]


def write_weights(path: Path, tensors: list[Any] | None = None, *, size: int | None = None) -> int:
    """A sparse safetensors file with a true header; returns its length."""
    tensors = TENSORS if tensors is None else tensors
    head = encode(tensors)
    length = size if size is not None else len(head) + data_bytes(tensors)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(length)
    return length


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder / "model.safetensors")
    return folder


def spec(path: Path | str, **columns: Any) -> Any:
    return a_model(source="local_path", local_path=str(path), **columns)


async def test_a_directory_is_sized_by_its_files_on_disk(model: Path) -> None:
    async with Reader() as reader:
        facts = await reader.facts(spec(model))
    assert facts.weight_bytes == (model / "model.safetensors").stat().st_size
    assert facts.categories == ("llm",)
    assert facts.hyper is not None
    assert facts.hyper.num_attention_heads == 14


async def test_a_pickle_of_the_same_weights_is_not_counted_again(model: Path) -> None:
    (model / "pytorch_model.bin").write_bytes(b"x" * 1000)
    async with Reader() as reader:
        facts = await reader.facts(spec(model))
    assert facts.weight_bytes == (model / "model.safetensors").stat().st_size


async def test_shards_named_by_an_index_are_counted_and_others_not(model: Path) -> None:
    (model / "model.safetensors").unlink()
    one = write_weights(model / "part-1.safetensors", [("a", "BF16", [100])])
    two = write_weights(model / "part-2.safetensors", [("b", "I8", [77])])
    write_weights(model / "extra.safetensors", [("c", "I8", [5000])])
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    async with Reader() as reader:
        assert (await reader.facts(spec(model))).weight_bytes == one + two


async def test_a_pipeline_counts_its_components_and_is_an_image_model(tmp_path: Path) -> None:
    index = {
        "_diffusers_version": "0.35",
        "vae": ["diffusers", "A"],
        "unet": ["diffusers", "B"],
        "gone": [None, None],
    }
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    total = 0
    for part in ("vae", "unet"):
        (tmp_path / part).mkdir()
        total += write_weights(tmp_path / part / "diffusion_pytorch_model.safetensors", [(part, "F16", [99])])
        write_weights(tmp_path / part / "diffusion_pytorch_model.fp16.safetensors", [(part, "F16", [99])])
    write_weights(tmp_path / "whole.safetensors", [("x", "F16", [12345])])
    async with Reader() as reader:
        facts = await reader.facts(spec(tmp_path))
    assert (facts.weight_bytes, facts.categories, facts.is_diffusers) == (total, ("image",), True)
    assert facts.hyper is None


async def test_files_linked_from_a_hub_cache_are_followed(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for name in ("config.json", "model.safetensors"):
        (linked / name).symlink_to(model / name)
    async with Reader() as reader:
        facts = await reader.facts(spec(linked))
    assert facts.weight_bytes == (model / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("relative/model", "bad_path"),
        ("/nowhere/at/all", "path_absent"),
        ("/dev/null", "not_a_directory"),
        ("/a\0b", "bad_path"),
        ("/" + "x" * 5000, "bad_path"),
    ],
)
async def test_paths_that_lead_nowhere_are_named(path: str, code: str) -> None:
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable) as raised:
            await reader.facts(spec(path))
    assert raised.value.code == code


def test_a_path_with_dots_is_resolved_first(model: Path) -> None:
    assert scan(f"{model}/../{model.name}").root == str(model.resolve())


def test_a_circle_of_links_is_an_error_and_no_hang(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(ModelUnreadable) as raised:
        scan(str(tmp_path / "a"))
    assert raised.value.code == "symlink_loop"
    assert scan(str(tmp_path)).sizes == {}


def test_directories_that_link_to_their_parents_are_not_walked(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "self").symlink_to(tmp_path)
    assert set(scan(str(tmp_path), deep=True).sizes) == {"model_index.json"}


@pytest.mark.parametrize("kind", ["fifo", "socket", "device"])
def test_special_files_are_refused_by_type_and_never_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.close()
    else:
        path.symlink_to("/dev/zero")
    assert scan(str(tmp_path)).sizes == {"config.json": 0}  # so that reading it tells what it is
    with pytest.raises(ModelUnreadable) as raised:
        read(str(tmp_path), "config.json", 100)
    assert raised.value.code == "not_a_file"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, r"config\.json is a FIFO, not a regular file"),
        (os.mkdir, r"config\.json is a directory, not a regular file"),
        (lambda path: path.symlink_to("nowhere"), r"config\.json does not exist"),
        (lambda _: None, r"has no config\.json"),
    ],
)
async def test_what_lies_in_place_of_a_config_is_told_and_nobody_waits(
    model: Path, make: Callable[[Path], None], said: str
) -> None:
    (model / "config.json").unlink()
    make(model / "config.json")
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable, match=said):
            await reader.facts(spec(model))


def test_a_file_beyond_its_limit_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelUnreadable) as raised:
        read(str(tmp_path), "config.json", 1000)
    assert raised.value.code == "too_large"


def test_a_path_without_permission_is_absent_for_us(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    tmp_path.chmod(0)
    try:
        with pytest.raises(PathAbsent):
            scan(str(tmp_path))
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"{", "bad_json"),
        (b"[1, 2]", "bad_json"),
        (b"\xff" * 100, "bad_json"),
        (b'{"num_hidden_layers": 0, "num_attention_heads": 8}', "bad_config"),
        (b'{"a":' * 5000, "bad_json"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "bad_json"),
        (b" " * 10_000_001, "too_large"),
        (b"[" + b"[]," * 3_000_000 + b"[]]", "too_large"),
    ],
)
async def test_a_config_that_cannot_be_used_is_named_and_not_tried_again(
    model: Path, content: bytes, code: str
) -> None:
    (model / "config.json").write_bytes(content)
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable) as raised:
            await reader.facts(spec(model))
    assert (raised.value.code, raised.value.retryable) == (code, False)
    assert str(model) in raised.value.problem


async def test_engines_that_read_no_dimensions_do_without_a_config(model: Path) -> None:
    (model / "config.json").write_bytes(b"{")
    async with Reader() as reader:
        facts = await reader.facts(spec(model, backend="Custom"))
        skipped = await reader.facts(spec(model, env={"GPUSTACK_SKIP_MODEL_EVALUATION": "1"}))
    assert facts.weight_bytes
    assert facts.hyper is None
    assert "not valid JSON" in facts.warnings[0]
    assert skipped.weight_bytes == facts.weight_bytes


async def test_a_header_of_two_to_the_forty_is_refused(model: Path) -> None:
    """Field report FR-26."""
    with (model / "model.safetensors").open("wb") as file:
        file.write((2**40).to_bytes(8, "little") + b"{}")
        file.truncate(2**41)
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable) as raised:
            await reader.facts(spec(model))
    assert (raised.value.code, raised.value.retryable) == ("bad_header", False)
    assert str(2**40) in raised.value.problem


@pytest.mark.parametrize("missing", ["shard", "tail", "everything"])
async def test_files_that_are_not_complete_yet_leave_the_size_unknown(model: Path, missing: str) -> None:
    if missing == "tail":
        write_weights(model / "model.safetensors", size=5000)
    elif missing == "shard":
        (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    else:
        (model / "model.safetensors").unlink()
    async with Reader() as reader:
        facts = await reader.facts(spec(model))
    assert facts.weight_bytes is None
    assert str(model) in facts.unknown_because or "files like" in facts.unknown_because


async def test_facts_are_kept_until_the_directory_changes(model: Path) -> None:
    now = [0.0]
    async with Reader(clock=lambda: now[0]) as reader:
        asked = spec(model)
        assert reader.cached(asked) is None
        first = await reader.facts(asked)
        assert reader.cached(asked) is first
        now[0] = 61.0
        assert reader.cached(asked) is None
        assert await reader.facts(asked) is first
        assert reader.cached(asked) is first
        now[0] = 200.0
        size = write_weights(model / "model.safetensors", [("a", "F32", [10])])
        assert (await reader.facts(asked)).weight_bytes == size


async def test_an_edit_of_what_facts_do_not_depend_on_reads_nothing_anew(model: Path) -> None:
    async with Reader() as reader:
        first = await reader.facts(spec(model))
        assert reader.cached(spec(model, version=2, replicas=5, priority=3)) is first
        assert reader.cached(spec(model, version=3, categories=["embedding"])) is None


async def test_an_architecture_override_takes_the_place_of_the_configs(model: Path) -> None:
    flags = ['--hf-overrides={"architectures": ["Qwen3ForSequenceClassification"]}']
    async with Reader() as reader:
        facts = await reader.facts(spec(model, backend_parameters=flags))
    assert facts.hyper is not None
    assert facts.hyper.architectures == ("Qwen3ForSequenceClassification",)
    assert facts.categories == ("reranker",)


async def test_adapters_are_sized_and_what_cannot_be_is_said(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    size = write_weights(adapter / "adapter_model.safetensors", [("lora_A", "F16", [8, 896])])
    loras = [
        {"lora_name": "one", "source": "local_path", "local_path": str(adapter)},
        {"lora_name": "two", "source": "LOCAL_PATH", "lora_repo_name": str(adapter)},
        {"lora_name": "gone", "source": "local_path", "local_path": "/nowhere"},
        {"lora_name": "odd", "source": "ftp"},
        {"source": "local_path", "local_path": str(adapter)},
    ]
    async with Reader() as reader:
        facts = await reader.facts(spec(model, lora_list=loras))
    assert facts.lora_bytes == 2 * size
    assert any("/nowhere is not counted" in w for w in facts.warnings)


async def test_a_row_without_a_path_is_named() -> None:
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable, match="local_path"):
            await reader.facts(a_model(source="local_path"))
        with pytest.raises(ModelUnreadable, match="source"):
            await reader.facts(a_model(source=None))
