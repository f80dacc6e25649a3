"""Why a GGUF model has no place: the nearest one by every way, what binds there, which ways were closed."""

from __future__ import annotations

from gpustackd.domain.outcome import Cure
from tests.fleets import GIB, fleet, occupy, refused
from tests.gguf_sizes import layered, toy

MIDDLE = toy(32, 1)
LARGE = toy(60, 2)


def reason(outcome, code):
    return next(r for r in outcome.reasons if r.code == f"fit.{code}")


def test_the_need_comes_first_with_gpu_memory_and_ram():
    outcome = refused(fleet("1x1x4090-24"), layered(MIDDLE))
    assert outcome.reasons[0].code == "fit.needs"
    assert "34.25 GiB of GPU memory and 1.00 GiB of RAM" in outcome.reasons[0].text


def test_the_largest_free_gpu_is_named_with_what_is_free_on_it():
    on = fleet("1x2x4090-24 + 1x1xA-16")
    occupy(on, "w1", [0], 10)
    found = reason(refused(on, layered(LARGE)), "one_gpu")
    assert found.params["gpu"] == "w1:cuda:1"
    assert (found.params["need_bytes"], found.params["free_bytes"]) == (int(123.25 * GIB), 24 * GIB)
    assert "123.25 GiB" in found.text
    assert "w1:cuda:1 has the most free, 24.00 GiB" in found.text


def test_a_gpu_that_would_do_on_a_worker_short_of_ram_is_told_as_that():
    found = reason(refused(fleet("2x1xA-80[ram=0.5]"), layered(MIDDLE)), "one_gpu")
    assert found.params["ram_short"] == 2
    assert "2 workers have the GPU memory but not the RAM" in found.text


def test_several_gpus_of_the_worker_that_offers_most():
    on = fleet("1x2x4090-24 + 1x4xA-12")
    found = reason(refused(on, layered(toy(50, 1))), "one_worker")
    assert found.params["worker"] in ("w1", "w2")
    assert found.params["need_gib"] > 51
    assert found.params["free_gib"] == 48.0


def test_sums_that_would_do_though_whole_layers_do_not_fit_are_told_as_that():
    sizes = toy(9, 5)  # ten layers of 5 GiB: four cards of 14 GiB hold two each
    found = reason(refused(fleet("1x4xA-14"), layered(sizes)), "one_worker")
    assert found.params["indivisible"]
    assert "no split into whole layers fits" in found.text


def test_ways_that_the_models_settings_close_are_named():
    outcome = refused(fleet("2x2x4090-24"), layered(LARGE))
    assert "distributed_inference_across_workers is off" in outcome.message
    assert "cpu_offloading is off" in outcome.message
    outcome = refused(fleet("2x2x4090-24[ram=8]"), layered(LARGE, distributable=False, cpu_offloading=True))
    assert "cannot be distributed" in outcome.message
    assert "cpu_offloading" not in outcome.message


def test_what_all_workers_offer_together():
    outcome = refused(fleet("3x2x4090-24"), layered(toy(200, 1), distributed_inference_across_workers=True))
    found = reason(outcome, "many_workers")
    assert (found.params["need_gib"], found.params["offer_gib"]) == (201.0, 144.0)
    assert found.params["workers"] == 3


def test_the_level_that_gpus_would_hold_and_the_ram_that_is_short():
    outcome = refused(fleet("1x2x4090-24[ram=64]"), layered(LARGE, cpu_offloading=True))
    found = reason(outcome, "partial")
    assert found.params["layers"] == 22
    assert found.params["need_ram_gib"] == 1 + 39 * 2
    assert found.params["free_ram_gib"] == 64.0
    assert reason(outcome, "cpu").params["need_gib"] == 123.0


def test_workers_without_gpus_and_with_closed_ones_are_counted():
    outcome = refused(fleet("2xcpu + 1x1xA-80[closed] + 1x1xB-8"), layered(MIDDLE))
    assert reason(outcome, "no_gpu").params["workers"] == 2
    assert reason(outcome, "no_usable_gpu").params["workers"] == 1


def test_what_could_cure_it():
    outcome = refused(fleet("1x1x4090-24"), layered(MIDDLE))
    assert Cure.CAPACITY in outcome.cures
    assert Cure.WORKER in outcome.cures
    assert Cure.MODEL in outcome.cures


def test_a_refusal_on_many_workers_stays_short():
    outcome = refused(
        fleet("500x2xA-4[ram=1]"),
        layered(LARGE, cpu_offloading=True, distributed_inference_across_workers=True),
    )
    assert len(outcome.message.encode()) < 4096


def test_bytes_that_change_do_not_change_what_is_told():
    wanted = layered(MIDDLE)
    on = fleet("1x1x4090-24")
    before = refused(on, wanted).signature
    occupy(on, "w1", [0], 3)
    assert refused(on, wanted).signature == before
