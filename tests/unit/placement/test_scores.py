"""Scores by the worked examples of scorers spec sections 3 and 4; FR-21; ties."""

from __future__ import annotations

import numpy as np
import pytest

from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.policy import Policy
from gpustackd.placement.scoring.locality import Warm
from gpustackd.placement.scoring.strategies import CardView, Scorer, spread_card, spread_worker
from gpustackd.placement.scoring.tie_break import block, tie_break
from tests.fleets import ask, demand, fleet, model, occupy, place, seats

GIB = 2**30


def binpack(claims, frees, ram_claim, ram_free):
    """Score of cards on one worker, sizes in GiB."""
    scorer = Scorer(Strategy.BINPACK, 100)
    as_row = lambda x: np.array([x]) * GIB  # noqa: E731
    view = CardView(
        as_row(claims), as_row(frees), as_row(frees), ram_claim * GIB, np.array([[ram_free * GIB]]), 0, 0
    )
    values = scorer.cards(view)
    return float(scorer.together(values, np.ones(values.shape, bool))[0])


@pytest.mark.parametrize(
    ("claims", "frees", "ram_claim", "ram_free", "score"),
    [
        ([12], [24], 2, 40, 35.00),  # E1
        ([12, 12], [24, 16], 2, 36, 51.85),  # E2
        ([12], [24], 0, 40, 33.33),  # E7
        ([12], [24], 2, 0, 33.33),
        ([30], [24], 2, 40, 85.00),  # E8
    ],
)
def test_binpack_scores_cards(claims, frees, ram_claim, ram_free, score):
    assert binpack(claims, frees, ram_claim, ram_free) == pytest.approx(score, abs=0.005)


@pytest.mark.parametrize(
    ("main", "subordinates", "total"),
    [
        (35, [36.67, 53.33], (5 * 35 + 90) / 7),  # E3
        (35, [36.67, 53.33, 36.67, 53.33], (5 * 35 + 180) / 9),  # E4
        (63.33, [63.33] * 4, 63.33),  # E5
    ],
)
def test_splitting_over_hosts_is_no_gain(main, subordinates, total):
    assert Scorer(Strategy.BINPACK, 100).several_workers(main, subordinates) == pytest.approx(total)


def test_scores_are_clamped():
    assert binpack([60], [24], 2, 40) == 100


def test_binpack_without_gpus_never_divides_by_zero():
    scorer = Scorer(Strategy.BINPACK, 100)
    assert scorer.without_cards(10, np.array([40]), 0, 0)[0] == 25  # E6
    assert scorer.without_cards(10, np.array([0]), 0, 0)[0] == 0  # E9
    assert scorer.without_cards(0, np.array([40]), 0, 0)[0] == 0  # E10


def spread(workers, cards):
    """Totals from (mine, others) of workers and per candidate the (mine, others) of its cards."""
    mine, others = np.array([w[0] for w in workers]), np.array([w[1] for w in workers])
    value = np.array([np.mean([spread_card(m, o) for m, o in c]) for c in cards])
    return Scorer(Strategy.SPREAD, 100).worker(value, mine, others).tolist()


@pytest.mark.parametrize(
    ("workers", "cards", "scores"),
    [
        ([(1, 0), (1, 0), (0, 0)], [[(1, 0)], [(0, 0)], [(0, 0)]], [62.75, 70.25, 100]),  # S1
        # S2
        ([(0, 0), (0, 2), (0, 1), (0, 1)], [[(0, 0)]] * 3 + [[(0, 1)]], [100, 87.25, 93.625, 91.125]),
        ([(2, 0), (1, 0), (1, 1)], [[(0, 0)]] * 3, [70.25, 91.5, 78.75]),  # S3
        ([(4, 0), (1, 0)], [[(1, 0)], [(0, 0)]], [62.75, 91.5]),  # S4
        ([(1, 0), (2, 0), (0, 0)], [[(0, 0)]] * 3, [85.125, 70.25, 100]),  # S6
        ([(1, 0)], [[(1, 0), (0, 0)]], [87.75]),  # S7
        ([(1, 0), (1, 2)], [[(1, 0)], [(1, 0)]], [84.0, 71.25]),
    ],
)  # fmt: skip
def test_spread_scores_workers_and_cards(workers, cards, scores):
    assert spread(workers, cards) == pytest.approx(scores)


def test_spread_without_gpus():
    scorer = Scorer(Strategy.SPREAD, 100)
    free = np.array([40, 40])
    assert scorer.without_cards(10, free, np.array([1, 0]), np.array([0, 0])).tolist() == pytest.approx(
        [65, 100]
    )  # S5


def test_nobody_is_no_candidate():
    assert spread_worker([], []).tolist() == []


