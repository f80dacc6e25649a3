"""The example models: their files weigh what the published ones weigh, and their headers can be read."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from gpustackd.demo.models import examples
from gpustackd.demo.models.architectures import UnknownArchitecture, tensors_of
from gpustackd.demo.models.sparse import SparseModel, Unexplained, header, shard, write_model
from gpustackd.store.documents.reading import read_documents
from gpustackd.store.postgres.statements import statements

MODELS = {d["name"]: d for d in examples.model_documents()}

PUBLISHED = {
    # file sizes of the repositories, byte for byte
    "qwen2.5-0.5b": [988097824],
    "qwen3-0.6b": [1503300328],
    "qwen3-embedding-0.6b": [1191586416],
    "qwen3-4b": [3957900840, 3987450520, 99630640],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("models")
    examples.write_models(into)
    return into


@pytest.mark.parametrize("name", MODELS)
def test_the_files_of_a_model_weigh_what_is_stated(written: Path, name: str) -> None:
    document = MODELS[name]
    files = (written / document["huggingface_repo_id"]).glob("*.safetensors")
    assert sum(f.stat().st_size for f in files) == document["x-files"]["weight_bytes"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_shards_are_cut_like_the_published_ones(written: Path, name: str) -> None:
    files = sorted((written / MODELS[name]["huggingface_repo_id"]).glob("*.safetensors"))
    assert [f.stat().st_size for f in files] == PUBLISHED[name]


def test_a_header_is_followed_by_exactly_its_tensors(written: Path) -> None:
    index = json.loads((written / "Qwen/Qwen3-32B/model.safetensors.index.json").read_text())
    seen = {}
    for name in set(index["weight_map"].values()):
        path = written / "Qwen/Qwen3-32B" / name
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__")
        ends = sorted(tuple(e["data_offsets"]) for e in entries.values())
        assert ends[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(ends))
        assert path.stat().st_size == 8 + length + ends[-1][1]
        seen |= dict.fromkeys(entries, name)
    assert seen == index["weight_map"]


def test_the_weights_take_no_room_on_the_disk(written: Path) -> None:
    files = [f for f in written.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) > 10**12
    assert sum(f.stat().st_blocks * 512 for f in files) < 2**27


def test_an_expert_model_lists_every_expert() -> None:
    names = {t.name for t in tensors_of(MODELS["deepseek-r1"]["x-files"]["config"])}
    assert len(names) == 91991
    assert "model.layers.61.mlp.experts.255.down_proj.weight_scale_inv" in names


def test_documents_point_at_the_directories_and_say_nothing_else(written: Path) -> None:
    documents = read_documents((written / "models.yaml").read_text(), "models.yaml")
    assert [d.name for d in documents] == list(MODELS)
    for d in documents:
        assert d.values["source"] == "local_path"
        assert (Path(d.values["local_path"]) / "config.json").is_file()
        assert "huggingface_repo_id" not in d.values


def test_a_size_that_the_tensors_do_not_explain_is_refused(tmp_path: Path) -> None:
    config = MODELS["qwen2.5-0.5b"]["x-files"]["config"]
    for size in (988097823, 998_100_000):
        with pytest.raises(Unexplained, match="come to 988097824 bytes"):
            write_model(tmp_path, SparseModel(config, weight_bytes=size))


def test_an_unknown_architecture_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UnknownArchitecture, match="LlamaForCausalLM"):
        tensors_of({"architectures": ["Nobody"]})


def test_a_tensor_larger_than_a_shard_stands_alone_and_headers_are_aligned() -> None:
    tensors = tensors_of(MODELS["qwen3-8b"]["x-files"]["config"])
    shards = shard(tensors, 10**9)
    assert [t for s in shards for t in s] == tensors
    assert all(len(s) == 1 or sum(t.nbytes for t in s) <= 10**9 for s in shards)
    assert all(len(header(s)) % 8 == 0 for s in shards)


def test_the_fleet_has_the_machines_that_it_promises() -> None:
    documents = read_documents((examples.folder() / "fleet.yaml").read_text(), "fleet.yaml")
    workers = [d for d in documents if d.kind.name == "Worker"]
    shapes = {(len(w.gpus or ()), (w.gpus or ({},))[0].get("vram_total", 0) // 2**30) for w in workers}
    assert shapes == {(8, 79), (4, 44), (1, 23), (1, 121)}
    assert sum(len(w.gpus or ()) for w in workers) == 53
    assert sum(bool(w.values.get("unified_memory")) for w in workers) == 1


def test_the_bursts_are_plain_statements() -> None:
    bursts = statements(examples.folder() / "instances.sql")
    assert len(bursts) == 6
    assert all("INSERT INTO model_instances" in b for b in bursts)
