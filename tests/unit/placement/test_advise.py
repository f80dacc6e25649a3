"""What would help a waiting instance: only what works, the least first, and the fleet is as it was after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.placement.advice.changes import Holder
from gpustackd.placement.advice.model_edits import with_flag, without_flag
from gpustackd.placement.advice.suggestions import Advice, advise
from gpustackd.placement.advice.trials import Ahead, TrialCase
from gpustackd.placement.policy import Policy, Subject
from tests.fleets import GIB, demand, fleet, model, occupy, refused, seats

LLM = ("llm",)


def advice(
    on: Fleet, wanted: Demand, *, holders: Sequence[Holder] = (), ahead: Sequence[Ahead] = (),
    demands: Mapping[int, Demand] | None = None, priority: int = 0,
) -> Advice:  # fmt: skip
    """Expect a refusal, ask for advice, and see that the fleet is as it was."""
    refused(on, wanted)

    def build(spec: ModelSpec) -> Demand:
        return replace(wanted, spec=spec)

    before = [
        on.free_vram().sum(),
        on.free_ram().sum(),
        on.occupancy.gpu_occupants.sum(),
        on.occupancy.occupants.sum(),
    ]
    names = dict(on.by_name)
    case = TrialCase(
        on, Policy(), Subject(1, "x-1"), wanted, wanted.spec, build, ahead, demands=demands or {}
    )
    found = advise(case, {h.id: h for h in holders}, priority)
    after = [
        on.free_vram().sum(),
        on.free_ram().sum(),
        on.occupancy.gpu_occupants.sum(),
        on.occupancy.occupants.sum(),
    ]
    assert np.array_equal(before, after)
    assert dict(on.by_name) == names
    refused(on, wanted)
    costs = [s.change.cost for s in found.suggestions]
    assert costs == sorted(costs)
    return found


def kinds(found: Advice) -> list[str]:
    return [s.change.kind.value for s in found.suggestions]


def first(found: Advice) -> dict[str, Any]:
    return found.suggestions[0].change.as_json()


def test_as_few_cordoned_gpus_are_opened_as_do() -> None:
    found = advice(
        fleet("1x4xA6000-48[closed]"), demand(80, model(backend_parameters=("--tensor-parallel-size=2",)))
    )
    assert first(found) == {
        "kind": "open_gpus", "worker": "w1",
        "gpus": [{"type": "cuda", "index": 0}, {"type": "cuda", "index": 1}],
    }  # fmt: skip
    assert seats(found.suggestions[0].placed.placement) == [("w1", (0, 1))]


def test_a_worker_comes_back_from_maintenance_before_anything_is_stopped_or_bought() -> None:
    on = fleet("1x1xH100-80 + 1x2xH100-80[state=MAINTENANCE]")
    occupy(on, "w1", [0], 70, instance=900)
    found = advice(on, demand(60), holders=[Holder(900, "a-1", "a", 900)])
    assert first(found) == {"kind": "ready_worker", "worker": "w2", "state": "MAINTENANCE"}
    assert kinds(found)[1:] == ["stop_instances", "add_gpu", "add_worker"]


def test_the_nearest_miss_counts_the_bytes_that_are_missing() -> None:
    on = fleet("2x1xH100-80 + 1x1xL4-24")
    occupy(on, "w1", [0], 30)
    occupy(on, "w2", [0], 20)
    miss = advice(on, demand(60)).misses[0]
    # 90 % of 80 GiB would be booked, 60 GiB are free
    assert (miss.worker, miss.gpus, miss.short) == ("w2", ("w2:cuda:0",), 12 * GIB)
    assert (miss.need, miss.free) == (72 * GIB, 60 * GIB)


def test_a_lower_share_is_found_for_a_card_that_is_partly_taken() -> None:
    on = fleet("1x1xH100-80")
    occupy(on, "w1", [0], 30)
    found = advice(on, demand(40, model(backend_parameters=("--enforce-eager",))))
    edit = first(found)
    assert edit["columns"] == {"backend_parameters": ["--enforce-eager", "--gpu-memory-utilization=0.62"]}


def test_a_higher_share_is_found_where_cards_are_empty() -> None:
    wanted = demand(40, model(backend_parameters=("--gpu-memory-utilization", "0.4")))
    edit = first(advice(fleet("1x1xH100-80"), wanted))
    assert edit["columns"] == {"backend_parameters": ["--gpu-memory-utilization=0.5"]}


def test_no_share_is_suggested_that_leaves_no_room_for_one_sequence() -> None:
    on = fleet("1x1xH100-80")
    occupy(on, "w1", [0], 30)
    wanted = demand(40)
    wanted = replace(wanted, need=replace(wanted.need, sequence=20 * GIB))
    assert "edit_model" not in kinds(advice(on, wanted))


def test_another_tensor_parallel_size_is_found_where_heads_allow_it() -> None:
    wanted = demand(100, model(backend_parameters=("--tensor-parallel-size=4",)), heads=12)
    found = advice(fleet("1x3xH100-80"), wanted)
    assert first(found)["columns"] == {"backend_parameters": ["--tensor-parallel-size=2"]}


def test_the_label_that_stands_in_the_way_is_dropped_and_no_other() -> None:
    wanted = demand(40, model(worker_selector={"zone": "a", "disk": "ssd"}))
    found = advice(fleet("1x1xH100-80[zone=a,disk=hdd]"), wanted)
    assert first(found)["columns"] == {"worker_selector": {"zone": "a"}}


def test_two_changes_are_looked_for_where_no_single_one_does() -> None:
    wanted = demand(40, model(worker_selector={"zone": "a"}))
    found = advice(fleet("1x1xH100-80[closed]"), wanted)
    assert [c["kind"] for c in first(found)["changes"]] == ["edit_model", "open_gpus"]


def test_instances_of_higher_priority_and_of_the_same_model_are_never_stopped() -> None:
    on = fleet("3x1xH100-80")
    for n, worker in enumerate(("w1", "w2", "w3")):
        occupy(on, worker, [0], 70, instance=900 + n, model=900 + n)
    occupy_own = [
        Holder(900, "more-important", "a", 900, priority=5),
        Holder(901, "sibling", "x", 1),
        Holder(902, "other", "b", 902),
    ]
    found = advice(on, demand(60), holders=occupy_own)
    stopped = [
        s.change.as_json()["instances"] for s in found.suggestions if s.change.kind == "stop_instances"
    ]
    assert stopped == [["other"]]


def test_several_instances_are_stopped_together_where_one_is_not_enough() -> None:
    on = fleet("1x1xH100-80")
    for n in range(4):
        occupy(on, "w1", [0], 20, instance=900 + n, model=900 + n)
    holders = [Holder(900 + n, f"h{n}", f"m{n}", 900 + n) for n in range(4)]
    found = advice(
        on, demand(50, model(backend_parameters=("--gpu-memory-utilization=0.7",))), holders=holders
    )
    (stop,) = [s for s in found.suggestions if s.change.kind == "stop_instances"]
    assert len(stop.change.as_json()["instances"]) == 3


def test_who_comes_first_takes_the_place_in_the_trial_too() -> None:
    on = fleet("1x1xH100-80[closed] + 1x2xH100-80[state=MAINTENANCE]")
    wanted, other = demand(60), demand(60, model(2))
    alone = advice(on, wanted)
    assert kinds(alone)[0] == "open_gpus"
    behind = advice(on, wanted, ahead=[Ahead(7, "first", 2)], demands={2: other})
    assert "open_gpus" not in kinds(behind)  # the one card is taken by who waited longer
    assert kinds(behind)[0] == "ready_worker"
    assert not on.occupancy.assumed


def test_a_model_that_fits_no_kind_of_worker_gets_no_suggestion() -> None:
    found = advice(fleet("1x2xL4-24 + 1x2xA6000-48"), demand(400))
    assert found.suggestions == ()


def test_where_cards_are_too_small_even_if_empty_the_nearest_miss_says_by_how_much() -> None:
    on = fleet("1x1xL4-24 + 1x2xA6000-48 + 1x1xH100-80")
    occupy(on, "w2", [0], 40)
    miss = advice(on, demand(400, model(categories=LLM))).misses[0]
    # two cards of 48 GiB at 0.9, whatever is booked on them now
    assert (miss.worker, miss.gpus, miss.even_empty) == ("w2", ("w2:cuda:0", "w2:cuda:1"), True)
    assert (miss.need, miss.free) == (400 * GIB, 2 * int(0.9 * 48 * GIB))
    assert miss.short == miss.need - miss.free
    assert miss.text.endswith("even if it were empty")


def test_a_card_that_shares_its_memory_with_its_host_is_never_put_into_another_worker() -> None:
    on = fleet("1x1xL4-24 + 1x1xGB10-120[uma]")
    occupy(on, "w2", [0], 20)
    wanted = demand(100, model(categories=LLM))
    assert kinds(advice(on, wanted)) == ["add_worker"]
    elsewhere = fleet("1x1xL4-24 + 1x1xH100-120[state=NOT_READY]")
    assert "add_gpu" in kinds(advice(elsewhere, wanted))  # a card is one


def test_one_more_gpu_is_named_by_its_kind_and_its_worker() -> None:
    on = fleet("1x3xH100-80")
    occupy(on, "w1", [0, 1, 2], 10, instance=900)
    wanted = demand(140, model(backend_parameters=("--tensor-parallel-size=2",), categories=LLM))
    (gpu,) = [s for s in advice(on, wanted).suggestions if s.change.kind == "add_worker"]
    assert "3 x H100" in gpu.change.text
    one = advice(on, demand(60, model(categories=LLM)))
    (added,) = [s for s in one.suggestions if s.change.kind == "add_gpu"]
    assert added.change.as_json()["gpu"]["index"] == 3
    assert "add one more H100 with 80.00 GiB to worker w1" in added.change.text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("--tp=2",)),
        (("--tp=4",), ("--tp=2",)),
        (("--a", "--tp", "4", "--b"), ("--a", "--tp=2", "--b")),
        (("--tp 4", "--b=1"), ("--tp=2", "--b=1")),
        (("--b=1 --tp=4",), ("--b=1 --tp=4", "--tp=2")),
    ],
)
def test_a_flag_is_set_in_place_or_overruled(before: tuple[str, ...], after: tuple[str, ...]) -> None:
    assert with_flag(before, ("tp",), "2") == after


def test_a_flag_is_left_out_where_it_stands_alone() -> None:
    assert without_flag(("--a", "--tp", "4"), ("tensor-parallel-size", "tp")) == ("--a",)
    assert without_flag(("--a --tp 4",), ("tp",)) is None
    assert without_flag(("--a",), ("tp",)) is None
