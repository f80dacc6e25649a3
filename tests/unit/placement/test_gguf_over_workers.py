"""GGUF models over several workers: main worker, GPUs served to it, RAM on both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpustackd.domain.bookings import worker_bookings
from gpustackd.domain.outcome import Placed
from gpustackd.placement.policy import Policy
from gpustackd.placement.search_cache import SearchCache
from gpustackd.store.placement_columns import claim_json, distributed_json
from tests import fleets
from tests.fleets import GIB, ask, fleet, occupy, place, refused, seats
from tests.gguf_sizes import layered, toy

MIDDLE = toy(60, 1)
"""61 layers of 1 GiB; one device takes 1.25 GiB beside them, several 1.375 to 1.625."""


def spread(sizes=MIDDLE, **more):
    return layered(sizes, distributed_inference_across_workers=True, **more)


def test_only_models_that_ask_for_it_lie_on_several_workers():
    on = fleet("2x2x4090-24")
    assert "many_workers" not in refused(on, layered(MIDDLE)).signature
    assert place(on, spread()).strategy == "many_workers"


def test_a_model_that_cannot_be_distributed_is_not():
    outcome = refused(fleet("2x2x4090-24"), spread(distributable=False))
    assert "many_workers" not in outcome.signature


def test_remote_gpus_come_first_and_each_is_a_part_of_its_own():
    placed = place(fleet("1x2x4090-24 + 1x2xB-23"), spread(toy(80, 1)))
    assert seats(placed) == [("w1", (0, 1)), ("w2", (0,)), ("w2", (1,))]
    assert len(placed.tensor_split) == 4
    assert sum(placed.tensor_split) == 81
    assert [p.offload_layers for p in placed.parts[1:]] == list(placed.tensor_split[:2])
    assert [p.vram[0] / GIB for p in placed.parts[1:]] == [n + 1.125 for n in placed.tensor_split[:2]]
    assert (placed.offload_layers, placed.total_layers, placed.mode) == (81, 81, "delegated")


def test_what_is_written_for_whoever_starts_the_engine():
    placed = place(fleet("2x2x4090-24"), spread())
    main = claim_json(placed.parts[0], placed)
    assert main["tensor_split"] == [21, 21, 19]
    assert (main["offload_layers"], main["total_layers"]) == (61, 61)
    (part,) = distributed_json(placed)["subordinate_workers"]
    assert part["gpu_indexes"] == [0]
    claim = part["computed_resource_claim"]
    assert (claim["offload_layers"], claim["total_layers"]) == (21, 61)
    assert claim["vram"] == {"0": int(22.125 * GIB)}
    assert "tensor_split" not in claim
    assert len(main["tensor_split"]) == len(placed.parts[0].gpu_indexes) + 1


def test_no_more_gpus_are_taken_than_needed():
    placed = place(fleet("3x2x4090-24"), spread())
    assert placed.gpu_count == 3
    assert len(placed.parts) == 2


def test_every_process_that_serves_a_gpu_books_ram():
    placed = place(fleet("2x2x4090-24"), spread())
    assert [p.ram for p in placed.parts] == [GIB, 512 * 2**20]
    policy = Policy(rpc_ram=2 * GIB)
    assert [p.ram for p in place(fleet("2x2x4090-24"), spread(), policy=policy).parts] == [GIB, 2 * GIB]


def test_a_worker_without_that_ram_serves_no_gpu():
    on = fleet("1x2x4090-24 + 1x2x4090-24[ram=0.25] + 1x2xB-23")
    assert seats(place(on, spread())) == [("w1", (0, 1)), ("w3", (0,))]


def test_a_main_worker_short_of_ram_gives_way_to_another():
    on = fleet("1x2xA-25[ram=0.75] + 1x2x4090-24")
    placed = place(on, spread())
    assert [p.worker_name for p in placed.parts] == ["w2", "w1"]


def test_the_worker_that_offers_most_is_the_main_one():
    placed = place(fleet("1x1x4090-24 + 1x2xB-20"), spread(toy(50, 1)))
    assert seats(placed) == [("w2", (0, 1)), ("w1", (0,))]


def test_gpus_that_hold_no_layer_take_no_part():
    on = fleet("2x3x4090-24")
    occupy(on, "w1", [1], 23)
    occupy(on, "w2", [1], 23)
    placed = place(on, spread(toy(80, 1)))
    assert all(1 not in p.gpu_indexes for p in placed.parts)


def test_unequal_cards_hold_unequal_numbers_of_layers():
    placed = place(fleet("1x1xA-48 + 1x1xB-24 + 1x1xC-12"), spread(toy(70, 1)))
    assert [p.worker_name for p in placed.parts] == ["w1", "w2", "w3"]
    assert placed.tensor_split == (20, 9, 42)


def test_gpus_of_different_types_serve_one_model():
    placed = place(
        fleet("1x1xA-24 + 1x1xB-24[type=rocm] + 1x1xM-24[type=mps,uma,ram=32]"), spread(toy(60, 1))
    )
    assert {p.gpu_type for p in placed.parts} == {"cuda", "rocm", "mps"}
    unified = next(p for p in placed.parts if p.gpu_type == "mps")
    assert unified.unified
    layers = placed.tensor_split[[p.gpu_type for p in placed.parts[1:]].index("mps")]
    assert unified.vram[0] == int((layers + 0.625) * GIB)  # no allowance of its own runtime


def test_a_served_gpu_of_unified_memory_leaves_room_for_its_process():
    on = fleet("1x1xA-24 + 1x1xM-24[type=mps,uma,ram=24]")
    placed = place(on, spread(toy(42, 1)))
    far = placed.parts[1]
    assert far.ram + sum(far.vram) <= 24 * GIB
    on = fleet("1x1xA-24 + 1x1xM-24[type=mps,uma,ram=24]")
    assert "many_workers" in refused(on, spread(toy(46, 1))).signature


def test_a_main_worker_of_unified_memory_holds_its_ram_too():
    on = fleet("1x1xM-40[type=mps,uma,ram=40] + 1x1xA-24")
    placed = place(on, spread(toy(58, 1)))
    main = placed.parts[0]
    assert main.worker_name == "w1"
    assert main.ram + sum(main.vram) <= 40 * GIB


def test_with_leave_to_stay_in_ram_as_many_layers_as_can_be_lie_on_gpus_of_all_workers():
    placed = place(fleet("2x2x4090-24"), spread(toy(60, 2), cpu_offloading=True))
    assert (placed.strategy, placed.offload_layers) == ("many_workers", 44)
    assert placed.parts[0].ram == (1 + 34) * GIB


def test_so_many_layers_as_asked_over_workers():
    flags = ["-ngl=30"]
    placed = place(fleet("2x1x4090-24"), spread(MIDDLE, cpu_offloading=True, backend_parameters=flags))
    assert (placed.offload_layers, sum(placed.tensor_split), len(placed.parts)) == (30, 30, 2)


def test_given_shares_name_the_devices_over_workers_too():
    flags = ["--tensor-split=1,1,2"]
    placed = place(fleet("1x1xA-40 + 2x1xB-20"), spread(toy(60, 1), backend_parameters=flags))
    assert placed.tensor_split == (16, 15, 30)
    assert len(placed.parts) == 3


def test_at_most_as_many_gpus_as_llama_cpp_runs():
    on = fleet("20x1xA-6")
    assert place(on, spread(toy(58, 1))).gpu_count == 15
    outcome = refused(on, spread(toy(62, 1)))
    reason = next(r for r in outcome.reasons if r.code == "fit.many_workers")
    assert reason.params["most_gpus"] == 15
    assert "15 GPUs" in outcome.message


def test_where_only_so_many_can_take_part_the_largest_do():
    on = fleet("1x14xA-4 + 3x1xB-24")
    placed = place(on, spread(toy(80, 1)))
    assert placed.gpu_count <= 15
    assert sum(p.worker_name != "w1" for p in placed.parts) >= 2


def test_equal_workers_take_turns_as_the_main_one():
    mains = set()
    for n in range(8):
        outcome = ask(fleet("4x2x4090-24"), spread(), f"x-{n}", n)
        assert isinstance(outcome, Placed)
        mains.add(outcome.placement.parts[0].worker_name)
    assert len(mains) == 4


def test_the_same_fleet_gives_the_same_answer_kept_or_not():
    on, memo = fleet("5x3xA-16 + 3x2xB-24 + 2x1xC-48"), SearchCache()
    wanted = spread(toy(120, 1))
    for n in range(4):
        kept = fleets.ask(on, wanted, f"x-{n}", n, memo=memo)
        assert kept == fleets.ask(on, wanted, f"x-{n}", n)
        if isinstance(kept, Placed):
            on.assume(kept.placement, n, 1)
            on.confirm(n)


@pytest.mark.parametrize("text", ["1x4x4090-24", "1x2x4090-24 + 3xcpu", "1x2x4090-24 + 1x2xA-1"])
def test_without_a_second_worker_that_says_so(text):
    outcome = refused(fleet(text), spread(toy(120, 1)))
    assert "no_remote" in outcome.signature


def test_what_a_view_assumed_is_what_a_commit_raises():
    """Two GPUs of one worker that serve: its row is booked once."""
    on = fleet("1x2x4090-24 + 1x2xB-23")
    placed = ask(on, spread(toy(80, 1))).placement
    assert [n for _, n in worker_bookings(placed)] == [GIB, 2 * 512 * 2**20]
    on.assume(placed, 1, 1)
    on.confirm(1)
    assert on.worker_version[1] == 1
    assert on.ram_allocated[1] == GIB


def test_a_search_beyond_its_budget_ends_and_says_so(monkeypatch: pytest.MonkeyPatch):
    on, memo = fleet("3x3x4090-24"), SearchCache()
    occupy(on, "w1", [0, 1, 2], 22)
    wanted = spread(toy(60, 2), cpu_offloading=True)
    monkeypatch.setattr("gpustackd.placement.selectors.gguf.layer_bounds.BUDGET", 0)
    outcome = ask(on, wanted, memo=memo)
    assert outcome.cut
    monkeypatch.undo()
    outcome = ask(on, wanted, memo=memo)  # another decision has a budget of its own
    assert not outcome.cut
    assert outcome.placement.strategy == "many_workers"


def test_alike_workers_are_one_try_however_many_there_are():
    on = fleet("300x2xA-4")
    outcome = ask(on, spread(toy(60, 2), cpu_offloading=True))
    assert not outcome.cut
    assert outcome.placement.offload_layers == 15


def test_a_worker_serves_as_many_gpus_as_its_ram_has_room_for_their_processes():
    asked = spread(toy(63, 1, host=2 * GIB))  # the second worker cannot be the main one
    placed = place(fleet("1x1xA-40 + 1x3xB-12[ram=1.25] + 1x1xC-10"), asked)
    assert [p.worker_name for p in placed.parts] == ["w1", "w2", "w2", "w3"]
    assert "many_workers" in refused(fleet("1x1xA-40 + 1x3xB-12[ram=1.25]"), asked).signature
    assert place(fleet("1x1xA-40 + 1x3xB-12[ram=1.75]"), asked).gpu_count == 4


def test_more_cards_than_layers_hold_what_fewer_of_them_do():
    few = toy(3, 0.5, 1, buffer=GIB, logits=0, allowance=GIB // 4)
    few = replace(few, adds=(2 * GIB, *few.adds[1:]))
    placed = place(fleet("1x4xA-3"), layered(few, cpu_offloading=True))
    assert (placed.strategy, placed.offload_layers, placed.gpu_count) == ("partial", 3, 2)
