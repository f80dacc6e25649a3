"""GGUF models out of repositories and directories: which files they are, how much of them is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.access import ReaderOptions
from gpustackd.sources.gguf_files import shards
from gpustackd.sources.local_files import PathAbsent
from gpustackd.sources.reader import Reader
from tests.gguf_files import Writer, file_bytes, write
from tests.hub import Answer, Hub, Repo, Sparse
from tests.specs import a_model

pytestmark = pytest.mark.anyio
NAME = "owner/Tiny-GGUF"
VALUES: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 4096,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.head_count": 4,
    "tokenizer.ggml.tokens": [f"word{i}" for i in range(1000)],
}
TENSORS = [
    ("token_embd.weight", (256, 1000), "q4_0"),
    ("blk.0.attn_q.weight", (256, 256), "q4_0"),
    ("blk.1.attn_q.weight", (256, 256), "q4_0"),
    ("output_norm.weight", (256,), "f32"),
]


def sparse(values: Any = None, tensors: Any = TENSORS) -> Sparse:
    head = Writer().head(VALUES if values is None else values, tensors)
    return Sparse(head, file_bytes(head, tensors))


def projector() -> Sparse:
    return sparse(
        {"general.architecture": "clip", "general.type": "mmproj"}, [("v.blk.0.w", (256, 256), "f16")]
    )


def sharded() -> dict[str, Any]:
    """One model in three files, tensors in all of them, keys in the first."""
    parts = [TENSORS[:1], TENSORS[1:3], TENSORS[3:]]
    files: dict[str, Any] = {}
    for i, tensors in enumerate(parts):
        values = {"split.no": i, "split.count": 3, "split.tensors.count": 4}
        files[f"Q4_0/tiny-0000{i + 1}-of-00003.gguf"] = sparse(
            {**(VALUES if i == 0 else {}), **values}, tensors
        )
    return files


def options(hub: Hub, **more: Any) -> ReaderOptions:
    return ReaderOptions(huggingface_endpoint=hub.url, modelscope_endpoint=hub.url, **more)


def spec(file: str = "tiny.gguf", *, source: str = "huggingface", **columns: Any) -> Any:
    where = {"huggingface": ("huggingface_repo_id", "huggingface_filename"),
             "model_scope": ("model_scope_model_id", "model_scope_file_path")}[source]  # fmt: skip
    return a_model(source=source, **{where[0]: NAME, where[1]: file}, **columns)


async def read(files: dict[str, Any], asked: Any) -> ModelFacts:
    async with Hub({NAME: Repo(files)}) as hub, Reader(options(hub)) as reader:
        return await reader.facts(asked)


async def refused(files: dict[str, Any], asked: Any) -> ModelUnreadable:
    with pytest.raises(ModelUnreadable) as raised:
        await read(files, asked)
    return raised.value


def header(facts: ModelFacts) -> GgufFacts:
    assert isinstance(facts.gguf, GgufFacts)
    return facts.gguf


@pytest.mark.parametrize("source", ["huggingface", "model_scope"])
async def test_a_hub_is_asked_for_the_beginning_of_the_file_only(source: str) -> None:
    big = Sparse(sparse().head, 40 * 1024**3)
    async with Hub({NAME: Repo({"tiny.gguf": big})}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec(source=source))
        assert hub.bytes_sent < 300 * 1024
        assert len(hub.ranges) == 1
    assert header(facts).architecture == "llama"
    assert len(header(facts).tensors) == 4
    assert facts.weight_bytes == 40 * 1024**3
    assert facts.categories == ("llm",)


async def test_a_long_vocabulary_is_fetched_piece_by_piece_to_its_end() -> None:
    values = {**VALUES, "tokenizer.ggml.tokens": [f"token-{i:06}-of-a-long-list" for i in range(60_000)]}
    file = sparse(values)
    async with Hub({NAME: Repo({"tiny.gguf": Sparse(file.head, 2**33)})}) as hub:
        async with Reader(options(hub)) as reader:
            facts = await reader.facts(spec())
        assert len(hub.ranges) > 2
        assert hub.bytes_sent < 2 * len(file.head) + 512 * 1024
    assert header(facts).vocabulary == 60_000


async def test_a_pattern_names_a_file_and_the_first_of_several_models_is_taken() -> None:
    files = {"a-Q4_K_M.gguf": sparse(), "b-Q4_K_M.gguf": sparse(), "a-Q8_0.gguf": sparse()}
    facts = await read(files, spec("*Q4_K_M*.gguf"))
    assert facts.warnings == (f"*Q4_K_M*.gguf matches 2 models in {NAME}; using a-Q4_K_M.gguf",)
    assert (await read(files, spec("*Q8_0*.gguf"))).warnings == ()
    error = await refused(files, spec("*Q2_K*.gguf"))
    assert error.code == "no_such_file"
    assert error.retryable


@pytest.mark.parametrize(
    "named", ["Q4_0/tiny-00001-of-00003.gguf", "Q4_0/tiny-00002-of-00003.gguf", "Q4_0/*.gguf"]
)
async def test_all_shards_are_read_whichever_is_named(named: str) -> None:
    files = sharded()
    facts = await read(files, spec(named))
    found = header(facts)
    assert [t.name for t in found.tensors] == [t[0] for t in TENSORS]
    assert [t.file for t in found.tensors] == [0, 1, 1, 2]
    assert found.shards == 3
    assert found.file_bytes == sum(f.size for f in files.values()) == facts.weight_bytes
    assert found.vocabulary == 1000
    assert "split.no" not in found.values
    assert found.values["split.count"] == 3


async def test_a_missing_shard_is_told_and_may_still_come() -> None:
    files = sharded()
    del files["Q4_0/tiny-00002-of-00003.gguf"]
    error = await refused(files, spec("Q4_0/tiny-00001-of-00003.gguf"))
    assert (error.code, error.retryable) == ("incomplete", True)
    assert "tiny-00002-of-00003.gguf" in str(error)


async def test_shards_that_do_not_belong_together_are_refused() -> None:
    files = sharded()
    files["Q4_0/tiny-00002-of-00003.gguf"] = files["Q4_0/tiny-00001-of-00003.gguf"]
    assert "in two of its shards" in str(await refused(files, spec("Q4_0/tiny-00001-of-00003.gguf")))
    files["Q4_0/tiny-00002-of-00003.gguf"] = sparse({}, TENSORS[1:2])
    assert "3 tensors in its shards instead of 4" in str(
        await refused(files, spec("Q4_0/tiny-00001-of-00003.gguf"))
    )


def test_numbers_of_shards_that_cannot_be_are_no_shards() -> None:
    for name in ("m-00000-of-00003.gguf", "m-00001-of-00000.gguf", "m-1-of-3.gguf"):
        assert shards({name: 1}, name, "here") == (name,)
    with pytest.raises(ModelUnreadable, match=r"lacks m-00002-of-99999\.gguf, one of its 99999 shards"):
        shards({"m-00001-of-99999.gguf": 1}, "m-00001-of-99999.gguf", "here")


async def test_the_projector_that_the_repository_brings_is_read_beside_the_model() -> None:
    files = {"tiny.gguf": sparse(), "mmproj-F16.gguf": projector(), "mmproj-F32.gguf": projector()}
    async with Hub({NAME: Repo(files)}) as hub, Reader(options(hub)) as reader:
        facts = await reader.facts(spec())
        assert any("mmproj-F32.gguf" in path for path, _ in hub.ranges)
        assert not any("mmproj-F16.gguf" in path for path, _ in hub.ranges)
        named = await reader.facts(spec(backend_parameters=["--mmproj=mmproj-F16.gguf"]))
        assert any("mmproj-F16.gguf" in path for path, _ in hub.ranges)
        none = await reader.facts(spec(backend_parameters=["--no-mmproj"]))
    assert header(facts).projector is not None
    assert header(named).projector is not None
    assert header(none).projector is None
    assert len({facts.digest, none.digest}) == 2


async def test_a_projector_that_cannot_be_read_is_not_counted_and_that_is_said() -> None:
    files = {"tiny.gguf": sparse(), "mmproj.gguf": b"no header at all, whatever its name says"}
    facts = await read(files, spec())
    assert header(facts).projector is None
    assert facts.warnings[0].startswith("projector mmproj.gguf is not counted: ")


@pytest.mark.parametrize("flag", ["--model-draft", "-md"])
async def test_a_draft_model_and_adapters_are_read_from_their_paths(tmp_path: Path, flag: str) -> None:
    model = write(tmp_path / "m.gguf", VALUES, TENSORS)
    draft = write(tmp_path / "draft.gguf", VALUES, TENSORS)
    adapter = write(
        tmp_path / "lora.gguf", {"general.architecture": "llama", "general.type": "adapter"}, TENSORS[1:2]
    )
    parameters = [
        f"{flag}={draft}",
        "--lora-scaled",
        f"{adapter}:0.5",
        f"--lora={adapter}",
        "--lora=lost.gguf",
    ]
    async with Reader() as reader:
        facts = await reader.facts(
            a_model(source="local_path", local_path=str(model), backend_parameters=parameters)
        )
    assert header(facts).draft is not None
    assert len(header(facts).adapters) == 2
    assert facts.warnings == (f"adapter lost.gguf is not counted: {tmp_path} has no file lost.gguf",)


async def test_a_draft_model_of_a_speculative_configuration_may_be_a_file_of_a_repository() -> None:
    drafts = {"small-Q4_0.gguf": sparse(), "small-Q8_0.gguf": sparse()}
    async with Hub({NAME: Repo({"tiny.gguf": sparse()}), "owner/drafts": Repo(drafts)}) as hub:
        async with Reader(options(hub)) as reader:
            facts = await reader.facts(
                spec(speculative_config={"draft_model": "owner/drafts/small-Q8_0.gguf"})
            )
        assert any("small-Q8_0.gguf" in path for path, _ in hub.ranges)
    assert header(facts).draft is not None


async def test_a_file_of_this_host_is_read_and_its_neighbours_are_not(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", VALUES, TENSORS)
    (tmp_path / "n.gguf").write_bytes(b"garbage")
    async with Reader() as reader:
        facts = await reader.facts(a_model(source="local_path", local_path=str(tmp_path / "m.gguf")))
    assert facts.weight_bytes == (tmp_path / "m.gguf").stat().st_size
    assert header(facts).integer("block_count") == 2


async def test_a_path_that_is_not_here_or_not_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    for path in (tmp_path / "m.gguf", tmp_path / "none" / "m.gguf", tmp_path / "folder.gguf"):
        async with Reader() as reader:
            with pytest.raises(PathAbsent, match=r"\.gguf|none") as raised:
                await reader.facts(a_model(source="local_path", local_path=str(path)))
        assert raised.value.retryable
        assert "read on this host" in str(raised.value.remedy)
    async with Reader() as reader:
        with pytest.raises(ModelUnreadable, match="not absolute"):
            await reader.facts(a_model(source="local_path", local_path="m.gguf"))


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (
            {"general.architecture": "clip", "general.type": "mmproj"},
            "this file is a multimodal projector, not",
        ),
        (
            {"general.architecture": "llama", "general.type": "adapter"},
            "this file is an adapter, not a model",
        ),
        ({"general.type": "imatrix"}, "this file is an importance matrix, not a model"),
    ],
)
async def test_what_is_no_model_is_refused_with_what_it_is(values: dict[str, Any], what: str) -> None:
    error = await refused({"tiny.gguf": sparse(values, TENSORS[:1])}, spec())
    assert error.code == "not_a_model"
    assert what in str(error)


async def test_headers_of_a_hub_are_kept_on_disk_and_read_again_without_it(tmp_path: Path) -> None:
    async with Hub({NAME: Repo(sharded())}) as hub:
        asked = spec("Q4_0/tiny-00001-of-00003.gguf")
        async with Reader(options(hub, cache_dir=tmp_path)) as reader:
            first = await reader.facts(asked)
        hub.fail["/owner"] = Answer(500)
        async with Reader(options(hub, cache_dir=tmp_path)) as reader:
            again = await reader.facts(asked)
    assert again == first
    assert again.digest == first.digest


async def test_a_hub_that_cuts_a_file_short_is_told_from_a_bad_file() -> None:
    cut = Sparse(sparse().head, len(sparse().head) + 100)
    error = await refused({"tiny.gguf": cut}, spec())
    assert (error.code, error.retryable) == ("cut_off", True)
