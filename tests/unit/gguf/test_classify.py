"""What a GGUF file is for, and whether it is a model at all."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts, GgufTensor
from gpustackd.estimate.evaluate import evaluate
from gpustackd.estimate.llama_cpp.classify import categories_of, distributable, is_image, not_a_model
from gpustackd.estimate.llama_cpp.need import gguf_need
from tests.specs import a_model


def facts(architecture: str = "llama", *names: str, kind: str = "model", **values: Any) -> GgufFacts:
    told = {f"{architecture}.{k}": v for k, v in values.items()}
    tensors = tuple(GgufTensor(name, (256, 256), 0, 4 * 256 * 256) for name in names)
    return GgufFacts(architecture, kind, values=told, tensors=tensors, lengths={"tokenizer.ggml.tokens": 9})


@pytest.mark.parametrize(
    ("found", "category"),
    [
        (facts(), "llm"),
        (facts("qwen3", pooling_type=0), "llm"),
        (facts("qwen3", pooling_type=3), "embedding"),
        (facts("qwen3", "cls.output.weight", pooling_type=4), "reranker"),
        (facts("bert"), "embedding"),
        (facts("bert", "cls.weight"), "reranker"),
        (facts("nomic-bert-moe", pooling_type=1), "embedding"),
        (facts("flux", "double_blocks.0.img_attn.qkv.weight"), "image"),
        (facts("llama", "model.diffusion_model.out.2.weight"), "image"),
    ],
)
def test_the_header_says_what_a_model_is_for(found: GgufFacts, category: str) -> None:
    assert categories_of(found) == (category,)


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (facts("clip", kind="mmproj"), "a multimodal projector"),
        (facts("clip"), "a multimodal projector"),
        (facts(kind="adapter"), "an adapter"),
        (facts(kind="imatrix"), "an importance matrix"),
        (facts("controlvector"), "a control vector"),
        (facts(kind="something"), "of the type something"),
    ],
)
def test_files_that_are_no_model_are_called_by_what_they_are(found: GgufFacts, what: str) -> None:
    assert not_a_model(found) == f"this file is {what}, not a model"


def test_an_image_model_without_its_encoders_cannot_be_served() -> None:
    alone = facts("flux", "double_blocks.0.img_attn.qkv.weight")
    assert not_a_model(alone) == (
        "this image model lacks text encoders and an autoencoder: it cannot be served by itself"
    )
    whole = ("model.diffusion_model.out.2.weight", "cond_stage_model.a", "first_stage_model.b")
    assert not_a_model(facts("sd1", *whole)) is None
    assert is_image(facts("sd1", *whole))


def test_models_may_be_spread_over_workers_and_adapters_may_not() -> None:
    assert distributable(facts())
    assert not distributable(facts(kind="adapter"))


def test_an_image_model_is_one_piece_with_its_buffers() -> None:
    whole = facts("sd1", "model.diffusion_model.out.2.weight", "cond_stage_model.a", "first_stage_model.b")
    spec = a_model(huggingface_filename="sd.gguf")
    need, asked = gguf_need(spec, ModelFacts(weight_bytes=1, gguf=whole))
    assert asked is not None
    assert asked.image
    assert asked.sizes.total_layers == 1
    none, one = asked.sizes.levels()
    assert need.vram == one.devices[0].vram > sum(t.size for t in whole.tensors)
    assert none.ram > one.ram
    two = asked.sizes.level(1, (1.0, 1.0))
    assert sum(d.vram > 0 for d in two.devices) == 2


def test_what_the_header_says_is_filled_into_an_empty_row() -> None:
    found = ModelFacts(weight_bytes=1, gguf=facts("bert"), categories=("embedding",))
    judged = evaluate(a_model(huggingface_filename="m.gguf"), found)
    assert not judged.problems
    assert dict(judged.writes) == {"categories": ["embedding"]}
    assert evaluate(a_model(huggingface_filename="m.gguf", categories=["llm"]), found).writes == {}


def test_gpus_picked_on_two_workers_ask_for_a_placement_over_both() -> None:
    picked = {"gpu_ids": ["a:cuda:0", "b:cuda:0"]}
    spec = a_model(huggingface_filename="m.gguf", categories=["llm"], gpu_selector=picked)
    found = ModelFacts(weight_bytes=1, gguf=facts(), categories=("llm",))
    assert dict(evaluate(spec, found).writes) == {"distributed_inference_across_workers": True}
    one = a_model(huggingface_filename="m.gguf", categories=["llm"], gpu_selector={"gpu_ids": ["a:cuda:0"]})
    assert evaluate(one, found).writes == {}
