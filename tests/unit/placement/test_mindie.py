"""MindIE on Ascend NPUs: one worker, several workers, hand-picked NPUs (Ascend spec sections 6 to 10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.facts import HyperParameters
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow
from gpustackd.domain.outcome import Check, Cure, Placed
from gpustackd.placement.search_cache import SearchCache
from tests import fleets
from tests.fleets import GIB, ask, model, occupy, place, refused, seats


def npus(text: str, **common: object) -> Fleet:
    """A fleet whose cards are NPUs that are linked to each other."""
    on = fleets.fleet(text, **{"type": "cann", **common})
    for gpu in list(on.gpu_rows.values()):
        on.put_gpu(replace(gpu, network={"status": "up", "inet": f"10.1.{gpu.worker_id}.{gpu.index}"}))
    return on


def mindie(
    gib: float, *flags: str, heads: int = 64, vocabulary: int | None = None, **fields: object
) -> Demand:
    spec = model(backend="MindIE", backend_parameters=flags, **fields)
    hyper = HyperParameters(num_attention_heads=heads, vocab_size=vocabulary, max_sequence_length=32768)
    return fleets.demand(gib, spec, engine=Engine.MINDIE, hyper=hyper, ram=0.5)


# -- worked examples ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("fraction", "booked"), [("0.8", 54_975_581_388), ("0.5", 34_359_738_368)])
def test_a_fraction_of_each_npu_is_booked_whatever_the_model_needs(fraction, booked):
    placed = place(npus("1x1x910B-64"), mindie(18.99, f"--npu-memory-fraction={fraction}"))
    assert placed.parts[0].vram == (booked,)
    assert placed.vram_utilization == float(fraction)
    assert placed.parts[0].ram == GIB // 2


@pytest.mark.parametrize(("need", "count"), [(18.99, 1), (51.3, 2), (156.24, 4)])
def test_as_few_npus_are_taken_as_hold_the_model_and_divide_it(need, count):
    on = npus("1x8x910B-64")
    assert place(on, mindie(need)).gpu_count == count


def test_57_gib_do_not_fit_on_one_npu_and_the_message_has_the_figures():
    outcome = refused(npus("1x1x910B-64"), mindie(57.01, distributed_inference_across_workers=False))
    for fact in ("57.01 GiB", "0.50 GiB of RAM", "npu-memory-fraction 0.8", "71.26 GiB", "80 %",
                 "with 1 of its 1 NPUs: 51.20 of the 57.01 GiB needed",
                 "distributed inference across workers is off"):  # fmt: skip
        assert fact in outcome.message
    assert outcome.reasons[1].code == "fit.one_worker"
    assert outcome.reasons[1].params["offer_gib"] == 51.2


def test_650_gib_take_two_workers_of_eight_npus():
    on = npus("2x8x910B-64")
    placed = place(on, mindie(650, heads=128))
    assert [len(p.gpu_ids) for p in placed.parts] == [8, 8]
    assert sum(v for p in placed.parts for v in p.vram) == 16 * 54_975_581_388
    assert [p.ram for p in placed.parts] == [GIB // 2] * 2
    assert [p.total_gpus for p in placed.parts] == [None, 8]
    assert placed.mode == "initialize_later"
    assert placed.strategy == "many_workers"


def test_tensor_parallelism_of_two_takes_two_workers_of_one_npu():
    placed = place(npus("2x1x910B-64"), mindie(60, "-tp", "2"))
    assert sorted(seats(placed)) == [("w1", (0,)), ("w2", (0,))]


def test_three_pipeline_stages_take_one_npu_on_each_of_three_workers():
    wanted = mindie(20, "-pp", "3", "--npu-memory-fraction", "0.5")
    placed = place(npus("3x1x910B-64"), wanted)
    assert sorted(seats(placed)) == [("w1", (0,)), ("w2", (0,)), ("w3", (0,))]
    assert {v for p in placed.parts for v in p.vram} == {34_359_738_368}


def test_the_message_of_several_workers_names_the_best_combination():
    on = npus("2x4x910B-64 + 2x2x910B-64")
    outcome = refused(on, mindie(156.24, "--npu-memory-fraction=0.2"))
    for fact in ("156.24 GiB", "781.20 GiB", "20 %",
                 "w1, w2 (4 NPUs each) together offer 102.40 of the 156.24 GiB needed",
                 "you can still select GPUs by hand"):  # fmt: skip
        assert fact in outcome.message
    best = outcome.reasons[-1]
    assert (best.code, best.params["names"], best.params["offer_gib"]) == (
        "fit.many_workers",
        ["w1", "w2"],
        102.4,
    )


def test_a_tensor_parallel_size_that_the_vocabulary_does_not_divide_by_is_the_whole_answer():
    outcome = refused(npus("1x8x910B-64"), mindie(20, "-tp", "4", vocabulary=50257))
    assert "50257 vocabulary entries cannot be split evenly by 4" in outcome.message
    assert outcome.cures == Cure.MODEL


# -- one worker ----------------------------------------------------------------------------------------


def test_the_freest_npus_of_a_worker_are_taken_first():
    on = npus("1x4x910B-64")
    occupy(on, "w1", [0, 2], 10)
    assert seats(place(on, mindie(60, "--npu-memory-fraction=0.5"))) == [("w1", (1, 3))]


def test_an_npu_fits_when_its_bytes_do_though_its_share_is_a_hair_less():
    on = npus("1x1x910B-64")
    odd = 64 * GIB + 1
    on.put_gpu(replace(on.gpu_rows[1], vram_total=odd, capacity=odd, vram_allocated=odd - odd // 2))
    placed = place(on, mindie(20, "--npu-memory-fraction=0.5"))
    assert placed.parts[0].vram == (odd // 2,)


def test_a_world_size_is_taken_exactly_though_fewer_would_hold_the_model():
    on = npus("1x8x910B-64")
    assert place(on, mindie(20, "-dp", "2", "-tp", "2")).gpu_count == 4
    assert "the model needs 4 NPUs" in refused(npus("1x3x910B-64"), mindie(20, "-tp", "4")).message


def test_other_cards_of_a_worker_are_left_alone():
    on = npus("1x2x910B-64")
    for n in range(2):
        on.put_gpu(
            GpuRow(id=10 + n, worker_id=1, index=n, type="cuda", vram_total=80 * GIB, capacity=80 * GIB)
        )
    placed = place(on, mindie(100))
    assert (placed.parts[0].gpu_type, placed.parts[0].gpu_ids) == ("cann", (1, 2))
    assert "2 workers have no NPU" in refused(fleets.fleet("2x8xH100-80"), mindie(20)).message


def test_workers_passed_over_for_ram_or_for_the_fraction_are_told_apart():
    on = npus("2x1x910B-64 + 1x1x910B-64[ram=0.25]")
    for name in ("w1", "w2"):
        occupy(on, name, [0], 20)
    outcome = refused(on, mindie(20))
    assert "not enough RAM on 1 worker; w3 has the most free, 0.25 of the 0.50 GiB needed" in outcome.message
    assert (
        "2 workers have no NPU with 0.8 of its memory free; w1:0 has the most free, 44.00 of the 51.20"
        in outcome.message
    )
    assert {r.code for r in outcome.reasons} >= {"fit.ram", "fit.fraction"}
    assert Cure.CAPACITY in outcome.cures


def test_where_every_worker_is_away_nothing_is_said_of_npus():
    outcome = refused(npus("2x8x910B-64[state=NOT_READY]"), mindie(20))
    assert {r.filter for r in outcome.reasons} == {"status"}


def test_divisibility_that_failed_is_said():
    outcome = refused(npus("1x3x910B-64"), mindie(150))
    assert "3 NPUs would hold it, but 64 heads cannot be split evenly over 3 GPUs" in outcome.message


def test_a_model_without_a_configuration_cannot_be_served():
    spec = model(backend="MindIE", categories=("image",))
    wanted = fleets.demand(20, spec, engine=Engine.MINDIE)
    wanted = replace(wanted, facts=replace(wanted.facts, hyper=None))
    assert "no sequence length" in refused(npus("1x1x910B-64"), wanted).message


def test_npus_of_unknown_memory_closed_and_over_committed_ones_are_not_used():
    for text in ("1x1x910B-64[unknown]", "1x1x910B-64[closed]"):
        refused(npus(text), mindie(20))


# -- several workers -----------------------------------------------------------------------------------


def test_no_more_workers_are_taken_than_hold_the_model():
    on = npus("4x8x910B-64")
    assert len(place(on, mindie(650, heads=128)).parts) == 2


def test_a_third_worker_does_not_spoil_two_that_serve():
    """24 NPUs do not divide 128 heads."""
    on = npus("3x8x910B-64")
    assert len(place(on, mindie(650, heads=128)).parts) == 2


def test_fewest_workers_come_before_fewest_npus_of_each():
    on = npus("16x8x910B-64")
    wanted = mindie(650, heads=128)
    assert [len(p.gpu_ids) for p in place(on, wanted).parts] == [8, 8]


def test_workers_with_different_npus_add_up():
    on = npus("1x8x910B-64 + 1x8x910B-32 + 1x4x910B-64")
    placed = place(on, mindie(500, heads=128))
    assert {p.worker_name for p in placed.parts} == {"w1", "w2"}
    assert sum(v for p in placed.parts for v in p.vram) >= 500 * GIB


def test_a_worker_with_too_little_ram_is_passed_over():
    on = npus("1x8x910B-64[ram=0.25] + 2x8x910B-64")
    assert {p.worker_name for p in place(on, mindie(650, heads=128)).parts} == {"w2", "w3"}
    assert seats(place(npus("1x1x910B-64[ram=0.25] + 1x1x910B-64"), mindie(20))) == [("w2", (0,))]


def test_npus_need_a_link_for_several_workers_and_none_for_one():
    on = fleets.fleet("2x8x910B-64", type="cann")
    outcome = refused(on, mindie(650, heads=128))
    assert "2 workers have no NPU with a working network link" in outcome.message
    assert place(on, mindie(300)).gpu_count == 8


@pytest.mark.parametrize(
    "network", [None, {"status": "down", "inet": "10.0.0.1"}, {"status": "up", "inet": ""}]
)
def test_an_npu_without_a_link_is_not_taken_for_several_workers(network):
    on = npus("2x3x910B-64")
    on.put_gpu(replace(on.gpu_rows[1], network=network))
    placed = place(on, mindie(180, "--tensor-parallel-size=4"))
    by_worker = dict(seats(placed))
    assert by_worker["w1"] == (1, 2)
    assert len(by_worker["w2"]) == 2


def test_a_worker_takes_part_in_one_distributed_instance_only():
    on = npus("2x8x910B-64")
    occupy(on, "w1", [0], 1, instance=50, backend="mindie")
    occupy(on, "w2", [0], 1, instance=50, backend="mindie")
    outcome = refused(on, mindie(650, heads=128))
    assert "2 workers already run another distributed instance" in outcome.message
    assert place(on, mindie(300)).gpu_count == 8


def test_distribution_that_is_off_keeps_a_model_on_one_worker():
    on = npus("2x8x910B-64")
    outcome = refused(on, mindie(650, heads=128, distributed_inference_across_workers=False))
    assert all(r.code != "fit.many_workers" for r in outcome.reasons)


# -- addresses and hand-picked NPUs ----------------------------------------------------------------------


def test_addresses_are_those_of_the_npus_taken_in_their_order():
    on = npus("1x4x910B-64")
    on.put_gpu(replace(on.gpu_rows[3], network={"status": "down", "inet": "10.1.1.2"}))
    placed = place(on, mindie(156, heads=64))
    assert placed.parts[0].gpu_indexes == (0, 1, 2, 3)
    assert placed.parts[0].gpu_addresses == ("10.1.1.0", "10.1.1.1", "-.-.-.-", "10.1.1.3")


def test_hand_picked_npus_carry_only_their_own_addresses():
    on = npus("1x8x910B-64")
    ids = [f"w1:cann:{i}" for i in (5, 2, 7)]
    placed = place(on, mindie(20, gpu_ids=ids, per_replica=1))
    (index,) = placed.parts[0].gpu_indexes
    assert index in (2, 5, 7)
    assert placed.parts[0].gpu_addresses == (f"10.1.1.{index}",)
    assert placed.parts[0].vram == (54_975_581_388,)


def test_hand_picked_npus_over_two_workers_book_the_fraction_on_each():
    on = npus("2x8x910B-64")
    wanted = mindie(30, "--npu-memory-fraction=0.8", gpu_ids=["w1:cann:0", "w2:cann:0"], per_replica=2)
    placed = place(on, wanted)
    assert seats(placed) == [("w1", (0,)), ("w2", (0,))]
    assert [p.vram for p in placed.parts] == [(54_975_581_388,)] * 2
    assert placed.check is Check.FITS


def test_a_world_size_that_contradicts_the_selection_is_named():
    wanted = mindie(30, "-dp", "4", "-tp", "8", gpu_ids=["w1:cann:0", "w1:cann:1"], per_replica=2)
    said = refused(npus("1x8x910B-64"), wanted).message
    assert "2 GPUs are selected per replica, but tp/dp ask for 32" in said


def test_over_commit_of_hand_picked_npus_says_what_they_offer():
    ids = [f"w{w}:cann:{i}" for w in range(1, 5) for i in (0, 2)]
    on = npus("4x4x910B-64")
    for w in range(1, 5):
        occupy(on, f"w{w}", range(4), 25.6, instance=900 + w)
    wanted = mindie(156.24, "--npu-memory-fraction=0.1", gpu_ids=ids, per_replica=8)
    outcome = refused(on, wanted)
    for fact in ("1562.40 GiB", "307.20 GiB free", "8 of 8", "30.72 GiB"):
        assert fact in outcome.message


# -- kept results ------------------------------------------------------------------------------------

NEEDS = (19.0, 60.0, 156.0, 300.0, 500.0)
TERMS = ("1x8x910B-64", "1x4x910B-32", "2x2x910B-64", "1x1x910B-64")


@given(
    st.lists(st.sampled_from(TERMS), min_size=1, max_size=4),
    st.lists(st.sampled_from(range(len(NEEDS))), min_size=1, max_size=8),
    st.sampled_from([(), ("-tp", "4"), ("-pp", "2"), ("-dp", "2")]),
)
def test_kept_results_equal_fresh_ones_and_every_place_holds_the_model(terms, asked, flags):
    on = npus(" + ".join(terms))
    memo: SearchCache = SearchCache()
    wanted = [mindie(need, *flags, heads=128, n=n) for n, need in enumerate(NEEDS)]
    for n, which in enumerate(asked):
        demand = wanted[which]
        kept = ask(on, demand, name=f"m-{n}", n=n, memo=memo)
        assert kept == ask(on, demand, name=f"m-{n}", n=n)
        if not isinstance(kept, Placed):
            continue
        placement = kept.placement
        assert sum(v for p in placement.parts for v in p.vram) >= demand.need.vram
        assert placement.gpu_count == {"-tp": 4, "-pp": 2, "-dp": 2}[flags[0]] if flags else True
        assert 128 % placement.gpu_count == 0
        for part in placement.parts:
            for gpu, vram in zip(part.gpu_ids, part.vram, strict=True):
                assert vram <= on.free_vram()[on.slot[gpu]]
        on.assume(placement, n, demand.spec.id)


@given(
    st.lists(st.sampled_from(TERMS), min_size=1, max_size=4),
    st.sampled_from(range(len(NEEDS))),
    st.sampled_from([(), ("-tp", "4"), ("-pp", "2"), ("-dp", "2"), ("--npu-memory-fraction=0.5",)]),
)
def test_no_place_is_missed(terms, which, flags):
    on = npus(" + ".join(terms))
    found = ask(on, mindie(NEEDS[which], *flags, heads=128))
    assert isinstance(found, Placed) == holds(on, NEEDS[which] * GIB, flags)


def holds(on: Fleet, need: float, flags: tuple[str, ...]) -> bool:
    """Whether empty NPUs hold the model, by trying all: n of one worker, or as many of each of several."""
    world = {"-tp": 4, "-pp": 2, "-dp": 2}.get(flags[0] if flags else "", 0)
    fraction = 0.5 if flags and world == 0 else 0.8
    workers: dict[int, list[int]] = {}
    for gpu in on.gpu_rows.values():
        workers.setdefault(gpu.worker_id, []).append(int((gpu.vram_total or 0) * fraction))

    def serves(count: int, booked: int) -> bool:
        return (count == world if world else 128 % count == 0) and booked >= need

    if any(serves(n, n * cards[0]) for cards in workers.values() for n in range(1, len(cards) + 1)):
        return True
    for each in (1,) if flags and flags[0] in ("-pp", "-dp") else (1, 2, 4, 8):
        parts = sorted((each * cards[0] for cards in workers.values() if len(cards) >= each), reverse=True)
        if any(serves(n * each, sum(parts[:n])) for n in range(2, len(parts) + 1)):
            return True
    return False
