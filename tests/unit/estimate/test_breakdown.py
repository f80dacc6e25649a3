"""What `gpustackd estimate` shows: parts, per GPU, one longest sequence, warnings."""

from __future__ import annotations

from typing import Any

from gpustackd.domain.facts import ModelFacts
from gpustackd.estimate.breakdown import breakdown
from gpustackd.estimate.claim import GIB
from tests.specs import a_model, facts, known_models

KNOWN = known_models()
QWEN = KNOWN["Qwen/Qwen2.5-7B-Instruct"]["hf_config"]
W = 15_231_271_856
PER_TOKEN = 2 * 4 * 128 * 28 * 2


def of(
    *flags: str, weights: int | None = W, config: Any = QWEN, booked: int | None = None, **columns: Any
) -> Any:
    spec = a_model(backend_parameters=list(flags), **columns)
    return breakdown(spec, facts(weights, config, categories=("llm",)), booked=booked)


def test_the_parts_of_one_gpu() -> None:
    found = of()
    assert found.per_gpu.weights == W
    assert found.per_gpu.kv_per_token == PER_TOKEN
    assert found.per_gpu.kv_sequence == 32768 * PER_TOKEN
    assert 0.3 * GIB < found.per_gpu.compute < 2 * GIB
    assert 0.5 * GIB < found.per_gpu.overhead < 1.5 * GIB


def test_tensor_parallel_gpus_share_weights_and_cache() -> None:
    one, four = of(), of("--tensor-parallel-size=4")
    assert four.per_gpu.weights == -(-W // 4)
    assert four.per_gpu.kv_per_token == PER_TOKEN // 4
    assert four.per_gpu.compute < one.per_gpu.compute
    assert four.per_gpu.overhead > one.per_gpu.overhead
    assert four.parts["weights"] == W
    assert four.parts["kv_cache"] == one.parts["kv_cache"]


def test_a_shorter_length_and_a_smaller_cache_type_take_less() -> None:
    assert of("--max-model-len", "4k").per_gpu.kv_sequence == 4000 * PER_TOKEN
    assert of("--max-model-len", "4K").max_len == 4096
    assert of("--kv-cache-dtype=fp8").per_gpu.kv_per_token == PER_TOKEN // 2


def test_sglang_names_its_flags_otherwise() -> None:
    found = of("--context-length=1024", "--tp-size=2", "--kv-cache-dtype=fp8_e5m2", backend="SGLang")
    assert (found.max_len, found.parallel.tp) == (1024, 2)
    assert found.per_gpu.kv_per_token == PER_TOKEN // 4


def test_a_share_that_cannot_hold_one_sequence_is_said() -> None:
    tight = of(booked=17 * GIB)
    assert any("one sequence of 32768 tokens" in w for w in tight.warnings)
    assert not of(booked=int(0.9 * 24 * GIB)).warnings


def test_a_long_model_warns_against_its_own_claim() -> None:
    long = of(config={**QWEN, "max_position_embeddings": 1_000_000})
    assert any("one sequence of 1000000 tokens" in w for w in long.warnings)


def test_encoders_keep_no_cache() -> None:
    bert = KNOWN["BAAI/bge-base-en-v1.5"]["hf_config"]
    found = breakdown(a_model(categories=["embedding"]), facts(437_951_328, bert))
    assert found.per_gpu is not None
    assert (found.per_gpu.kv_per_token, found.parts["kv_cache"]) == (0, 0)


def test_an_unknown_size_leaves_the_parts_out_and_says_why() -> None:
    found = breakdown(a_model(), facts(None, QWEN, unknown_because="the hub is away"))
    assert (found.weights, found.claim_vram, found.parts, found.per_gpu) == (None, None, {}, None)
    assert any("the hub is away" in w for w in found.warnings)


def test_the_shape_for_scripts_is_that_of_the_contract() -> None:
    told = of().as_json()
    assert told["source"] == "huggingface"
    assert told["backend"] == "vLLM"
    assert told["architecture"] == "Qwen2ForCausalLM"
    assert told["categories"] == ["llm"]
    assert told["weights"] == W
    assert told["claim"] == {"vram": int(W * 1.2) + 2 * GIB, "ram": 0}
    assert {"weights", "kv_cache", "compute", "overhead"} <= told["parts"].keys()
    assert told["warnings"] == []


def test_experts_make_the_step_wider_than_one_of_them() -> None:
    moe = KNOWN["Qwen/Qwen3-30B-A3B"]["hf_config"]
    told = breakdown(a_model(), facts(61_064_245_248, moe, categories=("llm",)))
    fewer = breakdown(
        a_model(), facts(61_064_245_248, {**moe, "num_experts_per_tok": 2}, categories=("llm",))
    )
    assert told.per_gpu is not None
    assert fewer.per_gpu is not None
    assert told.per_gpu.compute > fewer.per_gpu.compute > 0


def test_adapters_are_a_part_of_their_own() -> None:
    found = breakdown(a_model(), facts(W, QWEN, lora_bytes=GIB, categories=("llm",)))
    assert found.parts["lora"] == GIB
    assert found.per_gpu is not None
    assert found.per_gpu.weights == W + GIB


def test_the_architecture_is_named_for_models_without_dimensions_too() -> None:
    config = {"architectures": ["Qwen3TTSForConditionalGeneration"]}
    found = ModelFacts(4 * GIB, config=config, categories=("text_to_speech",))
    assert breakdown(a_model(), found).architecture == "Qwen3TTSForConditionalGeneration"
