"""Hand-picked GPUs of a GGUF model: only these and all of these, or the reason why they do not serve."""

from __future__ import annotations

import pytest

from gpustackd.domain.outcome import Check
from tests.fleets import GIB, fleet, model, occupy, place, refused, seats
from tests.gguf_sizes import layered, toy

SMALL = toy(32, 0.25)
MIDDLE = toy(32, 1)


def picking(sizes, *ids, per=None, over=False, **more):
    more = {"source": "local_path", "local_path": "/m/x.gguf", **more}
    distributable = more.pop("distributable", True)
    spec = model(gpu_ids=ids, per_replica=per, allow_overcommit=over, **more)
    return layered(sizes, spec, distributable=distributable)


def test_one_selected_gpu_holds_the_model():
    placed = place(fleet("1x1xA-80 + 1x4x4090-24"), picking(SMALL, "w2:cuda:3"))
    assert seats(placed) == [("w2", (3,))]
    assert (placed.strategy, placed.offload_layers, placed.tensor_split) == ("manual", 33, None)


def test_all_selected_gpus_of_a_worker_take_part_though_one_would_do():
    placed = place(fleet("1x4x4090-24"), picking(SMALL, "w1:cuda:0", "w1:cuda:2", "w1:cuda:3"))
    assert seats(placed) == [("w1", (0, 2, 3))]
    assert placed.tensor_split == (12, 12, 9)


def test_as_many_as_a_replica_takes_of_those_selected():
    wanted = picking(MIDDLE, "w1:cuda:0", "w1:cuda:1", "w1:cuda:2", "w1:cuda:3", per=2, replicas=2)
    on = fleet("1x6x4090-24")
    first, second = (place(on, wanted, f"x-{n}", n).parts[0].gpu_indexes for n in (1, 2))
    assert sorted((*first, *second)) == [0, 1, 2, 3]
    outcome = refused(on, wanted)
    assert "gpu_selector.in_use" in outcome.signature
    assert "in use" in outcome.message


def test_one_gpu_a_replica_is_never_spread_over_the_workers_of_those_selected():
    wanted = picking(MIDDLE, "w1:cuda:0", "w2:cuda:0", per=1)
    said = refused(fleet("2x1x4090-24"), wanted).message
    assert "on 1 GPU" in said
    assert "24.00 GiB free" in said


def test_a_selected_gpu_holds_some_layers_where_that_is_allowed():
    on = fleet("1x2x4090-24")
    assert "gpu_selector" in refused(on, picking(MIDDLE, "w1:cuda:1")).signature
    placed = place(on, picking(MIDDLE, "w1:cuda:1", cpu_offloading=True))
    assert (seats(placed), placed.offload_layers) == ([("w1", (1,))], 22)
    asked = picking(MIDDLE, "w1:cuda:0", cpu_offloading=True, backend_parameters=("-ngl=7",))
    assert place(on, asked, "y", 2).offload_layers == 7


def test_several_selected_gpus_hold_some_layers():
    placed = place(fleet("1x3xA-8"), picking(MIDDLE, "w1:cuda:0", "w1:cuda:2", cpu_offloading=True))
    assert placed.tensor_split == (7, 6)
    assert placed.parts[0].ram == (1 + 33 - 13) * GIB


def test_gpus_selected_on_several_workers_are_spread_over_though_the_flag_is_not_set():
    ids = ("w1:cuda:0", "w1:cuda:1", "w2:cuda:0")
    placed = place(fleet("2x2x4090-24"), picking(toy(60, 1), *ids))
    assert seats(placed) == [("w1", (0, 1)), ("w2", (0,))]
    assert placed.tensor_split == (21, 21, 19)
    assert placed.parts[1].ram == 512 * 2**20


def test_the_selected_worker_with_less_free_is_the_main_one_where_the_other_lacks_ram():
    ids = ("w1:cuda:0", "w2:cuda:0")
    placed = place(fleet("1x1xA-48[ram=0.75] + 1x2x4090-24"), picking(toy(60, 1), *ids))
    assert seats(placed) == [("w2", (0,)), ("w1", (0,))]


def test_a_model_that_cannot_be_distributed_stays_on_one_worker():
    ids = ("w1:cuda:0", "w2:cuda:0")
    outcome = refused(fleet("2x1x4090-24"), picking(MIDDLE, *ids, distributable=False))
    assert "gpu_selector.scattered" in outcome.signature
    assert "several workers" in outcome.message


def test_some_layers_on_gpus_selected_on_several_workers():
    ids = ("w1:cuda:0", "w2:cuda:0")
    placed = place(fleet("2x1xA-16"), picking(MIDDLE, *ids, cpu_offloading=True))
    assert placed.tensor_split == (15, 14)
    assert placed.parts[0].ram == (1 + 33 - 29) * GIB


