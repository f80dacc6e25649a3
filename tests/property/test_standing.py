"""Many equal instances on many equal workers: going on from the last ranking answers as ranking anew does."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import Placed
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.search import Search
from gpustackd.placement.search_cache import SearchCache
from tests.exploring import explored
from tests.fleets import demand, fleet, model
from tests.property.test_placement import change

FLEETS = st.sampled_from(["9x2xA-80", "12x1xA-80 + 7x4xB-48", "8x2xA-80 + 8x2xA-80[ram=8]", "20x8xA-80"])
SIZES = st.sampled_from([10.0, 30.0, 70.0, 120.0, 300.0])
STRATEGIES = st.sampled_from([Strategy.SPREAD, Strategy.SPREAD, Strategy.BINPACK, Strategy.BEST_FIT])
STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just("decide"), st.just(0))] * 6,
        st.tuples(st.just("decide"), st.integers(1, 2)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("forget"), st.integers(0, 30)),
        st.tuples(st.just("state"), st.integers(1, 8), st.sampled_from(["READY", "NOT_READY"])),
        st.tuples(st.just("shut"), st.integers(1, 12)),
    ),
    min_size=8,
    max_size=40,
)


@given(FLEETS, st.tuples(SIZES, SIZES, SIZES), STRATEGIES, STEPS)
@explored(120)
def test_the_last_ranking_goes_on_as_a_new_one_would(text, sizes, strategy, steps):
    on = fleet(text)
    wanted = [demand(gib, model(n + 1), heads=64) for n, gib in enumerate(sizes)]
    policy, memo = Policy(strategy=strategy), SearchCache[Search]()
    for n, step in enumerate(steps):
        if step[0] != "decide":
            change(on, step)
            continue
        subject = Subject(n, f"i-{n}")
        kept = decide(on, wanted[step[1]], subject, policy, memo)
        assert kept == decide(on, wanted[step[1]], subject, policy)
        if isinstance(kept, Placed) and n % 7:
            on.assume(kept.placement, n, wanted[step[1]].spec.id)
            if n % 2:
                on.confirm(n)


def test_a_burst_of_one_model_is_ranked_twice(monkeypatch):
    on = fleet("40x8xA-80")
    wanted, policy, memo = demand(30, model(1)), Policy(), SearchCache[Search]()
    ranked: Counter[str] = Counter()
    refresh = Search.refresh

    def counted(self: Search) -> None:
        ranked["times"] += 1
        refresh(self)

    monkeypatch.setattr(Search, "refresh", counted)
    for n in range(30):
        outcome = decide(on, wanted, Subject(n, f"i-{n}"), policy, memo)
        assert isinstance(outcome, Placed)
        on.assume(outcome.placement, n, 1)
    assert ranked["times"] == 2  # the second tells that it is a burst
    assert Counter(len(w) for w in on.occupancy.model_on_worker.values()) == {30: 1}
