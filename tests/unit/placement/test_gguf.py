"""GGUF models on one worker: which step finds a place, what is booked there, what the flags rule out."""

from __future__ import annotations

import pytest

from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Check
from gpustackd.placement.search_cache import SearchCache
from gpustackd.store.placement_columns import claim_json
from tests import fleets
from tests.fleets import GIB, fleet, model, occupy, place, refused, seats
from tests.gguf_sizes import SIZED_FOR, layered, toy

SMALL = toy(32, 0.25)
"""33 layers of 0.25 GiB: 9.5 GiB on one GPU."""
MIDDLE = toy(32, 1)
"""34.25 GiB on one GPU."""
LARGE = toy(60, 2)


def gib(placement, part=0):
    return [v / GIB for v in placement.parts[part].vram]


# -- one GPU -------------------------------------------------------------------------------------------------


def test_a_model_that_one_gpu_holds_takes_one_gpu():
    placed = place(fleet("2x2x4090-24"), layered(SMALL))
    assert placed.strategy == "one_gpu"
    assert (placed.offload_layers, placed.total_layers, placed.tensor_split) == (33, 33, None)
    assert gib(placed) == [9.5]
    assert placed.parts[0].ram == GIB
    assert placed.check is Check.FITS


def test_the_claim_says_for_which_context_it_was_sized():
    placed = place(fleet("1x1x4090-24"), layered(SMALL))
    claim = claim_json(placed.parts[0], placed)
    assert claim["sized_for"] == SIZED_FOR
    assert (claim["offload_layers"], claim["total_layers"]) == (33, 33)
    assert "tensor_split" not in claim


def test_one_gpu_is_taken_up_to_the_last_byte():
    need = layered(SMALL).need.vram / GIB
    assert place(fleet(f"1x1xA-{need}"), layered(SMALL)).strategy == "one_gpu"
    assert "one_gpu" in refused(fleet(f"1x1xA-{need - 0.01}"), layered(SMALL)).signature


def test_a_worker_short_of_ram_hides_no_other():
    on = fleet("1x1xA-80[ram=0.5] + 1x1xB-24")
    assert seats(place(on, layered(SMALL))) == [("w2", (0,))]


def test_unified_memory_holds_gpu_and_ram_together():
    needed = (9 + 0.75) + 0.75  # no allowance for a runtime of its own; less RAM
    on = fleet(f"1x1xM-{needed - 0.75}[uma,ram={needed},type=mps]")
    placed = place(on, layered(SMALL))
    assert placed.parts[0].unified
    assert gib(placed) == [9.0]
    assert placed.parts[0].ram == int(0.75 * GIB)
    short = fleet("1x1xM-64[uma,ram=9.5,type=mps]")
    assert "one_gpu" in refused(short, layered(SMALL)).signature


def test_instances_of_one_model_take_turns_on_equal_gpus():
    on = fleet("2x2x4090-24")
    taken = {seats(place(on, layered(SMALL), f"x-{n}", n))[0] for n in range(4)}
    assert len(taken) == 4


def test_binpack_scores_ram_and_vram_of_the_claim():
    on = fleet("1x1x4090-24[ram=8] + 1x1x4090-24[ram=64]")
    placed = place(on, layered(SMALL, placement_strategy=Strategy.BINPACK))
    assert placed.parts[0].worker_name == "w1"
    assert placed.score == pytest.approx(100 * (1 / 8 + 2 * 9.5 / 24) / 3)


# -- several GPUs of one worker ------------------------------------------------------------------------------


def test_a_model_too_large_for_one_gpu_takes_as_few_gpus_of_one_worker_as_hold_it():
    placed = place(fleet("1x8xA-16 + 1x4x4090-24"), layered(MIDDLE))
    assert placed.strategy == "one_worker"
    assert seats(placed) == [("w2", (0, 1))]
    assert placed.tensor_split == (17, 16)
    assert gib(placed) == [17 + 1.125, 16 + 1.375]


def test_layers_lie_by_what_cards_have_free():
    on = fleet("1x2x4090-24")
    occupy(on, "w1", [0], 8)
    placed = place(on, layered(toy(32, 0.9)))
    assert placed.tensor_split[0] < placed.tensor_split[1]
    assert all(v <= f for v, f in zip(gib(placed), (16, 24), strict=True))


