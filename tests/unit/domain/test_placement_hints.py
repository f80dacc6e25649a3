"""Lessons of an instance: read from any data, applied to its demand and to the fleet that it is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpustackd.domain.demand import Engine
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.domain.placement_hints import (
    NO_HINTS,
    AvoidedPlace,
    ClaimRaise,
    placement_hints,
    with_claim_raise,
    without_places,
)
from tests.fleets import GIB, ask, demand, fleet, place, seats
from tests.gguf_sizes import layered, toy

MORE = {"vram": 50 * GIB, "ram": 0, "first_vram": 40 * GIB, "first_ram": 0, "times": 1, "model_version": 1}


def test_what_is_written_is_read_again() -> None:
    assert placement_hints(None, None) is NO_HINTS
    found = placement_hints(
        [{"worker_id": 3, "gpu_ids": [7, 8], "until": 1.5}, {"worker_id": 4, "gpu_ids": None}], MORE
    )
    assert found.avoid == (AvoidedPlace(3, (7, 8)), AvoidedPlace(4))
    assert found.claim_raise is not None
    assert found.claim_raise.as_json() == MORE


@pytest.mark.parametrize("junk", [1, "x", {}, [1], [{}], [{"worker_id": "3"}], [{"worker_id": True}], [None]])
def test_what_cannot_be_read_counts_as_not_there(junk: Any) -> None:
    found = placement_hints(junk, junk)
    assert (found.avoid, found.claim_raise) == ((), None)
    assert placement_hints(None, {**MORE, "vram": -1}).claim_raise is None
    assert placement_hints(None, {**MORE, "times": 2**70}).claim_raise is None


def test_a_raise_asks_for_more_of_the_model_as_it_was_then_and_of_no_edited_one() -> None:
    more = ClaimRaise(vram=50 * GIB, ram=4 * GIB, first_vram=40 * GIB, times=1, model_version=1)
    asked = with_claim_raise(demand(40, ram=1), more)
    assert (asked.need.vram, asked.need.ram, asked.need.ram_static) == (50 * GIB, 4 * GIB, 4 * GIB)
    assert asked.digest != demand(40).digest
    assert with_claim_raise(demand(40, version=2), more) == demand(40, version=2)
    assert with_claim_raise(demand(60), more).need.vram == 60 * GIB
    assert with_claim_raise(demand(40), None) == demand(40)


def test_a_raised_instance_gets_a_larger_card() -> None:
    on = fleet("1x1xA-48 + 1x1xB-80")
    need = demand(40, engine=Engine.CUSTOM)
    more = ClaimRaise(vram=50 * GIB, first_vram=40 * GIB, times=1, model_version=1)
    found = ask(on, with_claim_raise(need, more))
    assert isinstance(found, Placed)
    assert found.placement.parts[0].worker_name == "w2"
    assert sum(found.placement.parts[0].vram) == 50 * GIB


def test_a_raised_gguf_model_takes_more_on_every_device() -> None:
    on = fleet("1x1xA-80")
    need = layered(toy(10, 2))
    more = ClaimRaise(vram=48 * GIB, first_vram=40 * GIB, times=1, model_version=1)
    before, after = ask(on, need), ask(on, with_claim_raise(need, more))
    assert isinstance(before, Placed)
    assert isinstance(after, Placed)
    (small,), (large,) = before.placement.parts[0].vram, after.placement.parts[0].vram
    assert abs(large - small * 1.2) < 16


def test_a_worker_or_cards_to_avoid_are_as_if_closed_and_the_fleet_stays_as_it_is() -> None:
    on = fleet("2x2xA-80")
    before = {n: getattr(on, n).copy() for n in ("ready", "gpu_open", "free", "usable")}
    view = without_places(
        on, [AvoidedPlace(1), AvoidedPlace(2, (3,)), AvoidedPlace(99), AvoidedPlace(2, (999,))]
    )
    found = ask(view, demand(70))
    assert isinstance(found, Placed)
    assert seats(found.placement) == [("w2", (1,))]
    assert isinstance(ask(without_places(view, [AvoidedPlace(2)]), demand(70)), NoFit)
    assert all(np.array_equal(getattr(on, n), was) for n, was in before.items())
    assert {place(on, demand(70), f"x-{n}", n).parts[0].worker_name for n in (1, 2, 3, 4)} == {"w1", "w2"}


def test_places_to_avoid_count_for_several_workers_and_without_gpus_too() -> None:
    on = fleet("3x2xA-80 + 1xcpu")
    wide = demand(250, distributed_inference_across_workers=True)
    found = ask(without_places(on, [AvoidedPlace(2)]), wide)
    assert isinstance(found, Placed)
    assert {p.worker_name for p in found.placement.parts} == {"w1", "w3"}
    assert isinstance(ask(without_places(on, [AvoidedPlace(2), AvoidedPlace(3)]), wide), NoFit)
