"""The best candidate is chosen, however its score is worked out; strategies never change what fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Source, Strategy
from gpustackd.domain.outcome import Placed
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.mix import DemandShape, Mix
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search_cache import SearchCache
from tests.exploring import explored
from tests.fleets import GIB, demand, fleet, model, occupy
from tests.places import places
from tests.property.test_placement import FLEETS, HOLDS, demands

SHAPES = st.builds(
    DemandShape,
    st.integers(1, 5),
    st.integers(0, 80).map(lambda n: n * GIB),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
MIXES = st.lists(SHAPES, min_size=1, max_size=4, unique=True).map(
    lambda s: Mix(tuple(s), tuple([1 / len(s)] * len(s)))
)
SELECTOR = {"match": {}, "preferred": [{"key": "zone", "operator": "Exists", "weight": 7}]}


def held(text: str, holds: list[tuple[int, set[int], int]]) -> Fleet:
    on = fleet(text)
    for n, (w, indexes, gib) in enumerate(holds):
        if f"w{w}" in on.by_name:
            occupy(on, f"w{w}", sorted(indexes), min(gib, 20), instance=900 + n, model=1 + n % 3)
    return on


def of_one_card(need: int, strategy: Strategy) -> Demand:
    spec = model(
        1,
        categories=("embedding",),
        placement_strategy=strategy,
        source=Source.LOCAL_PATH,
        local_path="/m",
        worker_selector=SELECTOR,
    )
    return demand(need, spec)


@explored(120)
@given(FLEETS, HOLDS, st.integers(1, 60), st.sampled_from(list(Strategy)), MIXES, st.sets(st.integers(1, 9)))
def test_the_best_of_all_candidates_is_chosen(
    text: str, holds: Any, need: int, strategy: Strategy, mix: Mix, ready: set[int]
) -> None:
    on = held(text, holds)
    wanted = of_one_card(need, strategy)
    policy = Policy(mix=mix, ready_files={wanted.spec.source_index: dict.fromkeys(ready, 1)})
    outcome = decide(on, wanted, Subject(1, "x-1"), policy)
    every = places(on, wanted, policy)
    if not isinstance(outcome, Placed) or outcome.placement.strategy not in ("one_gpu", "one_worker"):
        assert not every
        return
    best = max(c.score for c in every)
    assert abs(outcome.placement.score - best) < 1e-6
    chosen = outcome.placement.parts[0]
    even = [c for c in every if c.score > best - 1e-9]
    assert chosen.worker_id in {c.parts[0].worker_id for c in even}
    if len(chosen.gpu_indexes) == 1:  # of several, blocks of equal GPUs take turns
        assert (chosen.worker_id, chosen.gpu_indexes) in {
            (c.parts[0].worker_id, c.parts[0].gpu_indexes) for c in even
        }
    if strategy is Strategy.FIRST_FIT:
        assert chosen.worker_id == min(c.parts[0].worker_id for c in even)
    for c in every:
        assert 0 <= c.score_parts["placement"] <= 100 + 1e-9


@explored(120)
@given(FLEETS, HOLDS, demands(), MIXES)
def test_a_strategy_never_changes_what_fits(text: str, holds: Any, wanted: Demand, mix: Mix) -> None:
    on = held(text, holds)
    found = set()
    for strategy in Strategy:
        spec = replace(wanted.spec, placement_strategy=strategy)
        outcome = decide(on, replace(wanted, spec=spec), Subject(1, "x-1"), Policy(mix=mix))
        placed = isinstance(outcome, Placed)
        found.add((placed, outcome.placement.strategy if isinstance(outcome, Placed) else ""))
        assert not outcome.faults
    assert len(found) == 1


@explored(60)
@given(FLEETS, st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=2, max_size=8), MIXES, MIXES)
def test_kept_costs_are_those_of_the_mix_that_holds_now(
    text: str, steps: list[tuple[int, bool]], first: Mix, second: Mix
) -> None:
    on = fleet(text)
    memo: Searches = SearchCache()
    for n, (need, other) in enumerate(steps):
        wanted = of_one_card(need, Strategy.FRAGMENTATION)
        policy = Policy(mix=second if other else first)
        kept = decide(on, wanted, Subject(n, "x-1"), policy, memo)
        assert kept == decide(on, wanted, Subject(n, "x-1"), policy)
        if isinstance(kept, Placed):
            on.assume(kept.placement, n, wanted.spec.id)
            on.confirm(n)
    assert np.all(on.occupancy.vram_assumed == 0)


@explored(80)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.lists(st.integers(1, 6), max_size=12))
def test_whole_cards_go_as_in_the_textbook(sizes: list[int], sought: list[int]) -> None:
    """First fit takes the first worker with so many free cards, best fit one that is left with the fewest."""
    for strategy in (Strategy.FIRST_FIT, Strategy.BEST_FIT):
        on = fleet(" + ".join(f"1x{n}xA-24" for n in sizes))
        free = list(sizes)
        for n, cards in enumerate(sought, 1):
            flags = (f"--pipeline-parallel-size={cards}",) if cards > 1 else ()
            spec = model(
                n,
                placement_strategy=strategy,
                backend_parameters=flags,
                distributed_inference_across_workers=False,
            )
            outcome = decide(on, demand(19 * cards, spec), Subject(n, f"x-{n}"), Policy())
            able = [w for w, f in enumerate(free) if f >= cards]
            assert isinstance(outcome, Placed) == bool(able)
            if not isinstance(outcome, Placed):
                continue
            w = outcome.placement.parts[0].worker_id - 1
            assert w == able[0] if strategy is Strategy.FIRST_FIT else free[w] == min(free[x] for x in able)
            free[w] -= cards
            on.assume(outcome.placement, n, n)
            on.confirm(n)