def test_cards_that_even_shares_would_overfill_hold_whole_layers_of_their_own_number():
    """23 and 13 GiB free, 31 layers of 1 GiB: by free memory the smaller one would get 12 layers, which it
    has no room for beside its buffers."""
    on = fleet("1x2x4090-24")
    occupy(on, "w1", [0], 1)
    occupy(on, "w1", [1], 11)
    placed = place(on, layered(toy(30, 1)))
    assert placed.tensor_split == (20, 11)


def test_another_choice_of_cards_serves_where_the_freest_do_not():
    """The output is large, and it goes to the last card: of the three freest the last is too small for it."""
    sizes = toy(20, 1, output=12)
    on = fleet("1x3xA-24 + 1xcpu")
    occupy(on, "w1", [2], 12)
    placed = place(on, layered(sizes))
    assert seats(placed) == [("w1", (0, 1))]
    assert placed.tensor_split[1] < placed.tensor_split[0]


def test_gpus_of_one_worker_are_listed_by_index_with_the_split_in_their_order():
    on = fleet("1x3xA-24")
    occupy(on, "w1", [1], 20)
    placed = place(on, layered(MIDDLE))
    assert placed.parts[0].gpu_indexes == (0, 2)


def test_gpus_of_two_types_are_not_mixed():
    on = fleet("1x1xA-24 + 1x1xB-24[type=rocm]")
    gpu = on.gpu_rows[2]
    on.drop_gpu(2)
    on.put_gpu(type(gpu)(**{f: getattr(gpu, f) for f in gpu.__slots__ if f != "worker_id"}, worker_id=1))
    assert (
        "one_worker" in refused(on, layered(MIDDLE)).signature
        or "no_pair" in refused(on, layered(MIDDLE)).signature
    )


def test_pairs_of_equal_gpus_take_turns():
    on = fleet("1x4x4090-24")
    first = place(on, layered(MIDDLE), "x-0", 1)
    second = place(on, layered(MIDDLE), "x-1", 2)
    assert {*first.parts[0].gpu_indexes, *second.parts[0].gpu_indexes} == {0, 1, 2, 3}


def test_several_gpus_of_unified_memory_share_its_pool():
    sizes = toy(32, 1)
    outcome = refused(fleet("1x2xM-20[uma,ram=35,type=mps]"), layered(sizes))
    assert "one_worker" in outcome.signature
    placed = place(fleet("1x2xM-20[uma,ram=36,type=mps]"), layered(sizes))
    assert (seats(placed), placed.strategy) == ([("w1", (0, 1))], "one_worker")
    assert sum(placed.parts[0].vram) + placed.parts[0].ram <= 36 * GIB


def test_no_more_gpus_are_taken_than_llama_cpp_runs():
    on = fleet("1x20xA-4")
    sizes = toy(40, 1)  # four GiB hold two layers: 20 cards would
    outcome = refused(on, layered(sizes))
    assert "one_worker" in outcome.signature


# -- flags ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag", ["--gpu-layers=33", "-ngl=999", "--n-gpu-layers=all", "-ngl=-2", "-ngl=auto", "-ngl=-1"]
)
def test_all_layers_or_as_many_as_fit_are_asked_for_in_several_words(flag):
    placed = place(fleet("1x1x4090-24"), layered(SMALL, backend_parameters=[flag]))
    assert (placed.strategy, placed.offload_layers) == ("one_gpu", 33)


def test_the_last_number_of_layers_counts():
    flags = ["-ngl=5", "--gpu-layers", "33"]
    assert place(fleet("1x1x4090-24"), layered(SMALL, backend_parameters=flags)).offload_layers == 33


def test_fewer_layers_than_all_need_leave_to_stay_in_ram():
    outcome = refused(fleet("1x1x4090-24"), layered(SMALL, backend_parameters=["-ngl=10"]))
    assert outcome.reasons[0].code == "model.unusable"
    assert "10 of 33" in outcome.message
    assert "cpu_offloading" in outcome.message


