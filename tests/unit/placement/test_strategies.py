"""Strategies on textbook fleets: first fit, best fit, what fragmentation keeps, and bursts largest first."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.model_spec import Source, Strategy
from gpustackd.domain.origin import DOWNLOADING, adapter_origins, draft_origin
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.placement.mix import WHOLE, DemandShape, Mix
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.scoring.demand_mix import magnitude, shape
from gpustackd.placement.scoring.fragmentation import Usable
from tests.fleets import GIB, ask, demand, fleet, model, occupy, place, seats

SIZE = 24.0


def cards(n: int, strategy: Strategy, number: int = 1) -> Demand:
    """A demand for exactly `n` whole cards of one worker."""
    flags = (f"--pipeline-parallel-size={n}",) if n > 1 else ()
    spec = model(number, placement_strategy=strategy, backend_parameters=flags, name=f"m{number}")
    return demand(SIZE * 0.8 * n, spec)


def burst(on: Fleet, sizes: list[int], strategy: Strategy, policy: Policy | None = None) -> list[str | None]:
    """Where demands for so many cards go, one after the other; None = nowhere."""
    found: list[str | None] = []
    for n, size in enumerate(sizes, 1):
        wanted = cards(size, strategy, n)
        outcome = ask(on, wanted, f"i-{n}", n, policy)
        if isinstance(outcome, Placed):
            on.assume(outcome.placement, n, n)
            on.confirm(n)
            found.append(outcome.placement.parts[0].worker_name)
            assert len(outcome.placement.parts) == 1
            assert outcome.placement.gpu_count == size
        else:
            found.append(None)
    return found


def two(a: int, b: int) -> Fleet:
    return fleet(f"1x{a}xA-{SIZE}[name=a] + 1x{b}xA-{SIZE}[name=b]")


def test_first_fit_takes_the_first_worker_with_room() -> None:
    assert burst(two(4, 2), [3, 2, 2, 1], Strategy.FIRST_FIT) == ["a1", "b2", None, "a1"]


def test_first_fit_leaves_one_out_where_best_fit_decreasing_places_all() -> None:
    assert burst(two(4, 3), [3, 2, 2], Strategy.FIRST_FIT) == ["a1", "b2", None]
    decreasing = sorted([2, 3, 2], key=lambda n: -n)
    assert burst(two(4, 3), decreasing, Strategy.BEST_FIT) == ["b2", "a1", "a1"]


@pytest.mark.parametrize("sizes", [(4, 3), (3, 4), (8, 3, 4), (2, 4, 3)])
def test_best_fit_takes_the_worker_that_is_left_with_least(sizes: tuple[int, ...]) -> None:
    on = fleet(" + ".join(f"1x{n}xA-{SIZE}" for n in sizes))
    placed = ask(on, cards(3, Strategy.BEST_FIT)).placement  # type: ignore[union-attr]
    assert placed.parts[0].worker_name == f"w{sizes.index(3) + 1}"


def test_best_fit_takes_the_tightest_card() -> None:
    on = fleet("2x2xA-24 + 1x1xA-24")
    occupy(on, "w1", [0], 8)
    occupy(on, "w2", [1], 12)
    occupy(on, "w3", [0], 10)
    wanted = demand(9, model(placement_strategy=Strategy.BEST_FIT, categories=("embedding",)))
    assert seats(place(on, wanted)) == [("w2", (1,))]


def test_of_even_cards_best_fit_takes_the_fuller_worker() -> None:
    on = fleet("3x4xA-24")
    occupy(on, "w2", [0, 1], 24)
    occupy(on, "w3", [0], 24)
    wanted = demand(9, model(placement_strategy=Strategy.BEST_FIT, categories=("embedding",)))
    assert place(on, wanted).parts[0].worker_name == "w2"


def test_first_fit_goes_by_the_ids_of_workers_whatever_came_first() -> None:
    on = Fleet()
    of = fleet("3x1xA-24")
    for w in (3, 1, 2):
        on.put_worker(of.row(w - 1))
    for gpu in of.gpu_rows.values():
        on.put_gpu(gpu)
    spec = [model(n, placement_strategy=Strategy.FIRST_FIT, name=f"m{n}") for n in (1, 2, 3)]
    placed = [place(on, demand(20, s), f"x{n}", n).parts[0].worker_name for n, s in enumerate(spec, 1)]
    assert placed == ["w1", "w2", "w3"]


def test_first_fit_over_workers_takes_the_first_ones() -> None:
    on = Fleet()
    of = fleet("5x2xA-24")
    for w in (5, 3, 1, 2, 4):
        on.put_worker(of.row(w - 1))
    for gpu in of.gpu_rows.values():
        on.put_gpu(gpu)
    flags = ("--pipeline-parallel-size=4",)
    spec = model(
        placement_strategy=Strategy.FIRST_FIT,
        backend_parameters=flags,
        distributed_inference_across_workers=True,
    )
    placed = place(on, demand(70, spec), "anything")
    assert [p.worker_name for p in placed.parts] == ["w1", "w2"]


def test_first_fit_does_not_turn_with_names() -> None:
    on = fleet("4x4xA-24")
    wanted = demand(9, model(placement_strategy=Strategy.FIRST_FIT))
    chosen = {ask(on, wanted, name).placement.parts[0] for name in "abcdef"}  # type: ignore[union-attr]
    assert {(p.worker_name, p.gpu_indexes) for p in chosen} == {("w1", (0,))}


def test_the_default_strategy_is_a_setting() -> None:
    on = two(4, 3)
    wanted = demand(9, model(categories=("embedding",)))
    for strategy, worker in ((Strategy.FIRST_FIT, "a1"), (Strategy.BEST_FIT, "b2")):
        placed = ask(on, wanted, "x", 1, Policy(strategy=strategy)).placement  # type: ignore[union-attr]
        assert placed.parts[0].worker_name == worker


# -- fragmentation -------------------------------------------------------------------------------------------


def mix(*shapes: tuple[DemandShape, float]) -> Policy:
    return Policy(mix=Mix(tuple(s for s, _ in shapes), tuple(w for _, w in shapes)))


def test_fragmentation_keeps_a_whole_worker_for_what_waits() -> None:
    on = fleet("2x4xA-24")
    occupy(on, "w2", [0], 1)
    small = demand(4, model(2, placement_strategy=Strategy.FRAGMENTATION, categories=("embedding",)))
    waits = mix((DemandShape(4, 0, 0.9), 1.0))
    for n in range(3):
        assert place(on, small, f"s{n}", n + 1, waits).parts[0].worker_name == "w2"
    assert isinstance(ask(on, cards(4, Strategy.FRAGMENTATION), "big", 99, waits), Placed)


def test_fragmentation_puts_small_ones_where_nothing_is_lost() -> None:
    on = fleet("1x2xA-24 + 1x2xA-80")
    occupy(on, "w1", [0], 12)
    small = demand(4, model(placement_strategy=Strategy.FRAGMENTATION, categories=("embedding",)))
    assert seats(place(on, small)) == [("w1", (0,))]  # no whole card there any more


def test_fragmentation_knows_whom_small_leftovers_still_serve() -> None:
    """With demands of half a card to come, a half empty card is worth keeping as it is."""
    on = fleet("1x2xA-24")
    occupy(on, "w1", [0], 12)
    small = demand(4, model(placement_strategy=Strategy.FRAGMENTATION, categories=("embedding",)))
    halves = mix((DemandShape(1, 12 * GIB), 1.0))
    # on the full card 20 GiB stay useful of 24; on the half full one nothing of 12
    assert seats(place(on, small, policy=halves)) == [("w1", (1,))]
    whole = mix((DemandShape(1, 0, 1.0), 1.0))
    assert seats(place(on, small, "y", 2, policy=whole)) == [("w1", (0,))]


def test_fragmentation_breaks_the_smaller_worker() -> None:
    on = fleet(f"1x4xA-{SIZE}[name=a] + 1x3xA-{SIZE}[name=b]")
    assert burst(on, [3, 2, 2], Strategy.FRAGMENTATION) == ["b2", "a1", "a1"]


def test_a_new_mix_is_heeded_at_once() -> None:
    from gpustackd.placement.decide import decide
    from gpustackd.placement.policy import Subject
    from gpustackd.placement.search_cache import SearchCache

    on = fleet("1x2xA-24")
    occupy(on, "w1", [0], 12)
    small = demand(4, model(placement_strategy=Strategy.FRAGMENTATION, categories=("embedding",)))
    memo: SearchCache = SearchCache()  # type: ignore[type-arg]
    found = []
    for policy in (mix((DemandShape(1, 12 * GIB), 1.0)), mix((DemandShape(1, 0, 1.0), 1.0))):
        outcome = decide(on, small, Subject(1, "x"), policy, memo)
        assert isinstance(outcome, Placed)
        found.append(outcome.placement.parts[0].gpu_indexes)
    assert found == [(1,), (0,)]
    assert len(memo) == 1


def naive_usable(free: list[int], capacity: list[int], shape: DemandShape) -> int:
    """What the paper counts, card by card."""
    good = [
        f for f, c in zip(free, capacity, strict=True) if c > 0 and f >= max(shape.size, shape.share * c, 1)
    ]
    return sum(good) if len(good) >= shape.gpus else 0


@pytest.mark.parametrize("seed", range(30))
def test_costs_are_those_of_the_paper(seed: int) -> None:
    chance = np.random.default_rng(seed)
    capacity = chance.choice([0, 24, 48, 80], (5, 4)).astype(np.int64)
    free = (capacity * chance.choice([0.0, 0.3, 0.5, 1.0], (5, 4))).astype(np.int64)
    shapes = (DemandShape(1, 10), DemandShape(2, 0, 0.9), DemandShape(3, 20), *WHOLE)
    weights = tuple(float(x) for x in chance.dirichlet(np.ones(len(shapes))))
    usable = Usable.of(free, capacity, Mix(shapes, weights))
    claim = np.minimum(free, chance.integers(0, 30, (5, 4)))
    each = usable.cost_of_each(claim)
    taken = chance.random((5, 4)) < 0.5
    together = usable.cost_together(claim, taken)
    for r in range(5):
        now, size = free[r].tolist(), capacity[r].tolist()
        for s in range(4):
            after = [f - int(claim[r, s]) * (i == s) for i, f in enumerate(now)]
            lost = [max(naive_usable(now, size, k) - naive_usable(after, size, k), 0) for k in shapes]
            assert each[r, s] == pytest.approx(sum(w * x for w, x in zip(weights, lost, strict=True)))
        after = [f - int(claim[r, i]) * bool(taken[r, i]) for i, f in enumerate(now)]
        lost = [max(naive_usable(now, size, k) - naive_usable(after, size, k), 0) for k in shapes]
        assert together[r] == pytest.approx(sum(w * x for w, x in zip(weights, lost, strict=True)))


@pytest.mark.parametrize("strategy", list(Strategy))
def test_scores_lie_between_nothing_and_the_maximum(strategy: Strategy) -> None:
    on = fleet("2x4xA-24 + 1x2xB-80 + 1x1xC-141 + 2xcpu")
    occupy(on, "w1", [0, 1], 20)
    occupy(on, "w3", [0], 79)
    for n, size in enumerate(permutations([3.0, 20.0, 60.0, 130.0]), 1):
        for k, need in enumerate(size):
            outcome = ask(on, demand(need, model(n, placement_strategy=strategy), heads=16), f"{n}-{k}", 500)
            if isinstance(outcome, Placed):
                assert 0 <= outcome.placement.score_parts["placement"] <= 100
                for told in outcome.candidates:
                    assert 0 <= told["parts"]["placement"] <= 100


def test_a_maximum_of_nothing_or_less_switches_the_strategy_off() -> None:
    on = fleet("4x1xA-24")
    occupy(on, "w2", [0], 4)
    wanted = demand(4, model(categories=("embedding",)))
    for most in (0.0, -5.0):
        outcome = ask(on, wanted, "x", 1, Policy(strategy=Strategy.BINPACK, placement_max=most))
        assert isinstance(outcome, Placed)
        assert outcome.placement.score == 0


# -- shapes and sizes of demands -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "largest", "shaped"),
    [
        (demand(10, model()), 24, (1, 10, 0.9)),
        (demand(40, model(), heads=64), 24, (2, 20, 0.9)),
        (demand(60, model(), heads=64), 24, (4, 15, 0.9)),
        (cards(3, Strategy.SPREAD), 24, (3, 19.2, 0.9)),
        (demand(10, model(categories=("embedding",))), 24, (1, 10, 0.0)),
        (demand(0, model(cpu_offloading=True), engine=Engine.CUSTOM), 24, None),
    ],
)
def test_a_demand_has_a_shape(wanted: Demand, largest: int, shaped: tuple[int, float, float] | None) -> None:
    found = shape(rules_of(wanted), largest * GIB)
    if shaped is None:
        assert found is None
        return
    assert found is not None
    assert (found.gpus, found.size / GIB, found.share) == pytest.approx(shaped, abs=0.01)


def test_larger_demands_have_larger_magnitudes() -> None:
    sizes = [magnitude(rules_of(cards(n, Strategy.SPREAD)), 24 * GIB) for n in (1, 2, 3, 4)]
    assert sizes == sorted(set(sizes))


# -- bytes still to download ---------------------------------------------------------------------------------


LORA = ({"lora_name": "a", "source": Source.LOCAL_PATH, "local_path": "/lora/a"},)


def with_files(ready: dict[str, dict[int, int]], **fields: object) -> str:
    spec = model(source=Source.LOCAL_PATH, local_path="/m", **fields)
    named = {"main": spec.source_index}
    named |= {f"lora{n}": o.index for n, o in enumerate(adapter_origins(spec))}
    if (draft := draft_origin(spec)) is not None:
        named["draft"] = draft.index
    files = {
        (DOWNLOADING if k.startswith("~") else "") + named[k.removeprefix("~")]: v for k, v in ready.items()
    }
    on = fleet("6x1xA-24")
    return place(on, demand(8, spec), policy=Policy(ready_files=files)).parts[0].worker_name


def test_of_workers_with_the_model_the_one_with_the_adapter_is_taken() -> None:
    files = {"main": {2: 100, 4: 100, 5: 100}, "lora0": {4: 10}}
    assert with_files(files, lora_list=LORA) == "w4"


def test_adapters_alone_decide_between_workers_without_the_model() -> None:
    assert with_files({"lora0": {3: 10}}, lora_list=LORA) == "w3"


def test_a_file_on_its_way_is_better_than_none_and_worse_than_one_that_is_there() -> None:
    assert with_files({"~main": {5: 100}}) == "w5"
    assert with_files({"main": {2: 100}, "~main": {5: 100}}) == "w2"


def test_the_larger_of_two_missing_files_counts_more() -> None:
    two_ = (*LORA, {"lora_name": "b", "source": Source.LOCAL_PATH, "local_path": "/lora/b"})
    assert with_files({"lora0": {1: 10, 2: 10}, "lora1": {2: 90, 3: 90}}, lora_list=two_) == "w2"
    assert with_files({"lora0": {1: 10}, "lora1": {3: 90}}, lora_list=two_) == "w3"


def test_a_draft_model_on_a_path_counts() -> None:
    config = {"draft_model": "/draft"}
    assert with_files({"main": {1: 9, 6: 9}, "draft": {6: 3}}, speculative_config=config) == "w6"


def test_nobody_is_asked_where_locality_is_off() -> None:
    spec = model(source=Source.LOCAL_PATH, local_path="/m")
    on = fleet("6x1xA-24")
    policy = Policy(ready_files={spec.source_index: {2: 100}}, locality_max=0)
    names = {
        ask(on, demand(8, spec), f"x-{n}", policy=policy).placement.parts[0].worker_name for n in range(6)
    }
    assert len(names) == 6


# -- records -------------------------------------------------------------------------------------------------


def test_a_placement_over_workers_tells_of_the_next_best_ones() -> None:
    on = fleet("10x2xA-24")
    flags = ("--pipeline-parallel-size=4",)
    spec = model(backend_parameters=flags, distributed_inference_across_workers=True)
    outcome = ask(on, demand(70, spec))
    assert isinstance(outcome, Placed)
    assert len(outcome.candidates) == 5
    assert outcome.candidates[0]["worker"] == outcome.placement.parts[0].worker_name
    assert all(c["gpus"] == 4 and c["workers"] == 2 for c in outcome.candidates)
    assert len({c["worker"] for c in outcome.candidates}) == 5


def test_a_refusal_has_its_pool() -> None:
    on = fleet("3x1xA-24[zone=a] + 2x1xA-24[state=MAINTENANCE]")
    outcome = ask(on, demand(100, model(worker_selector={"zone": "a"})))
    assert isinstance(outcome, NoFit)
    assert [(s.filter, s.kept, s.total) for s in outcome.pool] == [("labels", 3, 5), ("status", 3, 5)]
    assert isinstance(on.row(0), WorkerRow)