def test_of_selected_workers_the_one_with_which_most_layers_fit_is_the_main_one():
    # whichever is the main one holds the output: 12 and 18 layers with the first, 20 and 11 with the second
    sizes, ids = toy(60, 1, output=1.8), ("w1:cuda:0", "w2:cuda:0")
    placed = place(fleet("1x1xA-21 + 1x1xA-13.1"), picking(sizes, *ids, cpu_offloading=True))
    assert (placed.offload_layers, placed.tensor_split) == (31, (20, 11))
    assert seats(placed) == [("w2", (0,)), ("w1", (0,))]


def test_a_worker_that_is_away_is_named_with_its_state():
    outcome = refused(fleet("1x1x4090-24[state=NOT_READY] + 1x1x4090-24"), picking(SMALL, "w1:cuda:0"))
    assert "w1" in outcome.message
    assert "NOT_READY" in outcome.message
    assert "w2" not in outcome.message


def test_gpus_that_are_not_there_are_named():
    outcome = refused(fleet("1x1x4090-24"), picking(SMALL, "w1:cuda:7", "w9:cuda:0"))
    assert "w1:cuda:7" in outcome.message
    assert "w9:cuda:0" in outcome.message


def test_a_selected_gpu_that_holds_no_layer_is_named_with_what_one_needs():
    on = fleet("1x1x4090-24 + 1x1xA-2")
    outcome = refused(on, picking(MIDDLE, "w1:cuda:0", "w2:cuda:0"))
    reason = next(r for r in outcome.reasons if r.code == "gpu_selector.too_small")
    assert reason.params["gpu_id"] == "w2:cuda:0"
    assert reason.params["needs_gib"] == 2.12


def test_where_some_layers_would_do_the_selected_gpu_that_holds_none_of_the_last_is_named():
    on = fleet("1x2xA-2 + 1x2x4090-24")
    picked = picking(toy(32, 3), *(f"w{w}:cuda:{n}" for w in (1, 2) for n in (0, 1)), cpu_offloading=True)
    reason = next(r for r in refused(on, picked).reasons if r.code == "gpu_selector.too_small")
    assert reason.params["gpu_id"] == "w1:cuda:0"
    assert reason.params["needs_gib"] == 4.0


def test_too_little_memory_tells_need_and_what_is_free():
    outcome = refused(fleet("1x2x4090-24"), picking(toy(60, 1), "w1:cuda:0", "w1:cuda:1"))
    reason = next(r for r in outcome.reasons if r.code == "gpu_selector.memory")
    assert (reason.params["need_gib"], reason.params["free_gib"]) == (61.0, 48.0)
    assert "61.00 GiB" in outcome.message
    assert "48.00 GiB" in outcome.message


def test_too_little_ram_is_no_lack_of_gpu_memory():
    outcome = refused(fleet("1x2x4090-24[ram=0.5]"), picking(MIDDLE, "w1:cuda:0", "w1:cuda:1"))
    assert "not enough RAM" in outcome.message


def test_more_than_llama_cpp_runs_are_refused():
    ids = [f"w1:cuda:{n}" for n in range(16)]
    outcome = refused(fleet("1x16x4090-24"), picking(MIDDLE, *ids))
    assert "gpu_selector.too_many" in outcome.signature


def test_none_of_the_layers_on_selected_gpus_makes_no_sense():
    wanted = picking(SMALL, "w1:cuda:0", cpu_offloading=True, backend_parameters=("-ngl=0",))
    assert refused(fleet("1x1x4090-24"), wanted).reasons[0].code == "model.unusable"


def test_a_selection_is_over_committed_only_where_that_is_asked_for():
    on = fleet("1x2x4090-24")
    occupy(on, "w1", [0, 1], 10)
    ids = ("w1:cuda:0", "w1:cuda:1")
    assert "gpu_selector.in_use" in refused(on, picking(MIDDLE, *ids)).signature
    placed = place(on, picking(MIDDLE, *ids, over=True))
    assert placed.over_commit
    assert placed.check is Check.UNCHANGED
    assert placed.tensor_split == (17, 16)
    assert placed.warnings[0].code == "gpu_selector.overcommit"


def test_what_fits_is_not_over_committed_though_it_were_allowed():
    placed = place(fleet("1x2x4090-24"), picking(MIDDLE, "w1:cuda:0", "w1:cuda:1", over=True))
    assert not placed.over_commit


def test_several_replicas_are_never_over_committed():
    on = fleet("1x2x4090-24")
    occupy(on, "w1", [0, 1], 10)
    wanted = picking(MIDDLE, "w1:cuda:0", "w1:cuda:1", over=True, per=2, replicas=3)
    assert "gpu_selector" in refused(on, wanted).signature


@pytest.mark.parametrize(("index", "expected"), [(0, 0), (1, 1)])
def test_given_shares_lie_on_the_selected_gpus(index, expected):
    on = fleet("1x3x4090-24")
    occupy(on, "w1", [index], 3)
    wanted = picking(SMALL, "w1:cuda:0", "w1:cuda:1", backend_parameters=("-ts=1,2",))
    placed = place(on, wanted)
    assert placed.parts[0].gpu_indexes == (0, 1)
    assert placed.tensor_split == (11, 22)
    assert expected in placed.parts[0].gpu_indexes