@pytest.mark.parametrize("flag", ["-ngl=ten", "--gpu-layers=1.5", "--tensor-split=a,b", "-ts=0,0"])
def test_flags_that_cannot_be_read_are_refused(flag):
    outcome = refused(fleet("1x2x4090-24"), layered(SMALL, backend_parameters=[flag]))
    assert outcome.reasons[0].code == "model.unusable"
    assert "backend_parameters" in outcome.message


def test_given_shares_are_kept_on_cards_that_hold_them():
    on = fleet("1x3xA-24")
    occupy(on, "w1", [0], 10)
    placed = place(on, layered(SMALL, backend_parameters=["--tensor-split=3,1"]))
    assert (placed.strategy, placed.tensor_split) == ("one_worker", (25, 8))
    assert placed.parts[0].gpu_indexes == (0, 1)
    occupy(on, "w1", [0], 8, instance=901)
    placed = place(on, layered(SMALL, backend_parameters=["--tensor-split=3,1"]), "y", 2)
    assert placed.parts[0].gpu_indexes == (1, 2)


def test_given_shares_that_no_cards_hold_are_refused():
    on = fleet("1x2x4090-24")
    flags = ["--tensor-split=9,1"]
    assert "one_worker" in refused(on, layered(MIDDLE, backend_parameters=flags)).signature


def test_an_image_model_lies_on_one_gpu():
    sizes = toy(0, 0, output=8)
    placed = place(fleet("1x2x4090-24"), layered(sizes, image=True, cpu_offloading=True))
    assert placed.strategy == "one_gpu"
    assert "one_gpu" in refused(fleet("1x4xA-8"), layered(sizes, image=True, cpu_offloading=True)).signature


# -- some of the layers, and none ----------------------------------------------------------------------------


def test_layers_stay_in_ram_only_where_that_is_allowed():
    on = fleet("1x1x4090-24")
    assert "partial" not in refused(on, layered(MIDDLE)).signature
    placed = place(on, layered(MIDDLE, cpu_offloading=True))
    assert (placed.strategy, placed.offload_layers, placed.total_layers) == ("partial", 22, 33)
    assert gib(placed) == [22 + 1.25]
    assert placed.parts[0].ram == (1 + 11) * GIB


def test_the_worker_that_holds_the_most_layers_is_taken_with_the_fewest_gpus():
    on = fleet("1x1xA-24 + 1x4xB-16 + 1x3xC-24 + 1x3xD-24[ram=20]")
    placed = place(on, layered(LARGE, cpu_offloading=True))
    assert placed.parts[0].worker_name == "w3"
    assert (placed.offload_layers, placed.tensor_split) == (33, (11, 11, 11))


def test_where_more_gpus_hold_no_more_layers_fewer_are_taken():
    on = fleet("1x3xA-24")
    occupy(on, "w1", [1, 2], 22)  # 2 GiB left: not one layer
    placed = place(on, layered(LARGE, cpu_offloading=True))
    assert placed.parts[0].gpu_indexes == (0,)
    assert placed.tensor_split is None


def test_so_many_layers_as_asked_go_to_a_gpu():
    placed = place(fleet("1x2x4090-24"), layered(MIDDLE, cpu_offloading=True, backend_parameters=["-ngl=20"]))
    assert (placed.strategy, placed.offload_layers) == ("partial", 20)
    placed = place(fleet("1x2x4090-24"), layered(MIDDLE, cpu_offloading=True, backend_parameters=["-ngl=30"]))
    assert (placed.offload_layers, len(placed.tensor_split)) == (30, 2)


def test_the_layers_in_ram_must_have_room_there():
    outcome = refused(fleet("1x1x4090-24[ram=11]"), layered(MIDDLE, cpu_offloading=True))
    partial = next(r for r in outcome.reasons if r.code == "fit.partial")
    assert partial.params["layers"] == 22
    assert partial.params["need_ram_bytes"] == 12 * GIB
    assert (
        place(fleet("1x1x4090-24[ram=11]"), layered(toy(32, 0.9), cpu_offloading=True)).strategy == "partial"
    )


