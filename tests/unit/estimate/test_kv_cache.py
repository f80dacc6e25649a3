"""Cache per token and per sequence, for each way in which heads share keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.estimate.claim import GIB
from gpustackd.estimate.kv_cache import Attention, attention_of, kv_cache
from gpustackd.sources.formats.config_json import hyper_parameters
from tests.specs import known_models

KNOWN = known_models()


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**KNOWN[name]["hf_config"], **changes}


def cache(of: dict[str, Any], **how: Any) -> Any:
    found = kv_cache(hyper_parameters(of), **how)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("heads", "kv", "more", "kind"),
    [
        (32, 1, {}, Attention.MQA),
        (32, 8, {}, Attention.GQA),
        (32, 32, {}, Attention.MHA),
        (128, 128, {"q_lora_rank": 1536, "kv_lora_rank": 512}, Attention.MLA),
        (16, 16, {"kv_lora_rank": 512, "q_lora_rank": None}, Attention.MLA),
        (32, None, {}, Attention.MHA),
        (32, 5, {}, Attention.UNKNOWN),
        (None, 8, {}, Attention.UNKNOWN),
    ],
)
def test_the_kind_of_attention_follows_from_the_heads(
    heads: int | None, kv: int | None, more: dict[str, Any], kind: Attention
) -> None:
    told = {"num_attention_heads": heads, "num_key_value_heads": kv, **more}
    assert attention_of(hyper_parameters(told)) is kind


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", 2 * 4 * 128 * 28 * 2),
        ("Qwen/Qwen2.5-72B-Instruct", 2 * 8 * 128 * 80 * 2),
        ("deepseek-ai/DeepSeek-R1", 61 * 576 * 2),
        ("openai-community/gpt2", 2 * 12 * 64 * 12 * 2),
    ],
)
def test_bytes_of_one_token_are_those_of_the_published_dimensions(name: str, per_token: int) -> None:
    assert cache(config(name)).per_token == per_token


def test_kv_heads_are_split_over_tensor_parallel_gpus_and_then_repeated() -> None:
    qwen = config("Qwen/Qwen2.5-7B-Instruct")
    assert cache(qwen, tp=2).per_token == cache(qwen).per_token // 2
    assert cache(qwen, tp=4).per_token == cache(qwen, tp=28).per_token == cache(qwen).per_token // 4


def test_a_latent_cache_is_whole_on_every_gpu() -> None:
    deepseek = config("deepseek-ai/DeepSeek-R1")
    assert cache(deepseek, tp=8).per_token == cache(deepseek).per_token


def test_pipeline_stages_share_the_layers() -> None:
    qwen = config("Qwen/Qwen2.5-7B-Instruct")
    assert cache(qwen, pp=2).per_token == cache(qwen).per_token // 2


@pytest.mark.parametrize(
    ("dtype", "quantization", "element"),
    [
        (None, None, 2),
        ("fp8", None, 1),
        ("auto", None, 2),
        (None, {"quant_method": "gptq", "bits": 4}, 2),
        (None, {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, 1),
        (None, {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, 1),
    ],
)
def test_quantised_weights_keep_a_16_bit_cache_unless_the_cache_is_quantised_too(
    dtype: str | None, quantization: dict[str, Any] | None, element: int
) -> None:
    told = config("Qwen/Qwen2.5-7B-Instruct", quantization_config=quantization)
    assert cache(told, dtype=dtype).element_bytes == element


def gemma_27b(**changes: Any) -> dict[str, Any]:
    """The figures of field report FR-12: a window on five of six layers."""
    text = {
        "model_type": "gemma3_text", "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "head_dim": 128, "hidden_size": 5376, "sliding_window": 1024,
        "max_position_embeddings": 131072,
    }  # fmt: skip
    return {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, **changes}}


def test_windowed_layers_keep_their_window_and_no_more() -> None:
    long = cache(gemma_27b()).sequence(128_000)
    assert round(long / GIB, 1) == 10.2
    everything = cache(gemma_27b(sliding_window=None, sliding_window_pattern=None)).sequence(128_000)
    assert round(long / everything, 2) == 0.17
    assert cache(gemma_27b()).sequence(64_000) < long


def test_layer_types_say_which_layers_have_a_window_or_no_cache() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2 + ["linear_attention"] * 4
    told = {
        "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "sliding_window": 128, "layer_types": kinds,
    }  # fmt: skip
    found = cache(told)
    per_layer = 2 * 2 * 64
    assert (found.token_elements, found.window_elements) == (2 * per_layer, 2 * per_layer)
    assert found.sequence(10_000) < 3 * 10_016 * per_layer * 2


def test_a_window_that_is_switched_off_does_not_count() -> None:
    qwen = config("Qwen/Qwen2.5-7B-Instruct", sliding_window=4096, use_sliding_window=False)
    assert cache(qwen).window is None


def test_one_short_sequence_takes_a_whole_block() -> None:
    found = cache(config("Qwen/Qwen2.5-7B-Instruct"))
    assert found.sequence(1) == found.sequence(16) == 16 * found.per_token


def test_unknown_dimensions_give_no_figure() -> None:
    assert kv_cache(hyper_parameters({})) is None
    assert kv_cache(hyper_parameters({"num_hidden_layers": 4})) is None


def test_hybrid_models_cache_their_attention_layers_only() -> None:
    nemotron = {"num_hidden_layers": 10, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16,
                "hybrid_override_pattern": "M-M*-M-M*-"}  # fmt: skip
    assert cache(nemotron).token_elements == 2 * 2 * 8 * 16
    qwen_next = {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
                 "head_dim": 256, "full_attention_interval": 4}  # fmt: skip
    assert cache(qwen_next).token_elements == 12 * 2 * 2 * 256