@pytest.mark.parametrize(
    ("hosts", "main", "draft", "points"),
    [
        ([1], [1], [], 5.00),  # L1
        ([1], [1], [2], 3.33),  # L2
        ([1, 2, 3], [1, 2], [], 3.33),  # L3
        ([1, 2, 3], [1, 2], [3], 2.78),  # L4
        ([1], [], [1], 1.67),  # L5
    ],
)
def test_locality_counts_files_of_model_and_draft(hosts, main, draft, points):
    files = Warm(dict.fromkeys(main, 1), dict.fromkeys(draft, 1))
    assert 5 * files.share(hosts) == pytest.approx(points, abs=0.005)


def test_files_decide_between_even_places():
    spec = model(source=None, local_path="/models/x")
    on = fleet("9x1xA-24")
    policy = Policy(ready_files={spec.source_index: {7: 1}})
    placed = place(on, demand(8, spec), policy=policy)
    assert placed.parts[0].worker_name == "w7"
    assert placed.score_parts == {"placement": 100.0, "locality": 5.0}
    without = Policy(ready_files={spec.source_index: {7: 1}}, locality_max=0)
    assert "locality" not in place(fleet("9x1xA-24"), demand(8, spec), policy=without).score_parts


# -- FR-21 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["m-0", "m-1", "m-2"], ["a", "b", "c"], ["m-x7f", "m-q2k", "m-z9p"]])
def test_three_replicas_on_two_workers_lie_two_and_one(names):
    on = fleet("2x8xH-64", reserved=1, ram=512, ram_reserved=2)
    spec = model(local_path="/m")
    policy = Policy(ready_files={spec.source_index: {1: 1, 2: 1}})
    taken = [
        place(on, demand(50, spec), name, n, policy).parts[0].worker_name for n, name in enumerate(names)
    ]
    assert sorted(taken.count(w) for w in ("w1", "w2")) == [1, 2]


def test_cards_stay_even_after_instances_left_one():
    on = fleet("1x4xA-23", reserved=1)
    placed = {}
    for n in range(8):
        wanted = demand(1, model(1 + n, categories=("embedding",)))
        placed[n] = place(on, wanted, f"m{n}-1", n).parts[0]
    for n in [n for n, p in placed.items() if p.gpu_indexes == (0,)]:
        on.vram_allocated[0, 0] -= placed[n].vram[0]
        on.remove_instance(n)
    for n in range(8, 13):
        place(on, demand(1, model(1 + n, categories=("embedding",))), f"m{n}-1", n)
    counts = on.occupancy.gpu_occupants[0, :4].tolist()
    assert sum(counts) == 11
    assert max(counts) - min(counts) <= 1


# -- strategies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        (Strategy.BINPACK, ("w2", (1,))),
        (Strategy.BEST_FIT, ("w2", (1,))),
        (Strategy.FRAGMENTATION, ("w2", (1,))),
        (Strategy.FIRST_FIT, ("w1", (0,))),
    ],
)
def test_each_strategy_chooses_its_way(strategy, where):
    on = fleet("3x2xA-24")
    occupy(on, "w2", [1], 12)
    wanted = demand(4, model(placement_strategy=strategy, categories=("embedding",)))
    assert seats(place(on, wanted))[0] == where


def test_the_models_strategy_goes_before_the_setting():
    on = fleet("2x1xA-24")
    occupy(on, "w1", [0], 4)
    wanted = demand(4, model(placement_strategy=Strategy.BINPACK, categories=("embedding",)))
    assert place(on, wanted, policy=Policy(strategy=Strategy.SPREAD)).parts[0].worker_name == "w1"


# -- ties ----------------------------------------------------------------------------------------------------


def test_even_places_that_book_less_come_first():
    assert place(fleet("1x1xA-80 + 1x1xB-24"), demand(8)).parts[0].worker_name == "w2"


def test_instances_of_one_model_that_do_not_see_each_other_choose_different_places():
    on = fleet("16x4xA-24")
    chosen = [candidates_of(on, f"m-{n}") for n in range(16)]
    assert len(set(chosen)) == 16


def candidates_of(on, name):
    placement = ask(on, demand(8), name).placement
    return placement.parts[0].worker_name


def test_names_turn_steadily():
    assert tie_break("m-7") - tie_break("m-3") == 4
    assert tie_break("a") == tie_break("a")
    assert tie_break("") >= 0
    assert tie_break("m-²") >= 0


def test_blocks_stay_whole():
    assert {tuple(block([0, 1, 2, 3, 5], 2, n)) for n in range(9)} == {(0, 1), (2, 3)}
    assert block([4, 6], 3, 5) == [4, 6]


def test_a_decision_keeps_its_best_candidates():
    outcome = ask(fleet("9x4xA-24"), demand(8))
    assert len(outcome.candidates) == 5
    assert outcome.candidates[0]["worker"] == outcome.placement.parts[0].worker_name


def test_instances_in_a_row_that_cannot_see_each_other_turn_to_every_even_gpu():
    on = fleet("9x4xA-24")
    taken = {tuple(seats(ask(on, demand(8), name=f"m-{n}").placement)) for n in range(36)}
    assert len(taken) == 36
