"""Hand-picked GPUs: never ignored, never over-committed unasked (selectors spec section 7; FR-16, FR-19)."""

from __future__ import annotations

import pytest

from gpustackd.domain.outcome import Check, Placed
from tests.fleets import GIB, ask, demand, fleet, model, occupy, place, refused, seats

SIX = [f"w1:cuda:{i}" for i in range(6)]


def test_three_replicas_on_six_picked_cards_take_two_each():
    """FR-16."""
    on = fleet("1x8xA6000-48", reserved=1)
    wanted = demand(60, model(gpu_ids=SIX, per_replica=2, replicas=3), heads=64)
    taken = [seats(place(on, wanted, f"m-{n}", n))[0][1] for n in range(3)]
    assert sorted(taken) == [(0, 1), (2, 3), (4, 5)]
    fourth = refused(on, wanted, name="m-3", n=3)
    assert "selected GPUs are in use" in fourth.message
    assert fourth.reasons[1].code == "gpu_selector.in_use"


def test_a_pinned_model_waits_for_its_worker_and_says_so():
    """FR-19 a."""
    on = fleet("1x1x4090-24[state=NOT_READY] + 1x1x4090-24")
    said = refused(on, demand(8, model(gpu_ids=["w1:cuda:0"]))).message
    assert "w1" in said
    assert "NOT_READY" in said
    assert "memory" not in said


def test_cards_on_a_worker_that_is_away_keep_a_distributed_model_waiting():
    """FR-19 c."""
    on = fleet("2x1x4090-24 + 1x1x4090-24[state=NOT_READY]")
    wanted = demand(30, model(gpu_ids=["w1:cuda:0", "w3:cuda:0"]), heads=64)
    said = refused(on, wanted).message
    assert "worker w3 is NOT_READY" in said


def test_a_selection_over_several_workers_takes_the_main_worker_with_most_cards():
    on = fleet("3x2xA100-80")
    wanted = demand(
        19, model(gpu_ids=["w2:cuda:0", "w1:cuda:0", "w1:cuda:1", "w3:cuda:0"], per_replica=4), heads=28
    )
    placed = place(on, wanted)
    assert seats(placed) == [("w1", (0, 1)), ("w2", (0,)), ("w3", (0,))]
    assert [p.total_gpus for p in placed.parts] == [None, 1, 1]
    assert placed.mode == "initialize_later"


def test_types_are_not_mixed_in_one_instance():
    on = fleet("1x1x4090-24 + 1x1x7800-16[type=rocm]")
    ids = ["w1:cuda:0", "w2:rocm:0"]
    assert "several types (cuda, rocm)" in refused(on, demand(3, model(gpu_ids=ids, per_replica=2))).message
    assert place(on, demand(3, model(gpu_ids=ids, per_replica=1))).gpu_count == 1


def test_over_commit_is_refused_unless_asked_for():
    on = fleet("1x4x4080-15.9922")
    ids = ["w1:cuda:0", "w1:cuda:1"]
    outcome = refused(on, demand(75.23, model(gpu_ids=ids), heads=64))
    for fact in ("31.98 GiB", "2 of 2", "28.79 GiB", "allow_overcommit"):
        assert fact in outcome.message


def test_over_commit_that_is_asked_for_is_flagged_and_checked_strictly():
    on = fleet("1x4x4080-15.9922")
    spec = model(gpu_ids=["w1:cuda:0", "w1:cuda:1"], allow_overcommit=True)
    outcome = ask(on, demand(75.23, spec, heads=64))
    assert isinstance(outcome, Placed)
    assert outcome.placement.over_commit
    assert outcome.placement.check is Check.UNCHANGED
    assert outcome.placement.warnings[0].code == "gpu_selector.overcommit"


def test_several_replicas_never_over_commit():
    spec = model(gpu_ids=["w1:cuda:0", "w1:cuda:1"], per_replica=1, allow_overcommit=True, replicas=2)
    assert "several replicas" in refused(fleet("1x4x4080-16"), demand(75, spec, heads=64)).message


def test_a_full_card_is_not_shared_by_an_embedding_model():
    on = fleet("1x1x4090-24")
    occupy(on, "w1", [0], 23.5)
    spec = model(gpu_ids=["w1:cuda:0"], categories=("embedding",))
    refused(on, demand(1, spec))


def test_an_even_split_is_rounded_up_and_so_never_short():
    spec = model(gpu_ids=["w1:cuda:0", "w1:cuda:1", "w1:cuda:2"], categories=("embedding",))
    placed = place(fleet("1x3x4090-24"), demand(10, spec))
    assert not placed.over_commit
    assert sum(placed.parts[0].vram) >= 10 * GIB


def test_ram_is_checked_for_picked_cards_too():
    on = fleet("1x1x4090-24[ram=8]")
    assert "RAM" in refused(on, demand(8, model(gpu_ids=["w1:cuda:0"]), ram=16)).message


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["w9:cuda:0"], "w9:cuda:0: unknown worker or GPU"),
        (["w1:cuda:7"], "w1:cuda:7: unknown worker or GPU"),
        (["w1:rocm:0"], "w1:rocm:0: unknown worker or GPU"),
        (["w2:cuda:0"], "w2:cuda:0: closed"),
    ],
)
def test_cards_that_cannot_be_used_are_named(ids, said):
    on = fleet("1x2x4090-24 + 1x1x4090-24[closed]")
    assert said in refused(on, demand(8, model(gpu_ids=ids))).message


def test_a_world_size_that_contradicts_the_selection_is_refused_unless_the_check_is_off():
    on = fleet("1x8xH100-80")
    ids = [f"w1:cuda:{i}" for i in range(8)]
    flags = ["--tp=8", "--dp=2"]
    said = refused(
        on, demand(100, model(gpu_ids=ids, per_replica=8, backend_parameters=flags), heads=64)
    ).message
    for fact in ("8 GPUs", "tp/dp", "16", "GPUSTACK_SKIP_GPU_COUNT_CHECK"):
        assert fact in said
    skipping = model(
        gpu_ids=ids, per_replica=8, backend_parameters=flags, env={"GPUSTACK_SKIP_GPU_COUNT_CHECK": "1"}
    )
    assert place(on, demand(100, skipping, heads=64)).gpu_count == 8


def test_a_worker_takes_part_in_one_distributed_instance_only():
    on = fleet("2x4xH100-80")
    first = demand(100, model(1, gpu_ids=["w1:cuda:0", "w2:cuda:0"]), heads=64)
    place(on, first, "a-1", 1)
    second = demand(100, model(2, gpu_ids=["w1:cuda:1", "w2:cuda:1"]), heads=64)
    assert "another distributed instance" in refused(on, second, name="b-1", n=2).message
