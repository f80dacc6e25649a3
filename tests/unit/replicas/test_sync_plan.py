"""What has to be done for a model's number: adding, deleting, draining, taking back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpustackd.replicas.names import free_names
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.sync_plan import NewInstances, SyncPlan, sync_plan
from gpustackd.replicas.sync_plan import ReplicaTarget as Target


def by_id(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """A ranking that is plain to see: the highest id goes first."""
    return sorted(candidates, key=lambda r: -r.id)


def by_health(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """As every ranking does: whoever is not well goes before whoever is."""
    return sorted(candidates, key=lambda r: (r.healthy, -r.id))


def some(number: int, state: str = "RUNNING", **columns: Any) -> list[Replica]:
    return [
        replica({"id": n, "state": state, "worker_id": 1, "worker_state": "READY", "created": n, **columns})
        for n in range(1, number + 1)
    ]


def draining(id_: int, seconds: float, **columns: Any) -> Replica:
    return replica(
        {"id": id_, "state": "RUNNING", "worker_id": 1, "worker_state": "READY", "draining_for": seconds,
         **columns}
    )  # fmt: skip


def test_what_is_missing_is_added_and_what_is_too_much_goes() -> None:
    assert sync_plan(Target(3), some(1), by_id) == SyncPlan(add=(NewInstances(2),))
    assert sync_plan(Target(3), some(3), by_id) == SyncPlan()
    assert sync_plan(Target(1), some(3), by_id) == SyncPlan(delete=(2, 3))
    assert sync_plan(Target(0), some(2), by_id) == SyncPlan(delete=(1, 2))
    assert sync_plan(Target(2), some(2, "ERROR"), by_id).is_empty  # every row counts, whatever its state


def test_a_surplus_that_serves_drains_and_goes_when_it_is_due() -> None:
    asked = Target(2, drain_window=60)
    assert sync_plan(asked, some(3), by_id) == SyncPlan(drain=(3,), due_in=60)
    there = [*some(2), draining(3, 20)]
    assert sync_plan(asked, there, by_id) == SyncPlan(due_in=40)
    assert sync_plan(asked, [*some(2), draining(3, 60)], by_id) == SyncPlan(delete=(3,))
    # one that serves nobody is not waited for
    assert sync_plan(asked, some(3, "STARTING"), by_id) == SyncPlan(delete=(3,))
    assert sync_plan(asked, some(3, worker_state="NOT_READY"), by_id) == SyncPlan(delete=(3,))
    assert sync_plan(asked, [*some(2), draining(3, 1, state="ERROR")], by_id) == SyncPlan(delete=(3,))
    # a window that is taken away ends at once
    assert sync_plan(Target(2, drain_window=0), there, by_id) == SyncPlan(delete=(3,))
    assert sync_plan(Target(2, drain_window=-5), there, by_id) == SyncPlan(delete=(3,))


def test_who_drains_is_taken_back_before_anything_new_is_started() -> None:
    there = [*some(2), draining(3, 20), draining(4, 30)]
    asked = Target(3, drain_window=60)
    # of two that drain the better one, and the other goes its way
    assert sync_plan(asked, there, by_id) == SyncPlan(undrain=(3,), due_in=30)
    assert sync_plan(Target(5, drain_window=60), there, by_id) == SyncPlan(
        add=(NewInstances(1),), undrain=(3, 4)
    )
    # not one that is broken, or on a worker that is to be left
    broken = [*some(2), draining(3, 20, state="ERROR")]
    assert sync_plan(asked, broken, by_id) == SyncPlan(add=(NewInstances(1),), delete=(3,))
    leaving = [*some(2), draining(3, 20, worker_state="MAINTENANCE")]
    assert sync_plan(asked, leaving, by_id) == SyncPlan(add=(NewInstances(1),), due_in=40)


def test_one_that_drains_and_is_well_changes_places_with_one_that_is_not() -> None:
    """Also when its time is over: a healthy replica never goes while an unhealthy one stays."""
    for seconds in (20, 60, 90):
        for state in ("ERROR", "STARTING", "UNREACHABLE"):
            there = [some(1)[0], replica({"id": 2, "state": state, "worker_id": 1, "worker_state": "READY"})]
            there += [draining(3, seconds), draining(4, 10)]
            todo = sync_plan(Target(2, drain_window=60), there, by_id)
            assert todo.delete[0] == 2
            assert (todo.undrain, len(todo.add)) == ((3,), 0)
    # one that serves on a worker to be left drains in its turn
    there = [*some(1, worker_state="MAINTENANCE"), draining(3, 20)]
    assert sync_plan(Target(1, drain_window=60), there, by_id) == SyncPlan(
        drain=(1,), undrain=(3,), due_in=60
    )
    # those that are well alike do not change places, whatever their rank
    assert sync_plan(Target(1, drain_window=60), [*some(1), draining(3, 20)], by_id) == SyncPlan(due_in=40)


def member(id_: int, role: str, group: str | None = "g", **columns: Any) -> Replica:
    return replica(
        {"id": id_, "state": "RUNNING", "worker_id": 1, "worker_state": "READY", "created": id_, "role": role,
         "group_id": group, **columns}
    )  # fmt: skip


def test_a_role_from_three_to_two_drains_one_and_back_to_three_keeps_all() -> None:
    roles = {"prefill": 3, "decode": 1}
    there = [member(1, "prefill"), member(2, "prefill"), member(3, "prefill"), member(4, "decode")]
    assert sync_plan(Target(1, roles, 60), there, by_id).is_empty
    fewer = {**roles, "prefill": 2}
    assert sync_plan(Target(1, fewer, 60), there, by_id) == SyncPlan(drain=(3,), due_in=60)
    there[2] = member(3, "prefill", draining_for=10.0)
    assert sync_plan(Target(1, fewer, 60), there, by_id) == SyncPlan(due_in=50)
    assert sync_plan(Target(1, roles, 60), there, by_id) == SyncPlan(undrain=(3,))
    there[2] = member(3, "prefill", draining_for=60.0)
    assert sync_plan(Target(1, fewer, 60), there, by_id) == SyncPlan(delete=(3,))
    del there[2]
    assert sync_plan(Target(1, roles, 60), there, by_id) == SyncPlan(add=(NewInstances(1, "prefill", "g"),))


def test_members_of_other_generations_and_of_no_role_go() -> None:
    roles = {"prefill": 1, "decode": 1}
    there = [
        member(1, "prefill"), member(2, "decode"),
        member(3, "prefill", "old"), member(4, "prefill", None), member(5, "critic"),
    ]  # fmt: skip
    assert sync_plan(Target(1, roles), there, by_id) == SyncPlan(delete=(3, 4, 5))
    assert sync_plan(Target(0, roles), there, by_id) == SyncPlan(delete=(1, 2, 3, 4, 5))
    assert sync_plan(Target(1, roles), [], by_id) == SyncPlan()  # a generation is formed elsewhere
    # and rows of roles that the model has no more
    assert sync_plan(Target(2), [*some(2), member(9, "prefill")], by_id) == SyncPlan(delete=(9,))


@given(
    st.integers(0, 6),
    st.sampled_from([0.0, 30.0]),
    st.lists(
        st.tuples(
            st.sampled_from(["RUNNING", "ERROR", "PENDING"]),
            st.sampled_from(["READY", "NOT_READY", "MAINTENANCE"]),
            st.none() | st.sampled_from([0.0, 29.0, 31.0]),
        ),
        max_size=8,
    ),
)
def test_the_steps_lead_to_the_number_and_then_to_nothing_but_waiting(
    number: int, window: float, rows: list[tuple[str, str, float | None]]
) -> None:
    there = {
        n: {"id": n, "state": s, "worker_id": 1, "worker_state": w, "draining_for": d, "created": n}
        for n, (s, w, d) in enumerate(rows)
    }
    for _ in range(2):
        todo = sync_plan(Target(number, drain_window=window), [replica(r) for r in there.values()], by_health)
        gone = [replica(there[i]) for i in (*todo.delete, *todo.drain)]
        stay = [replica(r) for i, r in there.items() if i not in {g.id for g in gone}]
        if any(r.healthy for r in gone):  # then nobody stays, to be kept, who is not
            assert all(r.healthy or (r.draining_for is not None and r.id not in todo.undrain) for r in stay)
        for i in todo.delete:
            del there[i]
        for i in todo.drain:
            there[i]["draining_for"] = 0.0
        for i in todo.undrain:
            there[i]["draining_for"] = None
        for seat in todo.add:
            for _n in range(seat.number):
                fresh = max([99, *there]) + 1
                there[fresh] = {"id": fresh, "state": "PENDING", "created": fresh, "draining_for": None}
        assert len([r for r in there.values() if r["draining_for"] is None]) == number
    assert todo.is_empty
    assert (todo.due_in is None) == all(r["draining_for"] is None for r in there.values())


def test_the_lowest_free_ordinals_are_the_names() -> None:
    assert free_names("llama", 3, {"llama-2", "llama-x"}) == ["llama-1", "llama-3", "llama-4"]
    assert free_names("llama", 1, {"llama-prefill-1"}, "prefill") == ["llama-prefill-2"]
    assert free_names("llama", 0, ()) == []
