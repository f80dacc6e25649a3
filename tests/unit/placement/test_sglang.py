"""SGLang: static fraction (selectors spec section 10.2), strategies (10.3), contradicting flags (10.1)."""

from __future__ import annotations

import pytest

from gpustackd.domain.demand import Engine
from gpustackd.domain.facts import HyperParameters
from gpustackd.domain.outcome import Cure
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.sglang import CardShape, static_fraction
from gpustackd.placement.selectors.base.gpu_sets import memory_groups
from tests.fleets import GIB, demand, fleet, model, occupy, place, refused, seats

MIB = 1024**2
VIT = {"depth": 32, "hidden_size": 3584}
EAGLE = ["--tp-size=8", "--dp-size=8", "--enable-dp-attention", "--speculative-algorithm=EAGLE"]


def sglang(need, spec=None, **more):
    return demand(need, spec, engine=Engine.SGLANG, **more)


@pytest.mark.parametrize(
    ("card", "shape", "flags", "vision", "reserved", "f"),
    [
        (16_376, {}, [], None, 3728, 0.772),
        (16_376, {"workers": 2}, [], None, 3856, 0.765),
        (16_376, {"per_worker": 2}, [], None, 3856, 0.765),
        (16_376, {}, ["--pp-size=2"], None, 3856, 0.765),
        (16_376, {}, ["--tp-size=4"], VIT, 4112, 0.569),
        (24_810, {}, [], None, 3760, 0.848),
        (24_564, {"per_worker": 1, "workers": 2}, [], None, 3888, 0.842),
        (81_920, {}, [], None, 13_440, 0.836),
        (81_920, {"per_worker": 8}, [], None, 14_848, 0.819),
        (81_920, {}, EAGLE, None, 35_328, 0.569),
        (144_492.27, {}, [], None, 13_440, 0.907),
        (65_536, {"npu": True}, [], VIT, 13_440, 0.604),
        (0, {}, [], None, 7104, 0.88),
        (2048, {}, [], None, 3728, -0.82),
        (30_720, {"npu": True}, [], None, 49_824, -0.622),
    ],
)
def test_worked_fractions(card, shape, flags, vision, reserved, f):
    found = static_fraction(parse_flags(flags), CardShape(round(card * MIB), **shape), vision)
    assert (found.reserved, found.value) == (reserved, f)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        (["--speculative-algorithm=STANDALONE"], 6144),
        (["--speculative-algorithm=NGRAM"], 0),
        (["--speculative-algorithm=EAGLE"], 2048),
        (["--enable-piecewise-cuda-graph", "--piecewise-cuda-graph-max-tokens=4096"], 1024),
        (["--chunked-prefill-size=-1"], -2048 * 1.5),
        (["--cuda-graph-max-bs=108"], 200),
    ],
)
def test_flags_reserve_more_or_less(flags, more):
    base = static_fraction(parse_flags([]), CardShape(16_376 * MIB), None)
    assert static_fraction(parse_flags(flags), CardShape(16_376 * MIB), None).reserved == base.reserved + more


def test_the_fraction_follows_the_smallest_card_and_changes_with_the_fleet():
    from dataclasses import replace

    from gpustackd.placement.decide import Searches
    from gpustackd.placement.search_cache import SearchCache

    on = fleet("1x1xH100-80")
    memo: Searches = SearchCache()
    assert place(on, sglang(20), n=1, memo=memo).vram_utilization == 0.836
    on.remove_instance(1)
    on.vram_allocated[:] = 0
    on.touch(0)
    small = fleet("2x1xA-16")
    on.put_worker(replace(small.row(1), name="other"))
    on.put_gpu(replace(small.gpu_rows[2], worker_id=2))
    assert place(on, sglang(20), n=2, memo=memo).vram_utilization == 0.772


def test_four_cards_of_16_do_not_hold_75_gib():
    said = refused(fleet("1x4x4080-15.9922"), sglang(75.23, heads=64)).message
    for fact in ("0.772", "97.45 GiB", "4 of its 4 GPUs", "49.38 of the 75.23 GiB"):
        assert fact in said


def test_two_workers_of_two_cards_do_not_either():
    said = refused(fleet("2x2x4080-15.9922"), sglang(75.23, heads=64)).message
    assert "w1, w2 (2 GPUs each) together offer 49.38 of the 75.23 GiB needed" in said


