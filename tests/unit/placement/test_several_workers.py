"""Distributed placements of vLLM (selectors spec section 9.3 step 4, 9.4, worked examples of 9.5)."""

from __future__ import annotations

import pytest

from gpustackd.engines.vllm import ParallelSizes, Unworkable, layout
from tests.fleets import demand, fleet, model, occupy, place, refused, seats

R1 = {"heads": 128, "vocabulary": 129280}


def test_771_gib_takes_two_workers_of_eight_cards():
    placed = place(fleet("2x1x4090-24 + 4x8xH100-80"), demand(771, **R1))
    assert [len(p.gpu_ids) for p in placed.parts] == [8, 8]
    assert {v for p in placed.parts for v in p.vram} == {77309411328}
    assert [p.total_gpus for p in placed.parts] == [None, 8]
    assert placed.mode == "initialize_later"
    assert placed.vram_utilization == 0.9


def test_an_explicit_world_size_takes_whole_workers():
    wanted = demand(100, heads=64, backend_parameters=["--tp=8", "--dp=2", "--dpl=1"])
    assert [i for _, i in seats(place(fleet("3x8xH100-80"), wanted))] == [tuple(range(8))] * 2


def test_a_worker_with_a_busy_card_takes_no_part():
    on = fleet("3x8xH100-80")
    occupy(on, "w2", [3], 20)
    assert {w for w, _ in seats(place(on, demand(771, **R1)))} == {"w1", "w3"}


def test_distribution_can_be_switched_off():
    wanted = demand(771, distributed_inference_across_workers=False, **R1)
    said = refused(fleet("2x8xH100-80"), wanted).message
    assert "several workers" not in said


def test_fewest_workers_are_taken_of_the_kind_that_books_least():
    on = fleet("4x8xA6000-48 + 2x8xH100-80 + 2x8xH200-141")
    placed = place(on, demand(771 * 1.4, **R1))
    assert {w for w, _ in seats(placed)} == {"w5", "w6"}


def test_kinds_are_mixed_only_where_no_kind_serves_alone():
    on = fleet("1x8xH100-80 + 1x8xH200-141")
    assert {w for w, _ in seats(place(on, demand(1100, **R1)))} == {"w1", "w2"}


def test_second_instance_waits_and_the_message_names_the_best_combination():
    on = fleet("3x8xH100-80")
    place(on, demand(771, **R1), "a-1", 1)
    said = refused(on, demand(771, **R1), name="a-2", n=2).message
    assert "several workers: no two workers" in said
    fresh = refused(fleet("2x8xH100-80"), demand(1300, **R1)).message
    assert "w1, w2 (8 GPUs each) together offer 1152.00 of the 1300.00 GiB needed" in fresh


def test_an_absolute_need_is_split_over_all_cards():
    wanted = demand(150, model(categories=("embedding",)), heads=8)
    placed = place(fleet("4x1xA6000-48"), wanted)
    assert len(placed.parts) == 4
    assert sum(sum(p.vram) for p in placed.parts) >= wanted.need.vram


def test_the_multiprocessing_executor_adds_workers_until_the_layout_works():
    flags = ["--distributed-executor-backend=mp", "--tp=16"]
    said = refused(fleet("3x8xH100-80"), demand(1300, **R1, backend_parameters=flags)).message
    assert "1152" not in said or "asked for" in said
    wanted = demand(
        100, heads=64, backend_parameters=["--distributed-executor-backend=mp", "--tp=8", "--dp=2"]
    )
    assert len(place(fleet("2x8xH100-80"), wanted).parts) == 2


@pytest.mark.parametrize(
    ("gpus", "sizes", "kind", "tp", "dp"),
    [
        ([8, 8], ParallelSizes(tp=8, dp=2), "data_parallel", 8, 2),
        ([8, 8], ParallelSizes(), "data_parallel", 8, 2),
        ([8, 8], ParallelSizes(tp=16), "model_parallel", 16, 1),
        ([8, 8, 8, 8], ParallelSizes(tp=16), "nested", 16, 2),
        ([8, 4], ParallelSizes(), "data_parallel", 4, 3),
    ],
)
def test_layouts_that_work(gpus, sizes, kind, tp, dp):
    found = layout(gpus, sizes)
    assert (found.kind, found.tp, found.dp) == (kind, tp, dp)


@pytest.mark.parametrize(
    ("gpus", "sizes", "said"),
    [
        ([8, 4], ParallelSizes(tp=16), "different counts: 8, 4"),
        ([8, 8, 8], ParallelSizes(tp=16), "3 nodes cannot be divided into ranks of 2"),
        ([8, 8], ParallelSizes(tp=8, dp=3), "dp is 3"),
        ([8, 8], ParallelSizes(tp=8, dpl=2), "dpl is 2"),
        ([8, 8], ParallelSizes(dp=3), "16 GPUs cannot be divided"),
        ([8, 8], ParallelSizes(tp=12), "no multiple of the 8 GPUs"),
        ([8, 8], ParallelSizes(tp=0), "tp is 0"),
    ],
)
def test_layouts_that_do_not_work_say_the_numbers(gpus, sizes, said):
    with pytest.raises(Unworkable, match=said):
        layout(gpus, sizes)


def test_a_worker_serves_one_distributed_instance_of_an_engine():
    on = fleet("2x8xH100-80")
    low = ["--gpu-memory-utilization=0.4", "--tp=16"]
    place(on, demand(400, model(1, backend_parameters=low), **R1), "a-1", 1)
    refused(on, demand(400, model(2, backend_parameters=low), **R1), name="b-1", n=2)
