"""Which files are the weights: one format, counted once (estimate spec section 2)."""

from __future__ import annotations

import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats.weight_files import (
    components_of,
    is_diffusers_index,
    names_in_index,
    pick,
    pick_components,
)


def picked(*names: str, indexes: dict[str, tuple[str, ...]] | None = None) -> list[str]:
    return list(pick(dict.fromkeys(names, 1), indexes))


@pytest.mark.parametrize(
    ("present", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin", "model.pt"], ["pytorch_model.bin"]),
        (["a.pt", "b.pth"], ["a.pt", "b.pth"]),
        (["model.safetensors", "consolidated.safetensors"], ["model.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
          "consolidated-00001-of-00001.safetensors"],
         ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["consolidated.00.pth", "consolidated.01.pth"], ["consolidated.00.pth", "consolidated.01.pth"]),
        (["model.safetensors", "consolidated.00.pth"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (["model.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
         ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.bin"], ["pytorch_model.bin"]),
        (["pytorch_model.bin", "optimizer.pt", "rng_state_0.pth"], ["pytorch_model.bin"]),
        (["model.SAFETENSORS", "config.json", "model.onnx"], []),
        (["encoder.safetensors", "decoder.safetensors"], ["decoder.safetensors", "encoder.safetensors"]),
        ([], []),
    ],
)  # fmt: skip
def test_one_format_is_picked_and_nothing_twice(present: list[str], chosen: list[str]) -> None:
    assert picked(*present) == chosen


def test_an_index_goes_before_the_listing() -> None:
    present = ["model-1.safetensors", "model-2.safetensors", "extra.safetensors"]
    index = {"model.safetensors.index.json": ("model-1.safetensors", "model-2.safetensors")}
    assert picked(*present, indexes=index) == ["model-1.safetensors", "model-2.safetensors"]


def test_an_index_of_another_format_does_not_change_the_choice() -> None:
    index = {"pytorch_model.bin.index.json": ("pytorch_model-1.bin",)}
    assert picked("model.safetensors", "pytorch_model-1.bin", indexes=index) == ["model.safetensors"]


def test_a_file_that_the_index_names_and_that_is_missing_makes_the_model_incomplete() -> None:
    index = {"model.safetensors.index.json": ("a.safetensors", "b.safetensors", "c.safetensors")}
    with pytest.raises(ModelUnreadable, match=r"b\.safetensors and 1 more") as raised:
        picked("a.safetensors", indexes=index)
    assert (raised.value.code, raised.value.retryable) == ("incomplete", True)


def test_a_missing_shard_makes_the_model_incomplete() -> None:
    with pytest.raises(ModelUnreadable, match="1 of 3 files"):
        picked("model-00001-of-00003.safetensors")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.bin", "", "..", 7, None])
def test_an_index_that_names_anything_but_files_next_to_it_is_refused(name: object) -> None:
    with pytest.raises(ModelUnreadable) as raised:
        names_in_index({"weight_map": {"t": name}}, "model.safetensors.index.json")
    assert raised.value.code == "bad_index"


def test_an_index_names_each_file_once() -> None:
    told = {"metadata": {}, "weight_map": {"a": "1.bin", "b": "2.bin", "c": "1.bin"}}
    assert names_in_index(told, "x") == ("1.bin", "2.bin")
    with pytest.raises(ModelUnreadable, match="weight_map"):
        names_in_index({}, "x")


PIPELINE = {
    "_class_name": "QwenImagePipeline", "_diffusers_version": "0.35",
    "scheduler": ["diffusers", "Flow"], "text_encoder": ["transformers", "X"],
    "transformer": ["diffusers", "Y"], "vae": ["diffusers", "Z"], "safety_checker": [None, None],
    "feature_extractor": None,
}  # fmt: skip


def test_components_are_keys_that_name_something() -> None:
    assert components_of(PIPELINE) == ("scheduler", "text_encoder", "transformer", "vae")
    assert components_of([PIPELINE, {"x": 1}]) == components_of(PIPELINE)
    with pytest.raises(ModelUnreadable):
        components_of("text")


def test_a_pipeline_is_told_by_its_version_key() -> None:
    assert is_diffusers_index(PIPELINE)
    assert is_diffusers_index([{}, PIPELINE])
    assert not is_diffusers_index({"a": 1})
    assert not is_diffusers_index(None)


def test_a_pipeline_counts_one_format_of_each_component_and_nothing_beside_them() -> None:
    sizes = {
        "unet.safetensors": 100, "transformer/a-00001-of-00002.safetensors": 1,
        "transformer/a-00002-of-00002.safetensors": 2, "transformer/old.bin": 50,
        "vae/diffusion_pytorch_model.safetensors": 4, "vae/diffusion_pytorch_model.fp16.safetensors": 60,
        "text_encoder/sub/model.safetensors": 8, "safety_checker/model.safetensors": 70, "assets/x.pt": 80,
        "scheduler/scheduler_config.json": 90,
    }  # fmt: skip
    chosen = pick_components(sizes, components_of(PIPELINE), {})
    assert sum(sizes[name] for name in chosen) == 1 + 2 + 4 + 8
