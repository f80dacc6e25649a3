"""Memory that others hold on cards: it is not free, it is told, and our own is not counted twice (FR-03)."""

from __future__ import annotations

import pytest

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.fleet import FOREIGN_CHANGE, Fleet
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import GIB, ask, demand, fleet, model, place, refused, seats
from tests.unit.placement.pools import policy, whole


def held(on: Fleet, *sizes: float) -> bool:
    """Others hold so many GiB on the first cards, beyond the reserve."""
    return on.set_foreign({n: int(size * GIB) for n, size in enumerate(sizes, 1) if size})


def test_cards_that_others_fill_are_not_taken():
    on = fleet("1x8xA-80")
    held(on, 78.9, 78.9, 78.9, 78.9)
    taken = {seats(place(on, demand(60), name=f"x-{n}", n=n))[0][1] for n in range(1, 5)}
    assert taken == {(4,), (5,), (6,), (7,)}
    refused(on, demand(60), n=9)


def test_what_is_left_beside_others_can_be_used():
    on = fleet("1x2xA-80[reserved=1]")
    held(on, 40, 60)
    wanted = demand(30, engine=Engine.CUSTOM)
    assert seats(place(on, wanted)) == [("w1", (0,))]
    refused(on, wanted, n=2)
    assert seats(place(on, demand(19, engine=Engine.CUSTOM), n=3)) == [("w1", (1,))]


def test_a_refusal_names_what_others_hold():
    on = fleet("1x8xA-80")
    held(on, *[78.9] * 7, 79)
    outcome = refused(on, demand(60))
    [said] = [r for r in outcome.reasons if r.code == "fit.foreign_memory"]
    assert "631.30 GiB on 8 GPUs of 1 worker, most on w1:cuda:7 (79.00 GiB)" in said.text
    assert said.params["held_bytes"] == sum(on.foreign[0].tolist())
    assert said.text in outcome.message
    assert "0 GPUs" not in outcome.message
    assert Cure.CAPACITY in outcome.cures
    assert "does not own" not in refused(fleet("1x1xA-40"), demand(60)).message


@pytest.mark.parametrize(
    "spec", [model(gpu_ids=["w1:cuda:0"]), model(backend_parameters=["--tensor-parallel-size=2"])]
)
def test_every_kind_of_refusal_names_it(spec):
    on = fleet("1x2xA-80")
    held(on, 50, 50)
    assert "processes outside the scheduler use" in refused(on, demand(60, spec)).message


def test_cards_that_are_out_of_the_question_are_not_counted():
    on = fleet("1x1xA-80 + 1x1xA-80[state=MAINTENANCE]")
    held(on, 60, 70)
    assert "60.00 GiB on 1 GPU of 1 worker" in refused(on, demand(60)).message


def test_a_mixed_picture_is_brought_up_to_date_in_kept_results():
    on, memo = fleet("1x1xA-80"), SearchCache()
    wanted = demand(60)
    assert not isinstance(ask(on, wanted, memo=memo), NoFit)
    assert held(on, 50) is False
    assert isinstance(ask(on, wanted, memo=memo), NoFit)
    assert held(on) is True
    assert not isinstance(ask(on, wanted, memo=memo), NoFit)


def test_samples_that_tremble_are_no_news():
    on = fleet("1x2xA-80")
    held(on, 10, 10)
    tick = on.tick
    assert on.set_foreign({1: 10 * GIB + FOREIGN_CHANGE - 1, 2: 10 * GIB - FOREIGN_CHANGE + 1}) is False
    assert on.tick == tick
    assert on.set_foreign({1: 10 * GIB + FOREIGN_CHANGE, 2: 10 * GIB}) is False
    assert on.tick == tick + 1
    assert on.set_foreign({1: 10 * GIB, 2: 10 * GIB}) is True


def test_a_card_that_is_not_known_is_passed_over_and_one_that_went_holds_nothing():
    on = fleet("1x2xA-80")
    on.set_foreign({1: GIB, 99: GIB})
    row = on.gpu_rows[1]
    on.drop_gpu(1)
    on.put_gpu(row)
    assert not on.foreign.any()


def test_on_unified_memory_the_pool_and_the_card_are_both_bounds():
    on = fleet("1x1xA-64[uma,ram=64,reserved=4]")
    held(on, 30)
    wanted = demand(40, engine=Engine.CUSTOM)
    refused(on, wanted)
    place(on, demand(29, engine=Engine.CUSTOM))


def test_a_whole_card_is_not_taken_where_others_are():
    on = fleet("1x2xA100-80")
    held(on, 5)
    assert seats(place(on, whole(70), policy=policy())) == [("w1", (1,))]
    outcome = refused(on, whole(70, n=2), n=2, policy=policy())
    assert "5.00 GiB on 1 GPU" in outcome.message
    assert Cure.CAPACITY in outcome.cures