def test_on_unified_memory_some_layers_never_take_more_than_the_pool():
    outcome = refused(fleet("1x1xM-30[uma,ram=33,type=mps]"), layered(MIDDLE, cpu_offloading=True))
    assert "partial" in outcome.signature
    placed = place(fleet("1x1xM-30[uma,ram=40,type=mps]"), layered(MIDDLE, cpu_offloading=True))
    assert placed.strategy == "partial"
    assert sum(placed.parts[0].vram) + placed.parts[0].ram <= 40 * GIB


def test_without_a_gpu_ram_holds_everything_on_a_worker_without_gpus_if_there_is_one():
    on = fleet("1x1xA-1[ram=200] + 1xcpu[ram=200] + 1xcpu[ram=20]")
    placed = place(on, layered(MIDDLE, cpu_offloading=True))
    assert (placed.strategy, placed.offload_layers, placed.total_layers) == ("cpu", 0, 33)
    assert seats(placed) == [("w2", ())]
    assert placed.parts[0].ram == 34 * GIB
    assert placed.parts[0].gpu_type is None


def test_no_layers_on_gpus_as_asked():
    on = fleet("1x1x4090-24 + 1xcpu")
    placed = place(on, layered(SMALL, cpu_offloading=True, backend_parameters=["-ngl=0"]))
    assert placed.strategy == "cpu"
    outcome = refused(on, layered(SMALL, backend_parameters=["-ngl=0"]))
    assert outcome.reasons[0].code == "model.unusable"


def test_a_partial_placement_says_why_no_more_layers():
    on = fleet("1x1x4090-24")
    outcome = fleets.ask(on, layered(MIDDLE, cpu_offloading=True))
    record = outcome.candidates[0]
    assert (record["offload_layers"], record["total_layers"]) == (22, 33)
    assert "the next one takes 1.00 GiB" in record["limit"]
    assert "0.75 GiB is left" in record["limit"]


# -- keeping up ----------------------------------------------------------------------------------------------


def test_a_card_that_fills_up_is_seen():
    on, memo = fleet("1x2x4090-24"), SearchCache()
    assert fleets.ask(on, layered(MIDDLE), memo=memo).placement.strategy == "one_worker"
    occupy(on, "w1", [0], 20)
    assert not hasattr(fleets.ask(on, layered(MIDDLE), memo=memo), "placement")
    on.vram_allocated[on.slot[1]] = 0
    on.touch(0)
    assert fleets.ask(on, layered(MIDDLE), memo=memo).placement.strategy == "one_worker"


def test_instances_in_a_row_turn_to_every_gpu_and_every_worker_that_is_as_good():
    on = fleet("2x2x4090-24")
    for wanted, ways in ((layered(SMALL), 4), (layered(MIDDLE), 2), (layered(LARGE, cpu_offloading=True), 2)):
        found = [fleets.ask(on, wanted, name=f"m-{n}").placement for n in range(8)]
        assert len({tuple(fleets.seats(p)) for p in found}) == ways


@pytest.mark.parametrize("strategy", list(Strategy))
def test_every_strategy_scores_within_its_maximum(strategy):
    on = fleet("3x2x4090-24")
    occupy(on, "w1", [0], 5)
    for sizes, more in ((SMALL, {}), (MIDDLE, {}), (LARGE, {"cpu_offloading": True})):
        placed = place(on, layered(sizes, placement_strategy=strategy, **more))
        assert 0 <= placed.score <= 105
        on = fleet("3x2x4090-24")


def test_a_model_of_unknown_sizes_is_not_placed():
    wanted = layered(SMALL)
    unknown = type(wanted)(wanted.spec, wanted.facts, wanted.need, wanted.engine, "d")
    assert refused(fleet("1x1x4090-24"), unknown).reasons[0].code == "model.unusable"


def test_a_model_of_one_block():
    sizes = toy(1, 4)
    assert place(fleet("1x1xA-16"), layered(sizes)).offload_layers == 2
    placed = place(fleet("1x2xA-6"), layered(sizes))
    assert placed.tensor_split == (1, 1)
    placed = place(fleet("1x1xA-6"), layered(sizes, cpu_offloading=True))
    assert (placed.offload_layers, placed.total_layers) == (1, 2)


def test_no_worker_at_all():
    outcome = refused(fleet("1xcpu[state=NOT_READY]"), layered(SMALL, cpu_offloading=True))
    assert outcome.message
    assert model(1).id == 1
