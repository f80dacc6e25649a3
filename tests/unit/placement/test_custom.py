"""Custom backends: what they take, CPU places, no spanning of workers (custom spec part A)."""

from __future__ import annotations

import pytest

from gpustackd.domain.demand import Engine
from gpustackd.engines.custom import card_fraction
from tests.fleets import GIB, demand, fleet, model, occupy, place, refused, seats


def custom(need, spec=None, **more):
    return demand(need, spec, engine=Engine.CUSTOM, ram=more.pop("ram", 2), **more)


@pytest.mark.parametrize(
    ("command", "flags", "fraction"),
    [
        (None, [], None),
        ("serve --gpu-memory-utilization 0.5", [], 0.5),
        ("serve --gpu-memory-utilization 0.5", ["--mem-fraction-static=0.7"], 0.7),
        ("serve --mem-fraction-static=0.7 --gpu-memory-utilization=0.4", [], 0.4),
        ("serve 'unclosed --gpu-memory-utilization 0.5", [], None),
        (None, ["--gpu-memory-utilization=1.5"], None),
        (None, ["--gpu-memory-utilization=much"], None),
    ],
)
def test_the_last_flag_tells_the_share_of_a_card(command, flags, fraction):
    assert card_fraction(custom(1, model(run_command=command, backend_parameters=flags)).spec) == fraction


@pytest.mark.parametrize(
    ("flags", "claim"), [(["--gpu-memory-utilization=0.9"], None), (["--gpu-memory-utilization=0.3"], 11.6)]
)
def test_a_card_books_the_need_or_the_share_whichever_is_more(flags, claim):
    on = fleet("1x1x4090-24")
    expected = int(24 * GIB * 0.9) if claim is None else int(claim * GIB)
    placed = place(on, custom(11.6, model(backend_parameters=flags)))
    assert placed.parts[0].vram == (expected,)
    assert placed.parts[0].ram == 2 * GIB


def test_as_few_cards_as_hold_the_need_are_taken():
    assert place(fleet("1x4x4080-16"), custom(26.99)).gpu_count == 2


def test_every_card_has_room_for_its_part():
    on = fleet("1x4x4080-16")
    occupy(on, "w1", [0, 1], 12)
    placed = place(on, custom(30))
    assert seats(placed)[0][1] == (2, 3)
    assert sum(placed.parts[0].vram) >= 30 * GIB
    refused(on, custom(30), n=2)


def test_custom_backends_do_not_span_workers():
    refused(fleet("2x1x4080-16"), custom(30))
    spec = model(gpu_ids=["w1:cuda:0", "w2:cuda:0"])
    assert "cannot span workers" in refused(fleet("2x1x4080-16"), custom(20, spec)).message


def test_replicas_on_single_cards_of_several_workers_are_no_span():
    spec = model(gpu_ids=["w1:cuda:0", "w2:cuda:0"], per_replica=1)
    on = fleet("2x1x4080-16")
    taken = {seats(place(on, custom(12, spec), f"m-{n}", n))[0][0] for n in range(2)}
    assert taken == {"w1", "w2"}


def test_the_share_holds_for_picked_cards_too():
    spec = model(gpu_ids=["w1:cuda:0"], backend_parameters=["--gpu-memory-utilization=0.9"])
    assert place(fleet("1x1x4090-24"), custom(5, spec)).parts[0].vram == (int(24 * GIB * 0.9),)


def test_a_place_without_gpu_only_where_that_is_allowed():
    on = fleet("2xcpu[ram=100]")
    refused(on, custom(700, ram=70))
    placed = place(on, custom(700, model(cpu_offloading=True), ram=70))
    assert placed.parts[0].gpu_ids == ()
    assert placed.parts[0].gpu_type is None
    assert placed.parts[0].ram == 70 * GIB
    place(on, custom(700, model(cpu_offloading=True), ram=70), n=2)
    said = refused(on, custom(700, model(cpu_offloading=True), ram=70), n=3).message
    assert "of the 70.00 GiB needed" in said
    assert "30.00 of the 70.00 GiB needed" in said


def test_spread_counts_places_without_gpus():
    on = fleet("3xcpu[ram=100]")
    spec = model(cpu_offloading=True)
    taken = [seats(place(on, custom(1, spec), f"m-{n}", n))[0][0] for n in range(3)]
    assert sorted(taken) == ["w1", "w2", "w3"]


def test_a_gpu_goes_before_a_place_without_one():
    on = fleet("2xcpu + 1x1xA-24")
    assert place(on, custom(8, model(cpu_offloading=True))).gpu_count == 1


def test_a_router_takes_ram_only():
    on = fleet("1x1xA-24[ram=8]")
    wanted = demand(0, engine=Engine.ROUTER, ram=3)
    assert place(on, wanted).parts[0].gpu_ids == ()
    place(on, wanted, n=2)
    said = refused(on, wanted, n=3).message
    assert "2.00 of the 3.00 GiB needed" in said
    assert "GPU memory" not in said


def test_vram_that_fits_with_ram_that_does_not_says_so():
    said = refused(fleet("1x1xA-80[ram=4]"), custom(50, ram=5)).message
    assert "w1 has the most free, 4.00 of the 5.00 GiB needed" in said
