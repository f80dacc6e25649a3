"""Who goes first: worked rankings, the finer order, and rows that cannot be read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.bookings import Booking
from gpustackd.domain.model_spec import Strategy
from gpustackd.replicas.ranking import deletion_order
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.retention_score import (
    RetentionWeights,
    offload_score,
    pairing_score,
    retention_scores,
    status_score,
)
from tests.unit.replicas.ranks import GIB, MODEL, fleet, order, places, row, six

BINPACK, SPREAD = Strategy.BINPACK, Strategy.SPREAD

EXECUTED = [
    (BINPACK, False, None, {4: 0, 5: 0.3509, 6: 50.1067, 3: 50.1244, 2: 100.1244, 1: 100.3509}),
    (SPREAD, False, None, {4: 0, 5: 0.6275, 3: 50.6025, 6: 50.84, 2: 100.6025, 1: 100.6275}),
    (SPREAD, True, None, {4: 0, 5: 10.6275, 3: 60.6025, 6: 60.84, 2: 106.6631, 1: 110.6275}),
    (SPREAD, True, 100, {4: 0, 5: 9.5743, 3: 54.5968, 6: 54.8108, 2: 96.0929, 1: 99.6644}),
]


@pytest.mark.parametrize(("strategy", "layers", "total", "expected"), EXECUTED)
def test_the_executed_rankings_come_out_to_four_digits(
    strategy: Strategy, layers: bool, total: float | None, expected: dict[int, float]
) -> None:
    where = places(fleet(), strategy)
    weights = RetentionWeights(total=total)
    found = retention_scores(six(layers), weights, where)
    assert {i: round(v, 4) for i, v in found.items()} == expected
    assert order(six(layers), where, weights) == list(expected)


def test_weights_of_nothing_take_their_scorer_out() -> None:
    found = retention_scores(
        six(True), RetentionWeights(status=0, offload=-1, total=100), places(fleet(), SPREAD)
    )
    assert {i: round(v, 2) for i, v in found.items()} == {1: 62.75, 2: 60.25, 3: 60.25, 4: 0, 5: 62.75, 6: 84}
    nothing = RetentionWeights(0, 0, 0, 0, 100)
    assert set(retention_scores(six(), nothing, places(fleet())).values()) == {0}
    assert retention_scores([], RetentionWeights(total=100), places(fleet())) == {}


@pytest.mark.parametrize(
    ("state", "worker_state", "value"),
    [
        ("RUNNING", "READY", 100), ("STARTING", "READY", 50), ("RUNNING", "NOT_READY", 0),
        ("RUNNING", "UNREACHABLE", 50), ("RUNNING", "MAINTENANCE", 50), ("UNREACHABLE", "READY", 50),
        ("ERROR", "READY", 0), ("RUNNING", None, 0),
    ],
)  # fmt: skip
def test_status_by_the_table(state: str, worker_state: str | None, value: float) -> None:
    assert status_score(replica(row(1, state, worker_state)), 100) == value


def test_a_pending_replica_has_no_status_and_layers_count_by_their_share() -> None:
    assert status_score(replica(row(4, "PENDING", None)), 100) == 0
    layers = [(20, 33), (33, 33), None, (0, 33)]
    found = [round(offload_score(replica(row(1, "RUNNING", layers=x)), 10), 2) for x in layers]
    assert found == [6.06, 10, 0, 0]


def member(id_: int, role: str, *workers: int, **more: Any) -> Replica:
    first, *others = workers
    servers = {"subordinate_workers": [{"worker_id": w} for w in others]}
    return replica(
        {"id": id_, "role": role, "group_id": "g", "state": "RUNNING", "worker_state": "READY",
         "worker_id": first, "distributed_servers": servers, **more}
    )  # fmt: skip


def test_pairing_keeps_the_member_next_to_most_of_the_other_role() -> None:
    prefills = [member(1, "prefill", 1), member(2, "prefill", 2), member(3, "prefill", 3)]
    decodes = [member(4, "decode", 1), member(5, "decode", 1), member(6, "decode", 2)]
    value = pairing_score(prefills, [*prefills, *decodes], 20)
    assert [value(p) for p in prefills] == [20, 10, 0]
    decodes[0] = member(4, "decode", 1, draining_for=3.0)
    value = pairing_score(prefills, [*prefills, *decodes], 20)
    assert [value(p) for p in prefills] == [20, 20, 0]
    # one that spans machines counts once on each, and has its own share of each
    value = pairing_score(prefills, [member(7, "decode", 2, 3)], 20)
    assert [value(p) for p in prefills] == [0, 20, 20]
    assert pairing_score([member(8, "prefill", 1, 2)], [member(7, "decode", 2, 3)], 20)(
        member(8, "prefill", 1, 2)
    ) == pytest.approx(10)
    # nothing opposite, no opposite role, several groups
    assert pairing_score(prefills, prefills, 20)(prefills[0]) == 0
    assert pairing_score([member(9, "router", 1)], decodes, 20)(member(9, "router", 1)) == 0
    mixed = [prefills[0], member(9, "prefill", 2, group_id="h")]
    assert pairing_score(mixed, decodes, 20)(prefills[0]) == 0


def test_pairing_decides_among_members_that_serve_alike() -> None:
    on = fleet()
    prefills = [member(1, "prefill", 1), member(2, "prefill", 2), member(3, "prefill", 3)]
    decodes = [member(4, "decode", 1), member(5, "decode", 1), member(6, "decode", 2)]
    found = deletion_order(prefills, RetentionWeights(), places(on), [*prefills, *decodes])
    assert [r.id for r in found] == [3, 2, 1]


def test_roles_are_not_ranked_against_each_other() -> None:
    mixed = [member(1, "prefill", 1), member(2, "decode", 1)]
    with pytest.raises(ValueError, match="several roles"):
        deletion_order(mixed, RetentionWeights(), places(fleet()))


def test_equal_scores_go_by_what_is_lost_least() -> None:
    """Never started, on a worker that takes nothing new, of an old spec, not yet serving, youngest."""
    flat = RetentionWeights(0, 0, 0, 0)
    best = row(1, "RUNNING", created=1.0)
    rows = [
        best,
        {**best, "id": 2, "created": 5.0},
        {**best, "id": 3, "state": "STARTING"},
        {**best, "id": 4, "state": "DOWNLOADING"},
        {**best, "id": 5, "stale": True},
        {**best, "id": 6, "worker_state": "MAINTENANCE"},
        {**best, "id": 7, "state": "SCHEDULED"},
        row(8, "PENDING", None),
    ]
    assert order([replica(r) for r in rows], places(fleet()), flat) == [8, 7, 6, 5, 4, 3, 2, 1]


def test_what_other_models_hold_decides_whom_binpack_takes() -> None:
    """Two replicas on equal cards: the one whose card nobody else uses goes, as that empties a card."""
    for crowded, victim in ((2, 6), (6, 2)):
        on = fleet({3: "READY"})
        worker, gpu = (2, 20) if crowded == 2 else (3, 30)
        # somebody else's 40 GiB; #3 is ignored, it makes place 2 tighter already
        on.vram_allocated[on.slot[gpu]] += 40 * GIB
        on.vram_allocated[on.slot[20]] -= 12 * GIB
        on.add_booking(Booking(99, 7, worker, gpu, 40 * GIB, 0))
        candidates = [replica(row(2, "RUNNING")), replica(row(6, "RUNNING"))]
        assert order(candidates, places(on)) == [victim, crowded]


def test_what_other_models_hold_decides_whom_spread_takes() -> None:
    on = fleet({3: "READY"})
    on.set_bookings(2, [Booking(2, MODEL, 2, 20, 12 * GIB, 0)])
    candidates = [replica(row(2, "RUNNING")), replica(row(6, "RUNNING"))]
    for n in range(3):
        on.add_booking(Booking(90 + n, 7, 2, 20, GIB, 0))
    assert order(candidates, places(on, SPREAD)) == [2, 6]
    for n in range(6):
        on.add_booking(Booking(190 + n, 7, 3, 30, GIB, 0))
    assert order(candidates, places(on, SPREAD)) == [6, 2]


@pytest.mark.parametrize("strategy", list(Strategy))
def test_a_row_that_misses_something_goes_before_one_that_is_whole(strategy: Strategy) -> None:
    """FR-32: gone worker and no worker first, then the claim that does not tell; what is whole stays."""
    whole = row(1, "RUNNING")
    orphan = {**row(2, "RUNNING", None), "worker_id": 77}
    nowhere = {**row(3, "SCHEDULED", None), "worker_id": None}
    untold = {**row(6, "RUNNING"), "computed_resource_claim": {"ram": 2 * GIB}}
    found = order([replica(r) for r in (whole, orphan, nowhere, untold)], places(fleet(), strategy))
    assert set(found[:2]) == {2, 3}
    assert found[2:] == [6, 1]


SAD: Any = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
    st.lists(st.integers(-2, 3), max_size=2), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)  # fmt: skip


@given(
    st.lists(
        st.fixed_dictionaries(
            {"state": st.sampled_from(["RUNNING", "ERROR", "STARTING", "PENDING", "?", None])},
            optional={
                "worker_id": SAD, "worker_state": SAD, "gpu_type": SAD, "gpu_indexes": SAD,
                "computed_resource_claim": SAD | st.fixed_dictionaries(
                    {"vram": SAD, "ram": SAD, "offload_layers": SAD, "total_layers": SAD}),
                "distributed_servers": SAD | st.fixed_dictionaries({"subordinate_workers": SAD | st.lists(
                    SAD | st.fixed_dictionaries({"worker_id": SAD, "gpu_indexes": SAD}), max_size=2)}),
            },
        ),
        max_size=6,
    ),
    st.sampled_from(list(Strategy)),
)  # fmt: skip
def test_no_row_keeps_the_others_from_being_ranked(rows: list[dict[str, Any]], strategy: Strategy) -> None:
    candidates = [replica(row(1, "RUNNING"))]
    candidates += [replica({"id": 100 + n, "created": 0.0, **r}) for n, r in enumerate(rows)]
    where = places(fleet(), strategy)
    found = retention_scores(candidates, RetentionWeights(), where)
    assert {r.id for r in deletion_order(candidates, RetentionWeights(), where)} == {c.id for c in candidates}
    assert all(v == v and v >= 0 for v in found.values())
    assert found[1] == retention_scores(candidates[:1], RetentionWeights(), where)[1]


@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_a_healthy_replica_never_goes_before_an_unhealthy_one(chance: Any, number: int) -> None:
    states = ["RUNNING", "RUNNING", "STARTING", "SCHEDULED", "ERROR", "UNREACHABLE", "PENDING"]
    workers = ["READY", "READY", "NOT_READY", "UNREACHABLE", "MAINTENANCE"]
    rows = []
    for n in range(number):
        place = row(chance.choice([1, 2, 3, 5, 6]), chance.choice(states), chance.choice(workers))
        claim = {"offload_layers": chance.randint(0, 33), "total_layers": 33}
        place["computed_resource_claim"] = {**place["computed_resource_claim"], **claim}
        rows.append({**place, "id": 1000 + n})
    found = deletion_order(
        [replica(r) for r in rows], RetentionWeights(), places(fleet(), chance.choice(list(Strategy)))
    )
    healthy = [r.healthy for r in found]
    assert healthy == sorted(healthy)
