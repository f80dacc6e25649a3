"""The claim: estimate spec sections 4 and 5, and the RAM of custom engines (custom spec A.1)."""

from __future__ import annotations

import pytest

from gpustackd.engines.custom import host_ram
from gpustackd.estimate.claim import GIB, kv_cache_ram, override, vram_claim
from tests.specs import a_model, facts

EXAMPLES = [
    ("an LLM of 8 GiB", ["llm"], 8_589_934_592, 0, 12_455_405_158),
    ("an LLM of 7.6B parameters in bf16", ["llm"], 15_231_271_864, 0, 20_425_009_884),
    ("an LLM with adapters", ["llm"], 56 * GIB, 8 * GIB, 84_610_855_731),
    ("an embedding model of half a GiB", ["embedding"], 536_870_912, 0, 1_181_116_006),
    ("an embedding model counted twice", ["embedding"], 875_952_869, 0, 1_588_014_354),
    ("speech output", ["text_to_speech"], 4_294_967_296, 0, 13_421_772_800),
    ("an image pipeline", ["image"], 57_699_249_390, 0, 57_699_249_390),
    ("a model without categories is an LLM", [], 8_589_934_592, 0, 12_455_405_158),
]


@pytest.mark.parametrize(("what", "categories", "weights", "lora", "claim"), EXAMPLES)
def test_the_claim_is_that_of_the_worked_example(
    what: str, categories: list[str], weights: int, lora: int, claim: int
) -> None:
    found = vram_claim(a_model(categories=categories), facts(weights, lora_bytes=lora), categories)
    assert found.vram == claim, what


@pytest.mark.parametrize(
    ("claim", "total"), [(12_455_405_158, 12.89), (20_425_009_884, 21.14), (84_610_855_731, 87.56)]
)
def test_the_total_needed_at_a_share_is_that_of_the_worked_example(claim: int, total: float) -> None:
    assert round(int(claim / 0.9) / GIB, 2) == total


def test_an_override_is_used_as_it_stands_without_overhead_or_adapters() -> None:
    spec = a_model(env={"GPUSTACK_MODEL_VRAM_CLAIM": "28991029248"})
    assert vram_claim(spec, facts(None, lora_bytes=5 * GIB), ["llm"]).vram == 28_991_029_248


@pytest.mark.parametrize("raw", ["27 GiB", "-1", "1e9", "9" * 5000, str(2**63)])
@pytest.mark.parametrize("categories", [["llm"], ["image"]])
def test_an_override_that_is_no_number_of_bytes_is_ignored_with_a_warning(
    raw: str, categories: list[str]
) -> None:
    spec = a_model(env={"GPUSTACK_MODEL_VRAM_CLAIM": raw}, categories=categories)
    claim = vram_claim(spec, facts(8 * GIB), categories)
    assert claim.vram == vram_claim(a_model(), facts(8 * GIB), categories).vram
    assert "GPUSTACK_MODEL_VRAM_CLAIM" in claim.warnings[0]
    assert len(claim.warnings[0]) < 200


def test_an_unknown_size_is_never_taken_for_zero() -> None:
    claim = vram_claim(a_model(), facts(None, unknown_because="the hub is away"), ["llm"])
    assert claim.vram is None
    assert claim.unknown_because == "the hub is away"


def test_sizes_beyond_any_memory_are_refused_instead_of_overflowing() -> None:
    claim = vram_claim(a_model(), facts(2**62), ["llm"])
    assert claim.vram is None
    assert "cannot be real" in claim.unknown_because


def test_draft_weights_count_only_where_that_is_preferred() -> None:
    told = facts(8 * GIB, draft_bytes=GIB)
    plain = vram_claim(a_model(), told, ["llm"]).vram
    assert plain == 12_455_405_158
    assert vram_claim(a_model(), told, ["llm"], count_draft=True).vram == int(9 * GIB * 1.2) + 2 * GIB


def test_parts_of_a_claim_add_up_to_it() -> None:
    claim = vram_claim(a_model(), facts(7_777_777_777, lora_bytes=123_456_789), ["llm"])
    assert claim.weights is not None
    assert claim.weights + claim.lora + claim.allowance + claim.overhead == claim.vram


def test_ram_size_of_a_local_cache_is_checked_and_written() -> None:
    ram, _ = kv_cache_ram({"enabled": True, "ram_size": 8, "ram_ratio": 3.0})
    assert (ram.static, ram.check, ram.ratio) == (8_589_934_592, 8_589_934_592, None)


@pytest.mark.parametrize(
    ("extended", "claimed", "ram"),
    [
        ({"enabled": True, "ram_ratio": 2.0}, 23_413_653_504, 46_827_307_008),
        ({"enabled": True}, 2 * 77_309_411_328, 185_542_587_187),
        ({"enabled": True, "mode": "local", "ram_size": 0}, 2 * 77_309_411_328, 185_542_587_187),
    ],
)
def test_a_ratio_counts_from_what_is_claimed_on_the_worker(
    extended: dict[str, object], claimed: int, ram: int
) -> None:
    found, _ = kv_cache_ram(extended)
    assert found.check == 0
    assert found.ratio is not None
    assert int(claimed * found.ratio) == ram


@pytest.mark.parametrize(
    "extended",
    [None, {}, {"enabled": False, "ram_size": 8}, {"enabled": True, "mode": "shared", "ram_size": 8}],
)
def test_no_ram_is_claimed_without_a_local_cache(extended: dict[str, object] | None) -> None:
    ram, warnings = kv_cache_ram(extended)
    assert (ram.static, ram.ratio, warnings) == (None, None, ())


def test_a_cache_size_that_is_no_number_is_named() -> None:
    _, warnings = kv_cache_ram({"enabled": True, "ram_size": "eight"})
    assert "extended_kv_cache.ram_size" in warnings[0]


@pytest.mark.parametrize(
    ("vram", "ram"), [(20_425_009_884, 2_147_483_648), (27 * GIB, 2_899_102_924), (700 * GIB, 70 * GIB)]
)
def test_a_custom_engine_takes_a_tenth_of_its_vram_but_at_least_two_gib(vram: int, ram: int) -> None:
    assert host_ram(vram) == ram


def test_an_unset_override_is_no_override() -> None:
    assert override({}) == (None, ())
    assert override({"GPUSTACK_MODEL_VRAM_CLAIM": " "}) == (None, ())
