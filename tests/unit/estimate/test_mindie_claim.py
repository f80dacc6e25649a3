"""MindIE's formula: the worked examples of the Ascend spec, section 4."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.engines.flags import parse_flags
from gpustackd.engines.parallelism import Parallel
from gpustackd.engines.registry import parallel_of
from gpustackd.errors import BadRow
from gpustackd.estimate.claim import GIB, MIB
from gpustackd.estimate.mindie import mindie_claim
from tests.specs import a_model, facts, known_models

KNOWN = known_models()
SEVEN_B = {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128,
           "max_position_embeddings": 32768}  # fmt: skip


def claim(config: dict[str, Any], weights: int | None, *flags: str, **columns: Any) -> Any:
    lora = columns.pop("lora_bytes", 0)
    spec = a_model(backend="MindIE", backend_parameters=list(flags), **columns)
    return mindie_claim(spec, facts(weights, config, lora_bytes=lora))


def test_seven_billion_parameters_with_the_defaults() -> None:
    found = claim(SEVEN_B, 15_231_271_864)
    assert (found.kv_cache, found.computation) == (469_762_048, 1_468_006_400)
    assert found.vram == 20_390_265_784
    assert found.ram == 512 * MIB


def test_seventy_two_billion_parameters_with_a_long_sequence() -> None:
    config = KNOWN["Qwen/Qwen2.5-72B-Instruct"]["hf_config"]
    found = claim(config, 145_412_407_296, "--max-seq-len=32768")
    assert (found.kv_cache, found.computation) == (10_737_418_240, 8_388_608_000)
    assert round(found.vram / GIB, 2) == 156.24


def test_seven_billion_parameters_with_a_head_of_its_own_for_each_query() -> None:
    config = {**SEVEN_B, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
              "max_position_embeddings": 4096}  # fmt: skip
    found = claim(config, round(12.55 * GIB))
    assert (found.kv_cache, found.computation) == (2_147_483_648, 13_421_772_800)
    assert round(found.vram / GIB, 2) == 30.05


def test_a_short_sequence_and_adapters() -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    found = claim(config, 50 * GIB, "--max-seq-len=512", "--max-batch-size=1", lora_bytes=4 * GIB)
    assert (found.kv_cache, found.computation) == (8_388_608, 2_097_152)
    assert found.vram == 61_213_769_728


def test_latent_attention_keeps_one_vector_of_a_token() -> None:
    config = KNOWN["deepseek-ai/DeepSeek-R1"]["hf_config"]
    assert round(claim(config, 0).kv_cache / GIB, 2) == 0.54


def test_quantised_cache_and_activations_take_a_byte_each() -> None:
    config = {**SEVEN_B, "quantize": "w8a8_dynamic", "quantization_config": {"kv_quant_type": "C8"}}
    found = claim(config, 7 * GIB)
    assert (found.kv_cache, found.computation) == (234_881_024, 734_003_200)
    assert found.vram == 11_706_302_464


VISION = {**SEVEN_B, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}


@pytest.mark.parametrize("version", ["2.2.rc1", "2.2.RC2", "2.2.0", "2.3", "3.0.0"])
def test_multimodal_models_are_corrected_from_this_version_on(version: str) -> None:
    found = claim(VISION, round(15.45 * GIB), backend_version=version)
    assert (found.kv_cache, found.computation) == (117_440_512, 23_488_102_400)
    assert round(found.vram / GIB, 2) == pytest.approx(40.43, abs=0.011)  # the spec rounds its terms first


def test_older_versions_are_not_corrected_and_an_unset_one_is_the_newest() -> None:
    assert claim(VISION, 0, backend_version="2.1.rc2").kv_cache == 469_762_048
    assert claim(VISION, 0).kv_cache == 117_440_512


@pytest.mark.parametrize(
    ("flags", "ram"),
    [
        (["--cpu-mem-size=4", "--max-preempt-count=1"], 4 * GIB + 512 * MIB),
        (["--cpu-mem-size=4"], 512 * MIB),
        ([], 512 * MIB),
    ],
)
def test_host_ram_follows_the_swap_space_where_preemption_is_on(flags: list[str], ram: int) -> None:
    assert claim(SEVEN_B, 0, *flags).ram == ram


def test_overrides_take_the_place_of_the_formula() -> None:
    env = {"GPUSTACK_MODEL_VRAM_CLAIM": "1000", "GPUSTACK_MODEL_RAM_CLAIM": "20"}
    assert (claim(SEVEN_B, 5, env=env).vram, claim(SEVEN_B, 5, env=env).ram) == (1000, 20)
    alone = claim(SEVEN_B, 5, env={"GPUSTACK_MODEL_RAM_CLAIM": "20"})
    assert alone.ram == 512 * MIB
    nonsense = claim(SEVEN_B, 5, env={"GPUSTACK_MODEL_VRAM_CLAIM": "much"})
    assert nonsense.vram == 5 + 3 * GIB + 469_762_048 + 1_468_006_400
    assert nonsense.warnings


def test_the_footprint_may_be_set() -> None:
    assert claim(SEVEN_B, 0, env={"RESERVED_MEMORY_GB": "5"}).footprint == 5 * GIB
    wrong = claim(SEVEN_B, 0, env={"RESERVED_MEMORY_GB": "-5"})
    assert wrong.footprint == 3 * GIB
    assert "RESERVED_MEMORY_GB" in wrong.warnings[0]


def test_the_type_on_the_command_line_counts() -> None:
    assert claim(SEVEN_B, 0, "--dtype=float32").kv_cache == 2 * 469_762_048
    assert claim({**SEVEN_B, "torch_dtype": "float32"}, 0).kv_cache == 2 * 469_762_048


def test_an_unknown_size_is_said() -> None:
    found = claim(SEVEN_B, None)
    assert found.vram is None
    assert found.unknown_because


@pytest.mark.parametrize(
    "flag",
    [
        "--max-seq-len=0",
        "--max-batch-size=-1",
        "--max-batch-size=5001",
        "--cpu-mem-size=-1",
        "--max-seq-len=x",
    ],
)
def test_figures_that_cannot_be_are_named(flag: str) -> None:
    with pytest.raises(BadRow, match=flag.partition("=")[0]):
        claim(SEVEN_B, 0, flag)


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ([], Parallel()),
        (["--tp=4"], Parallel(4, 1, 4)),
        (["--pp=2", "--tp=8"], Parallel(8, 2, 16)),
        (["--dp=4", "--tp=2"], Parallel(2, 1, 8)),
        (["--moe-ep=8", "--moe-tp=2"], Parallel(2, 1, 16)),
    ],
)
def test_a_model_is_divided_by_the_sizes_that_the_search_derives(flags: list[str], sizes: Parallel) -> None:
    assert parallel_of("MindIE", parse_flags(flags)) == sizes


def test_sizes_that_contradict_each_other_are_refused_in_an_estimate_too() -> None:
    with pytest.raises(BadRow, match="exclude each other"):
        parallel_of("MindIE", parse_flags(["--pp=2", "--dp=2"]))