def test_several_workers_have_the_exact_world_size():
    wanted = sglang(100, model(backend_parameters=["--tp-size=16"]), heads=64)
    assert [len(p.gpu_ids) for p in place(fleet("3x8xH100-80"), wanted).parts] == [8, 8]
    wanted = sglang(100, model(backend_parameters=["--tp-size=12"]), heads=96)
    refused(fleet("3x8xH100-80"), wanted)


def test_cards_of_a_placement_are_about_equally_free():
    on = fleet("1x4xA-48")
    occupy(on, "w1", [0, 1], 6)
    wanted = sglang(60, model(backend_parameters=["--mem-fraction-static=0.8"]), heads=64)
    assert seats(place(on, wanted))[0][1] in ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("sizes", "groups"), [([10, 11, 20, 22, 40], [0, 0, 1, 1, 2]), ([40, 10, 22, 0, 11], [2, 0, 1, -1, 0])]
)
def test_memory_groups(sizes, groups):
    import numpy as np

    free = np.array([sizes]) * GIB
    assert memory_groups(free, np.ones(free.shape, bool))[0].tolist() == groups


def test_an_image_model_needs_all_of_its_memory_on_a_card_that_is_really_free():
    spec = model(categories=("image",))
    on = fleet("2x1xA-80")
    assert place(on, sglang(53.74, spec)).parts[0].vram == (int(53.74 * GIB),)
    occupy(on, "w1", [0], 30)
    occupy(on, "w2", [0], 30)
    assert "on each GPU used" in refused(on, sglang(53.74, spec), n=2).message


def test_several_gpus_of_an_image_model_hold_it_each():
    spec = model(categories=("image",), backend_parameters=["--tp-size=2"])
    placed = place(fleet("1x4xA-80"), sglang(53.74, spec))
    assert placed.parts[0].vram == (int(53.74 * GIB),) * 2


def test_a_card_too_small_for_the_reserve_is_said():
    said = refused(fleet("1x1xA-2"), sglang(1)).message
    assert "the engine reserves 3.64 GiB" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp-size=3"], "64 heads"),
        (["--tp-size=2", "--nnodes=3"], "--nnodes 3"),
        (["--pp-size=2", "--speculative-algorithm=EAGLE"], "exclude each other"),
        (["--pp-size=2", "--enable-mixed-chunk"], "exclude each other"),
        (["--dp-size=2", "--nnodes=2", "--tp-size=2"], "--enable-dp-attention"),
        (["--speculative-algorithm=EAGLE", "--enable-mixed-chunk"], "exclude each other"),
        (["--mem-fraction-static=0"], "between 0 and 1"),
        (["--mem-fraction-static=1.2"], "between 0 and 1"),
        (["--tp-size=-1"], "must be positive"),
    ],
)
def test_flags_that_contradict_each_other(flags, said):
    outcome = refused(fleet("1x8xH100-80"), sglang(10, model(backend_parameters=flags), heads=64))
    assert said in outcome.message
    assert outcome.cures == Cure.MODEL


def test_vision_heads_must_divide_unless_only_language_is_served():
    hyper = HyperParameters(num_attention_heads=64, vision_heads=25, vision_config={"depth": 24})
    flags = ["--tp-size=4"]
    wanted = sglang(100, model(backend_parameters=flags), hyper=hyper)
    assert "25 vision heads" in refused(fleet("1x8xH100-80"), wanted).message
    wanted = sglang(100, model(backend_parameters=[*flags, "--language-only"]), hyper=hyper)
    assert place(fleet("1x8xH100-80"), wanted).gpu_count == 4


def test_gpus_per_replica_without_ids_has_no_effect():
    from gpustackd.domain.model_spec import GpuSelector

    spec = model(gpu_selector=GpuSelector((), 4))
    assert place(fleet("1x8xH100-80"), sglang(10, spec)).gpu_count == 1


def test_data_parallel_attention_shares_the_gpus():
    spec = model(backend_parameters=["--tp-size=4", "--dp-size=4", "--enable-dp-attention"])
    assert place(fleet("1x8xH100-80"), sglang(100, spec, heads=64)).gpu_count == 4
