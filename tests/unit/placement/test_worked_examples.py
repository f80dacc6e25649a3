"""Worked examples of the selector specifications, to the byte: allocatable memory, vLLM, SGLang, custom
engines. Those of MindIE and of pools stand with their own tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.facts import HyperParameters
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Placement
from gpustackd.engines.custom import host_ram
from gpustackd.placement.selectors.base.gpu_sets import memory_groups
from tests.fleets import GIB, demand, fleet, model, occupy, place, refused

CARD_24, CARD_16 = 26_015_170_560, 17_171_480_576
CARD_80, CARD_141 = 85_899_345_920, 151_511_121_920
V_75, V_771, V_7B = int(75.23 * GIB), 771 * GIB, 20_425_009_884


def cards(text: str, size: int, **common: object) -> Fleet:
    """A fleet whose cards have exactly so many bytes."""
    on = fleet(text, **common)
    for gpu in list(on.gpu_rows.values()):
        reserve = (gpu.vram_total or 0) - (gpu.capacity or 0)
        on.put_gpu(replace(gpu, vram_total=size, capacity=size - reserve))
    return on


def need(vram: int, spec: object = None, **more: object) -> Demand:
    """A demand for exactly so many bytes."""
    made = demand(1, spec, **more)
    return replace(made, need=replace(made.need, vram=vram))


def booked(placed: Placement) -> list[tuple[int, ...]]:
    return [part.vram for part in placed.parts]


# -- allocatable memory (selectors 3.2) ------------------------------------------------------------------


def test_a_24_gib_card_with_1_gib_reserved_has_24_941_428_736_bytes() -> None:
    on = cards("1x1x4090-24", CARD_24, reserved=1)
    on.renew()
    assert int(on.free[0, 0]) == 24_941_428_736
    assert round(float(on.ratio[0, 0]) * 100, 2) == 95.87


def test_on_unified_memory_claims_and_both_reserves_come_from_one_pool() -> None:
    on = fleet("1x1xM2-187[uma,type=mps]")
    row, gpu = on.row(0), on.gpu_rows[1]
    on.put_worker(replace(row, ram_capacity=206_158_430_208 - 3 * GIB))
    on.put_gpu(replace(gpu, vram_total=200_789_721_088, capacity=200_789_721_088 - GIB))
    occupy(on, "w1", [0], 32_589_091_760 / GIB)
    on.renew()
    assert int(on.free_ram(np.array([0]))[0]) == 170_348_112_976
    assert int(on.free[0, 0]) == 167_126_887_504


def test_cards_of_10_11_20_22_and_40_gib_are_three_groups() -> None:
    free = np.array([[10, 11, 20, 22, 40]]) * GIB
    assert memory_groups(free, free > 0).tolist() == [[0, 0, 1, 1, 2]]


# -- vLLM (selectors 9.5, 7.2) ---------------------------------------------------------------------------


def test_a_model_of_7_billion_books_23_413_653_504_bytes_of_a_24_gib_card() -> None:
    assert booked(place(cards("1x1x4090-24", CARD_24), need(V_7B))) == [(23_413_653_504,)]


def test_four_cards_of_16_gib_offer_57_57_gib_and_are_too_small() -> None:
    assert 4 * int(CARD_16 * 0.9) == 4 * 15_454_332_518
    said = refused(cards("1x4x4080-16", CARD_16), need(V_75, heads=64)).message
    for fact in ("75.23 GiB", "63.97 GiB on 4 GPUs", "4 of its 4 GPUs", "57.57 of the 75.23 GiB needed"):
        assert fact in said


def test_two_of_eight_cards_of_80_gib_book_77_309_411_328_bytes_each() -> None:
    assert booked(place(cards("1x8xH100-80", CARD_80), need(V_75, heads=64))) == [(77_309_411_328,) * 2]


def test_eight_cards_of_141_gib_book_136_360_009_728_bytes_each() -> None:
    wanted = need(V_771, heads=128, vocabulary=129_280)
    assert booked(place(cards("1x8xH200-141", CARD_141), wanted)) == [(136_360_009_728,) * 8]


def test_two_workers_of_eight_cards_of_80_gib_hold_771_gib() -> None:
    wanted = need(V_771, heads=128, vocabulary=129_280)
    assert booked(place(cards("2x8xH100-80", CARD_80), wanted)) == [(77_309_411_328,) * 8] * 2


def test_an_embedding_model_books_1_588_014_354_bytes() -> None:
    wanted = need(1_588_014_354, categories=("embedding",))
    assert booked(place(cards("1x1x4090-24", CARD_24), wanted)) == [(1_588_014_354,)]


def test_tp_8_dp_2_dpl_1_take_both_workers() -> None:
    wanted = need(V_75, heads=64, backend_parameters=["--tp=8", "--dp=2", "--dpl=1"])
    placed = place(cards("2x8xH100-80", CARD_80), wanted)
    assert [len(p.gpu_ids) for p in placed.parts] == [8, 8]


def test_two_picked_cards_of_16_gib_are_over_committed_by_75_gib() -> None:
    spec = model(gpu_ids=["w1:cuda:0", "w1:cuda:1"], replicas=1, allow_overcommit=True)
    found = place(cards("1x2x4080-16", CARD_16), need(V_75, spec, heads=64))
    assert found.over_commit
    assert booked(found) == [(15_454_332_518,) * 2]
    text = found.warnings[0].text
    for fact in ("31.98 GiB free", "2 of 2", "28.79 GiB usable"):
        assert fact in text


# -- SGLang (selectors 10.2, 10.3) -----------------------------------------------------------------------

VIT = HyperParameters(
    num_attention_heads=28, is_multimodal=True, vision_heads=16,
    vision_config={"depth": 32, "hidden_size": 3584},
)  # fmt: skip
EAGLE = ("--tp-size=8", "--dp-size=8", "--enable-dp-attention", "--speculative-algorithm=EAGLE")


@pytest.mark.parametrize(
    ("text", "size", "flags", "hyper", "each"),
    [
        ("1x1x4080-16", CARD_16, (), None, 13_256_383_004),
        ("2x1x4080-16", CARD_16, ("--pp-size=2",), None, 13_136_182_640),
        ("1x4x4080-16", CARD_16, ("--tp-size=4",), VIT, 9_770_572_447),
        ("1x1x4090-24", CARD_24, (), None, 22_060_864_634),
        ("1x1xH100-80", CARD_80, (), None, 71_811_853_189),
        ("1x8xH100-80", CARD_80, ("--tp-size=8",), None, 70_351_564_308),
        ("1x8xH100-80", CARD_80, EAGLE, None, 48_876_727_828),
        ("1x1xH200-141", CARD_141, (), None, 137_420_587_581),
        ("1x1x910B-64[type=cann]", 68_719_476_736, (), VIT, 41_506_563_948),
    ],
)
def test_what_sglang_books_of_a_card(
    text: str, size: int, flags: tuple[str, ...], hyper: HyperParameters | None, each: int
) -> None:
    hyper = hyper or HyperParameters(num_attention_heads=64)
    wanted = need(GIB, engine=Engine.SGLANG, hyper=hyper, backend_parameters=flags)
    vram = [v for part in booked(place(cards(text, size), wanted)) for v in part]
    assert set(vram) == {each}


def test_two_picked_24_gib_cards_on_two_workers_book_21_687_579_967_bytes_each() -> None:
    spec = model(gpu_ids=["w1:cuda:0", "w2:cuda:0"])
    wanted = need(V_7B, spec, engine=Engine.SGLANG, heads=28)
    assert booked(place(cards("2x1x4090-24", 25_757_220_864), wanted)) == [(21_687_579_967,)] * 2


@pytest.mark.parametrize("text", ["1x4x4080-16", "2x2x4080-16"])
def test_75_gib_need_97_45_gib_of_cards_and_four_of_16_offer_49_38(text: str) -> None:
    said = refused(cards(text, CARD_16), need(V_75, engine=Engine.SGLANG, heads=64)).message
    for fact in ("0.772", "97.45 GiB", "49.38 of the 75.23 GiB needed"):
        assert fact in said


# -- custom engines (custom spec A.1, A.2, A.4) ----------------------------------------------------------


def test_a_custom_engine_takes_a_tenth_of_its_vram_as_ram_and_2_gib_at_least() -> None:
    assert [host_ram(v) for v in (V_7B, 27 * GIB, 700 * GIB)] == [2_147_483_648, 2_899_102_924, 70 * GIB]


@pytest.mark.parametrize(("share", "each"), [("0.9", 23_413_653_504), ("0.3", 12_455_405_158)])
def test_a_card_books_its_share_or_the_need_whichever_is_more(share: str, each: int) -> None:
    assert int(CARD_24 * 0.3) == 7_804_551_168
    flags = [f"--gpu-memory-utilization={share}"]
    wanted = need(12_455_405_158, engine=Engine.CUSTOM, backend_parameters=flags)
    assert booked(place(cards("1x1x4090-24", CARD_24), wanted)) == [(each,)]


def test_27_gib_on_four_cards_of_16_lie_on_two_of_them() -> None:
    v = int(26.99 * GIB)
    on = cards("1x4x4080-16", CARD_16)
    wanted = need(v, engine=Engine.CUSTOM)
    assert booked(place(on, wanted)) == [(-(-v // 2),) * 2]


def test_54_gib_on_one_card_tell_the_largest_card_and_no_zeros() -> None:
    said = refused(cards("1x1x4090-24", CARD_24), need(54 * GIB, engine=Engine.CUSTOM)).message
    assert "24.23 GiB" in said
    assert "0 GPUs" not in said
    assert " 0.00 GiB" not in said
