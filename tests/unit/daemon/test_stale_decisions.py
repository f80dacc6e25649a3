"""Placements that news of the fleet has overtaken."""

from dataclasses import replace

import pytest

from gpustackd.daemon.scheduling.stale_decisions import still_fits
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Placed, Placement
from tests.fleets import ask, demand, fleet, model, occupy


def assumed(on: Fleet, need: float = 60, ram: float = 0) -> Placement:
    """A placement of `need` GiB that is decided and not committed."""
    outcome = ask(on, demand(need, model(1), ram=ram))
    assert isinstance(outcome, Placed), outcome
    on.assume(outcome.placement, 1, 1)
    return outcome.placement


def test_what_was_just_decided_still_fits() -> None:
    on = fleet("2x2xH100-80")
    assert still_fits(on, assumed(on))


def test_a_booking_of_others_on_the_same_card_overtakes_and_one_on_another_card_does_not() -> None:
    on = fleet("1x2xH100-80")
    placement = assumed(on)
    (taken,) = placement.parts[0].gpu_indexes
    occupy(on, "w1", [1 - taken], 60)
    assert still_fits(on, placement)
    occupy(on, "w1", [taken], 20, instance=901)
    assert not still_fits(on, placement)


def test_of_two_that_do_not_fit_together_any_more_one_is_left_when_the_other_is_forgotten() -> None:
    on = fleet("1x1xH100-80")
    small = model(1, backend_parameters=("--gpu-memory-utilization=0.3",))
    placements = []
    for n in (1, 2):
        outcome = ask(on, demand(10, small), n=n)
        assert isinstance(outcome, Placed)
        on.assume(outcome.placement, n, 1)
        placements.append(outcome.placement)
    occupy(on, "w1", [0], 50)
    assert [still_fits(on, p) for p in placements] == [False, False]
    on.forget(1)
    assert still_fits(on, placements[1])


@pytest.mark.parametrize("change", ["state", "open", "marked", "gone", "unified"])
def test_a_card_that_takes_nothing_more_overtakes(change: str) -> None:
    on = fleet("1x1xH100-80")
    placement = assumed(on)
    gpu = on.gpu_rows[placement.parts[0].gpu_ids[0]]
    worker = on.row(0)
    if change == "state":
        on.put_worker(replace(worker, state="MAINTENANCE", version=1))
    elif change == "open":
        on.put_gpu(replace(gpu, open=False, version=1))
    elif change == "marked":
        on.put_gpu(replace(gpu, over_committed=True, version=1))
    elif change == "gone":
        on.drop_gpu(gpu.id)
    else:
        on.put_worker(replace(worker, unified_memory=True, version=1))
    assert not still_fits(on, placement)


def test_ram_that_others_took_overtakes() -> None:
    on = fleet("1x2xH100-80", ram=64)
    placement = assumed(on, ram=40)
    assert still_fits(on, placement)
    occupy(on, "w1", [], 0, ram=30)
    assert not still_fits(on, placement)


def test_one_that_was_asked_to_overcommit_is_left_to_the_commit() -> None:
    on = fleet("1x1xH100-80")
    placement = assumed(on)
    occupy(on, "w1", list(placement.parts[0].gpu_indexes), 79)
    assert still_fits(on, replace(placement, over_commit=True))
