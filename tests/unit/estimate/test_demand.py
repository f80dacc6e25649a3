"""Which engine searches (selectors spec section 1) and for how much."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.demand import Engine
from gpustackd.errors import BadRow
from gpustackd.estimate.claim import GIB
from gpustackd.estimate.demand import build_demand
from tests.specs import a_model, facts, known_models

KNOWN = known_models()
QWEN = KNOWN["Qwen/Qwen2.5-7B-Instruct"]["hf_config"]
PART = {"type": "pool", "accelerator_partitioned_profile": "1g.10gb"}


@pytest.mark.parametrize(
    ("columns", "engine"),
    [
        ({}, Engine.VLLM),
        ({"backend": "vLLM"}, Engine.VLLM),
        ({"backend": "vLLM", "categories": ["image"]}, Engine.CUSTOM),
        ({"backend": "vLLM", "backend_parameters": ["--omni"]}, Engine.CUSTOM),
        ({"categories": ["text_to_speech"]}, Engine.CUSTOM),
        ({"categories": ["speech_to_text"]}, Engine.VLLM),
        ({"backend": "SGLang"}, Engine.SGLANG),
        ({"backend": "SGLang", "categories": ["image"]}, Engine.SGLANG),
        ({"backend": "MindIE"}, Engine.MINDIE),
        ({"backend": "VoxBox"}, Engine.CUSTOM),
        ({"backend": "Custom"}, Engine.CUSTOM),
        ({"backend": "my-engine"}, Engine.CUSTOM),
        ({"huggingface_filename": "model-Q4.gguf"}, Engine.GGUF),
        ({"gpu_type_selector": {"type": "pool"}}, Engine.WHOLE_CARD),
        (
            {"gpu_type_selector": {"type": "pool", "accelerator_sliced_memory_percentage": 0}},
            Engine.WHOLE_CARD,
        ),
        ({"gpu_type_selector": {"type": "pool", "accelerator_sliced_memory_percentage": 50}}, Engine.VGPU),
        ({"gpu_type_selector": PART}, Engine.VGPU),
        ({"gpu_type_selector": PART, "huggingface_filename": "m.gguf"}, Engine.VGPU),
    ],
)
def test_the_first_matching_row_names_the_engine(columns: dict[str, Any], engine: Engine) -> None:
    assert build_demand(a_model(**columns), facts(GIB, QWEN)).engine is engine


def test_a_role_without_accelerator_needs_ram_alone() -> None:
    router = build_demand(a_model(), facts(None), takes_accelerator=False)
    assert (router.engine, router.need.vram, router.need.ram_static) == (Engine.ROUTER, 0, 2 * GIB)
    declared = build_demand(a_model(), facts(None), takes_accelerator=False, role_memory=5 * GIB)
    assert declared.need.ram == 5 * GIB


def test_detected_categories_size_the_claim_where_the_row_has_none() -> None:
    bert = facts(400_000_000, KNOWN["BAAI/bge-base-en-v1.5"]["hf_config"], categories=("embedding",))
    assert build_demand(a_model(), bert).need.vram == int(400_000_000 * 1.2) + GIB // 2


def test_a_small_embedding_model_claims_its_weights_and_little_more() -> None:
    """Field report FR-08: never 0, never a share of the card."""
    bert = facts(400_000_000, KNOWN["BAAI/bge-base-en-v1.5"]["hf_config"], categories=("embedding",))
    claim = build_demand(a_model(categories=["embedding"]), bert).need.vram
    assert claim is not None
    assert 0.4 * GIB < claim <= 2.0 * GIB


@pytest.mark.parametrize(
    ("quantization", "weights", "low", "high"),
    [
        ({"quant_method": "gptq", "bits": 4}, 42_000_000_000, 39.1, 60),
        ({"quant_method": "awq", "bits": 4, "w_bit": 4}, 42_000_000_000, 39.1, 60),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
         42_000_000_000, 39.1, 60),
        ({"quant_method": "fp8", "fmt": "e4m3"}, 73_000_000_000, 67.9, 90),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 42_000_000_000, 39.1, 60),
        (None, 145_412_407_296, 135.4, 170),
    ],
)  # fmt: skip
def test_quantised_weights_are_sized_by_their_bytes(
    quantization: dict[str, Any] | None, weights: int, low: float, high: float
) -> None:
    """Field report FR-06."""
    config = {**KNOWN["Qwen/Qwen2.5-72B-Instruct"]["hf_config"], "torch_dtype": "float16",
              "quantization_config": quantization}  # fmt: skip
    need = build_demand(a_model(categories=["llm"]), facts(weights, config)).need
    assert need.vram is not None
    assert low * GIB <= need.vram <= high * GIB


def test_an_unknown_size_comes_with_its_reason() -> None:
    need = build_demand(a_model(), facts(None, QWEN, unknown_because="nobody answers")).need
    assert (need.vram, need.unknown_because) == (None, "nobody answers")


def test_image_pipelines_on_sglang_need_their_weights() -> None:
    spec = a_model(backend="SGLang", categories=["image"])
    assert build_demand(spec, facts(57_699_249_390, is_diffusers=True)).need.vram == 57_699_249_390


def test_custom_engines_need_ram_of_their_own_and_for_a_local_cache() -> None:
    cache = {"enabled": True, "ram_size": 4}
    plain = build_demand(a_model(backend="Custom"), facts(GIB)).need
    assert (plain.ram, plain.ram_static) == (2 * GIB, 2 * GIB)
    both = a_model(backend="Custom", extended_kv_cache=cache)
    assert build_demand(both, facts(GIB)).need.ram == 6 * GIB


def test_language_models_need_ram_for_a_local_cache_alone() -> None:
    assert build_demand(a_model(), facts(GIB, QWEN)).need.ram == 0
    fixed = build_demand(a_model(extended_kv_cache={"enabled": True, "ram_size": 8}), facts(GIB, QWEN)).need
    assert (fixed.ram, fixed.ram_static, fixed.ram_ratio) == (8 * GIB, 8 * GIB, None)
    ratio = build_demand(a_model(extended_kv_cache={"enabled": True}), facts(GIB, QWEN)).need
    assert (ratio.ram, ratio.ram_static, ratio.ram_ratio) == (0, None, 1.2)


def test_mindie_claims_by_its_own_formula() -> None:
    need = build_demand(a_model(backend="MindIE"), facts(15_231_271_864, QWEN)).need
    assert (need.vram, need.ram_static) == (20_390_265_784, GIB // 2)


def test_equal_models_make_equal_demands_and_other_sizes_do_not() -> None:
    spec = a_model()
    one, same, other = (build_demand(spec, facts(w, QWEN, digest=str(w))) for w in (GIB, GIB, 2 * GIB))
    assert one == same
    assert one.digest == same.digest != other.digest


def test_the_longest_sequence_goes_with_the_need() -> None:
    per_token = 2 * 4 * 128 * 28 * 2
    assert build_demand(a_model(), facts(GIB, QWEN)).need.sequence == 32768 * per_token
    short = a_model(backend_parameters=["--max-model-len", "4096", "--tensor-parallel-size=2"])
    assert build_demand(short, facts(GIB, QWEN)).need.sequence == 4096 * per_token


def test_quotes_that_do_not_close_are_an_error_of_the_row() -> None:
    with pytest.raises(BadRow, match="backend_parameters"):
        build_demand(a_model(backend="vLLM", backend_parameters=["--served-model-name 'x"]), facts(GIB, QWEN))
