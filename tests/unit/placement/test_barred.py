"""Refusals where the cards would do: RAM that goes with them, other distributed instances, too few cards."""

import pytest

from gpustackd.domain.demand import Engine
from tests.fleets import demand, fleet, model, place, refused

SPANNING = {"heads": 64, "distributed_inference_across_workers": True}


def test_ram_that_follows_what_is_booked_is_named_with_the_nearest_worker():
    on = fleet("1x2xA-80[ram=64] + 1x2xA-80[ram=80]")
    outcome = refused(on, demand(40, heads=64, ram_ratio=1.2))
    assert (
        "2 workers have the GPU memory but not enough RAM; the nearest is w2 with 80.00 of the"
        " 86.40 GiB needed (1.2 times the 72.00 GiB booked on its GPUs)" in outcome.message
    )
    assert "not enough free GPU memory" not in outcome.message
    assert "fit.ram" in [r.code for r in outcome.reasons]


def test_the_same_where_several_cards_are_needed():
    outcome = refused(fleet("1x4xA-80[ram=128]"), demand(200, heads=64, ram_ratio=1.0))
    assert "w1 with 128.00 of the 288.00 GiB needed" in outcome.message
    assert "not enough free GPU memory" not in outcome.message


def test_on_unified_memory_the_one_pool_is_named():
    on = fleet("1x1xA-60[uma,ram=64]")
    flags = ["--gpu-memory-utilization=0.8"]
    outcome = refused(on, demand(40, heads=64, ram=20, backend_parameters=flags))
    assert "w1 with 64.00 of the 68.00 GiB needed for GPU and RAM together" in outcome.message


def test_workers_that_serve_another_distributed_instance_are_named_with_it():
    on = fleet("2x4xA-80")
    flags = ["--gpu-memory-utilization=0.3"]
    place(
        on, demand(100, model(1, backend_parameters=flags, distributed_inference_across_workers=True)), "a", 1
    )
    outcome = refused(on, demand(100, model(2, backend_parameters=flags)), name="b", n=2)
    assert "w1, w2 already run part of another distributed instance (1)" in outcome.message
    picked = model(3, gpu_ids=["w1:cuda:0", "w2:cuda:0"], backend_parameters=flags)
    outcome = refused(on, demand(40, picked), name="c", n=3)
    assert "worker w1 already runs part of another distributed instance (1)" in outcome.message
    assert [r.code for r in outcome.reasons] == ["gpu_selector.taken"]


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SGLANG])
def test_too_few_cards_are_not_called_too_little_memory(engine: Engine):
    flag = "--tp=8" if engine is Engine.VLLM else "--tp-size=8"
    wanted = demand(100, heads=128, engine=engine, backend_parameters=[flag])
    outcome = refused(fleet("1x4xA-80"), wanted)
    assert "1 worker has fewer than 8 usable GPUs of one type" in outcome.message
    assert "not enough free GPU memory" not in outcome.message


def test_hand_picked_cards_without_ram_say_which_worker_and_how_much():
    on = fleet("1x4xA-80[ram=3]")
    outcome = refused(on, demand(20, model(gpu_ids=["w1:cuda:0"]), ram=8, heads=64))
    assert "not enough RAM beside the selected GPUs: w1 with 3.00 of the 8.00 GiB needed" in outcome.message
    (reason,) = [r for r in outcome.reasons if r.code == "gpu_selector.ram"]
    assert reason.params["worker"] == "w1"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--chunked-prefill-size=x", "--chunked-prefill-size is 'x', not a whole number"),
        ("--cuda-graph-max-bs=-5", "--cuda-graph-max-bs is -5, it must be positive"),
        ("--piecewise-cuda-graph-max-tokens=1.5", "--piecewise-cuda-graph-max-tokens is '1.5'"),
    ],
)
def test_flags_that_only_the_fraction_reads_are_refused_by_name_too(flag: str, said: str):
    wanted = demand(35, heads=64, engine=Engine.SGLANG, backend_parameters=[flag])
    assert said in refused(fleet("1x4xA-80"), wanted).message
