"""Dimensions out of `config.json` (estimate spec sections 7 and 8), wherever a repository nests them."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.errors import ModelUnreadable
from gpustackd.sources.formats.config_json import hyper_parameters, max_sequence_length, vision_heads


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"num_attention_heads": 64}, "vision_config": {"num_attention_heads": 25}},
        {"text_config": {"num_attention_heads": 64}, "vision_config": {"depth": 27}},
        {"llm_config": {"num_attention_heads": 64}, "vision_config": {"num_attention_heads": 25}},
        {"thinker_config": {"text_config": {"num_attention_heads": 64}, "vision_config": {"num_heads": 16}}},
        {"num_attention_heads": 64},
        {"text_config": {"num_attention_heads": 0}, "num_attention_heads": 64},
    ],
)
def test_heads_are_those_of_the_language_part(config: dict[str, Any]) -> None:
    """Field report FR-10."""
    assert hyper_parameters(config).num_attention_heads == 64


def test_the_other_dimensions_come_from_the_part_that_has_the_heads() -> None:
    nested = {"num_attention_heads": 8, "num_hidden_layers": 60, "num_key_value_heads": 2, "hidden_size": 512}
    found = hyper_parameters(
        {"llm_config": nested, "vision_config": {"num_hidden_layers": 3, "hidden_size": 7}}
    )
    assert (found.num_hidden_layers, found.num_key_value_heads, found.head_dim) == (60, 2, 64)


@pytest.mark.parametrize(
    ("vision", "heads"),
    [
        ({"num_attention_heads": 16}, 16),
        ({"num_heads": 16}, 16),
        ({"num_attention_heads": 25, "num_dummy_heads": 7}, 32),
        ({"num_heads": 16, "num_dummy_heads": -2}, 16),
        ({"num_attention_heads": "16", "num_heads": 12}, 12),
        ({"num_attention_heads": True}, None),
        ({"num_attention_heads": 0}, None),
        ({"depth": 27}, None),
        ({}, None),
    ],
)
def test_vision_heads_are_positive_integers_or_unknown(vision: dict[str, Any], heads: int | None) -> None:
    assert vision_heads(vision) == heads


def test_a_vision_part_that_says_little_is_no_error() -> None:
    found = hyper_parameters({"num_attention_heads": 8, "vision_config": {"depth": 27}})
    assert found.is_multimodal
    assert found.vision_config == {"depth": 27}
    assert not hyper_parameters({"num_attention_heads": 8}).is_multimodal


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"torch_dtype": None, "text_config": {"dtype": "float16", "num_attention_heads": 2}}, "float16"),
        ({"torch_dtype": "float32", "text_config": {"num_attention_heads": 2}}, "float32"),
        ({"torch_dtype": 16}, "bfloat16"),
        ({}, "bfloat16"),
    ],
)
def test_the_type_of_the_weights_has_two_names(config: dict[str, Any], dtype: str) -> None:
    assert hyper_parameters(config).torch_dtype == dtype


def test_names_of_older_families_mean_the_same() -> None:
    falcon = {"n_head": 71, "n_layer": 32, "hidden_size": 4544, "multi_query": True, "vocab_size": 65024}
    found = hyper_parameters(falcon)
    assert (found.num_attention_heads, found.num_hidden_layers, found.num_key_value_heads) == (71, 32, 1)
    mpt = {"n_heads": 32, "n_layers": 32, "d_model": 4096, "attn_config": {"kv_n_heads": 8}}
    assert (hyper_parameters(mpt).hidden_size, hyper_parameters(mpt).num_key_value_heads) == (4096, 8)


def test_families_that_leave_out_their_defaults_are_known() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    gemma = {"text_config": text, "vision_config": {"num_attention_heads": 16}}
    found = hyper_parameters(gemma)
    assert (found.num_attention_heads, found.num_key_value_heads, found.head_dim) == (8, 4, 256)
    assert (found.num_hidden_layers, found.window_layers) == (34, 29)


def test_kv_heads_that_are_not_stated_are_told_apart_from_a_single_one() -> None:
    silent, stated = ({"num_attention_heads": 12, **more} for more in ({}, {"num_key_value_heads": 1}))
    assert (hyper_parameters(silent).num_key_value_heads, hyper_parameters(silent).kv_heads_stated) == (
        1,
        False,
    )
    assert hyper_parameters(stated).kv_heads_stated


def test_architectures_of_a_text_part_override_those_of_the_root() -> None:
    config = {"architectures": ["Outer"], "text_config": {"architectures": ["Inner"]}}
    assert hyper_parameters(config).architectures == ("Inner",)
    assert hyper_parameters({"architectures": ["Outer"], "text_config": {}}).architectures == ("Outer",)


def test_experts_have_three_names_and_shared_ones_count_only_beside_them() -> None:
    assert hyper_parameters({"num_local_experts": 8}).moe_num_experts == 8
    found = hyper_parameters({"n_routed_experts": 256, "num_experts": 3, "n_shared_experts": 1})
    assert (found.moe_num_experts, found.moe_num_shared_experts) == (256, 1)
    assert hyper_parameters({"n_shared_experts": 1}).moe_num_shared_experts is None


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ({"max_position_embeddings": 4096, "n_positions": 1024}, 1024),
        ({}, 2048),
        ({"max_position_embeddings": 163840, "rope_scaling":
          {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}}, 163_840),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32_768),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 131_072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "factor": 32}}, 131_072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"factor": 2}}, 4096),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 1.55}}, 155),
        ({"max_position_embeddings": "many", "seq_length": 64}, 64),
        ({"model_max_length": 10**30}, 2**40),
    ],
)  # fmt: skip
def test_the_longest_sequence_follows_from_lengths_and_rope_scaling(
    text: dict[str, Any], length: int
) -> None:
    assert max_sequence_length(text) == length


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -3),
        ("num_hidden_layers", "thirty"),
        ("num_hidden_layers", 2.5),
        ("num_hidden_layers", True),
        ("num_hidden_layers", 10**4000),
        ("hidden_size", {"a": 1}),
        ("vocab_size", float("inf")),
        ("num_key_value_heads", 0),
        ("num_attention_heads", -1),
        ("kv_lora_rank", -5),
        ("kv_lora_rank", "x"),
    ],
)
def test_a_stated_dimension_that_is_none_is_an_error_that_names_it(key: str, value: Any) -> None:
    with pytest.raises(ModelUnreadable, match=key) as raised:
        hyper_parameters({"num_attention_heads": 8, key: value}, "repo/config.json")
    assert raised.value.code == "bad_config"
    assert not raised.value.retryable
    assert "repo/config.json" in raised.value.problem
    assert len(raised.value.problem) < 200


def test_an_absent_dimension_is_unknown_and_no_error() -> None:
    found = hyper_parameters({})
    assert (found.num_hidden_layers, found.num_attention_heads, found.head_dim) == (None, None, None)


def test_a_dimension_given_per_layer_is_unknown() -> None:
    assert hyper_parameters({"num_key_value_heads": [4, 8, 8]}).num_key_value_heads == 1
    assert hyper_parameters({"num_attention_heads": [4, 8]}).num_attention_heads is None


def test_whole_floats_are_numbers() -> None:
    assert hyper_parameters({"num_hidden_layers": 32.0}).num_hidden_layers == 32


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_attention_heads": 128, "thinker_config": {"text_config": {"num_attention_heads": 28}}}, 128),
        ({"num_attention_heads": 128, "text_config": {"num_attention_heads": 64}}, 64),
        ({"num_attention_heads": 128, "text_config": {"hidden_size": 64}}, 128),
        ({"num_attention_heads": 0, "thinker_config": {"text_config": {"num_attention_heads": 28}}}, 28),
        ({"text_config": {"num_attention_heads": 0}, "num_attention_heads": 16}, 16),
        ({"text_config": None, "llm_config": [], "num_attention_heads": 16}, 16),
        ({"thinker_config": {"num_attention_heads": 28}}, 28),
        ({}, None),
    ],
)
def test_heads_are_those_of_the_language_part_then_of_the_root_then_of_the_thinker(
    config: dict[str, Any], heads: int | None
) -> None:
    assert hyper_parameters(config).num_attention_heads == heads
