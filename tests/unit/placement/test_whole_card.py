"""Whole cards of a pool: untouched, booked whole, on one worker (whole-card spec, part C)."""

from __future__ import annotations

import pytest

from gpustackd.domain.outcome import Check, Cure
from gpustackd.placement.rules.pool import ask_of
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import GIB, ask, fleet, occupy, place, refused, seats
from tests.unit.placement.pools import A100, node, policy, whole

EIGHTY = 85_899_345_920


@pytest.mark.parametrize(
    ("flags", "fields", "cards"),
    [
        ([], {}, 1),
        (["--tensor-parallel-size", "4"], {}, 4),
        (["-tp=2", "-pp=2"], {}, 4),
        (["--tp-size=4"], {"backend": "SGLang"}, 4),
        (["--tp-size=4", "--dp-size=2", "--enable-dp-attention"], {"backend": "SGLang"}, 4),
        (["-dp", "2", "-tp", "2"], {"backend": "MindIE"}, 4),
        (["--tensor-parallel-size=4"], {"backend": "VoxBox"}, 1),
    ],
)
def test_cards_of_a_member_are_the_world_size(flags, fields, cards):
    assert ask_of(whole(30, *flags, **fields)).cards == cards


def test_a_flag_that_cannot_be_read_is_named():
    wanted = whole(30, "--tensor-parallel-size=0")
    assert "--tensor-parallel-size is 0" in refused(fleet("1x2xA100-80"), wanted, policy=policy()).message


def test_four_cards_of_80_are_claimed_on_a_worker_that_has_them():
    on = fleet("1x2xA100-80 + 1x8xA100-80")
    wanted = whole(70, "--tensor-parallel-size", "4")
    placed = place(on, wanted, policy=policy())
    assert placed.parts[0].worker_name == "w2"
    assert placed.parts[0].vram == (EIGHTY,) * 4


def test_whole_cards_are_committed_only_as_they_were_seen():
    placed = place(fleet("1x2xA100-80"), whole(70), policy=policy())
    assert placed.check is Check.UNCHANGED
    assert placed.vram_utilization is None
    assert len(placed.parts[0].gpu_versions) == 1


def test_a_card_that_anything_sits_on_is_no_whole_card():
    on = fleet("1x3xA100-80")
    occupy(on, "w1", [0], 1)
    occupy(on, "w1", [2], 0)  # an instance that books nothing is there all the same
    assert seats(place(on, whole(30), policy=policy())) == [("w1", (1,))]
    outcome = refused(on, whole(30), n=2, policy=policy())
    assert "w1 has the most untouched ones, 0 of the 1 needed" in outcome.message
    assert outcome.reasons[-1].code == "pool.in_use"
    assert Cure.CAPACITY in outcome.cures


def test_the_whole_card_is_booked_so_that_nothing_else_comes_to_it():
    """A reserve, or a card a little smaller or larger than the pool says, changes what can be booked."""
    for size, reserved, booked in ((80, 1, 79), (79.5, 0, 79.5), (82, 0, 82)):
        on = fleet(f"1x1xA100-{size}", reserved=reserved)
        placed = place(on, whole(70), policy=policy())
        assert placed.parts[0].vram == (int(booked * GIB),)
        assert int(on.free_vram()[on.slot[1]]) == 0


def test_replicas_take_whole_blocks_of_cards():
    on = fleet("1x8xA100-80")
    wanted = whole(100, "-tp", "2")
    taken = [seats(place(on, wanted, f"m-{n}", n, policy()))[0][1] for n in range(4)]
    assert sorted(taken) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_replicas_that_cannot_see_each_other_take_different_blocks():
    on = fleet("1x8xA100-80")
    wanted = whole(100, "-tp", "2")
    taken = {ask(on, wanted, name=f"m-{n}", policy=policy()).placement.parts[0].gpu_indexes for n in range(4)}
    assert taken == {(0, 1), (2, 3), (4, 5), (6, 7)}


def test_100_gib_on_one_card_are_refused_with_the_tensor_parallel_size_that_would_do():
    outcome = refused(fleet("1x8xA100-80"), whole(100), policy=policy())
    for fact in ("100.00 GiB", "one card gives 80.00 GiB", "a tensor-parallel size of 2"):
        assert fact in outcome.message
    reason = outcome.reasons[-1]
    assert (reason.code, reason.params["suggested_tp"], reason.params["cards"]) == (
        "pool.cards_too_small",
        2,
        1,
    )
    assert Cure.MODEL in outcome.cures


def test_the_suggested_size_is_the_smallest_power_of_two():
    outcome = refused(fleet("1x8xA100-80"), whole(250, "-tp", "2"), policy=policy())
    assert "2 cards give 160.00 GiB" in outcome.message
    assert outcome.reasons[-1].params["suggested_tp"] == 4


def test_whole_cards_never_spread_over_workers():
    on = fleet("4x2xA100-80")
    outcome = refused(on, whole(100, "-tp", "4"), policy=policy())
    assert "no worker has 4 cards of A100; the most on one is 2" in outcome.message


def test_an_untouched_card_is_one_of_which_the_cluster_says_so_too():
    on = fleet("1x3xA100-80")
    known = policy(devices={"w1": node(90, 100, 100, logical=0)})
    assert seats(place(on, whole(30, "-tp", "2"), policy=known)) == [("w1", (1, 2))]
    scarce = policy(devices={"w1": node(90, 100, 50)})
    outcome = refused(fleet("1x3xA100-80"), whole(30, "-tp", "2"), policy=scarce)
    assert "2 untouched cards" in outcome.message


def test_software_slicing_is_not_asked_for_whole_cards():
    devices = {"w1": node(100, logical=0)}
    on = fleet("1x1xA100-80")
    assert place(on, whole(30), policy=policy(devices=devices)).gpu_count == 1


def test_the_model_is_held_against_what_the_cards_really_hold():
    on = fleet("1x1xA100-79")
    outcome = refused(on, whole(79.5), policy=policy())
    assert outcome.reasons[-1].code == "pool.cards_too_small"


def test_a_pool_of_an_accelerator_that_reports_no_memory_waits_for_it():
    outcome = refused(fleet("1x1xA100-80"), whole(30), policy=policy({**A100, "memory": ""}))
    assert "the card memory of" in outcome.message
    assert Cure.BACKENDS in outcome.cures


def test_kept_results_follow_what_was_taken():
    on = fleet("2x4xA100-80")
    memo: SearchCache = SearchCache()
    known = policy()
    for n in range(4):
        kept = ask(on, whole(100, "-tp", "2"), name=f"m-{n}", n=n, policy=known, memo=memo)
        assert kept == ask(on, whole(100, "-tp", "2"), name=f"m-{n}", n=n, policy=known)
        on.assume(kept.placement, n, 1)
    refused(on, whole(100, "-tp", "2"), n=9, policy=known, memo=memo)


def test_cards_that_hold_less_than_their_pool_says_are_told_as_they_are():
    said = refused(fleet("1x2xA100-64"), whole(150, "--tensor-parallel-size=2"), policy=policy()).message
    assert "2 cards give 160.00 GiB (A100, 80.00 GiB each), of which 128.00 GiB can be booked" in said
