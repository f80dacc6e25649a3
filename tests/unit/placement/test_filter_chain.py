"""Who stays by cluster, labels, hand-picked GPUs and state, and what an empty pool tells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpustackd.domain.lifecycle import WorkerState
from gpustackd.domain.model_spec import GpuId
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.errors import BadRow
from gpustackd.placement.filters import chain
from gpustackd.placement.policy import Policy
from tests.fleets import ask, demand, fleet, model


def kept(text: str = True, **fields: Any) -> list[str]:
    """Names of the workers that pass all filters."""
    on = fleet(text)
    filters = chain.chain(demand(8, model(**fields)), Policy())
    bits = chain.failures(filters, on, np.arange(on.count))
    return [on.row(w).name for w in np.flatnonzero(bits == 0).tolist()]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["w1", "w2", "w3"]),
        ({"cluster_id": 1}, ["w1", "w2"]),
        ({"cluster_id": 2}, ["w3"]),
        ({"cluster_id": 3}, []),
        ({"worker_selector": {}}, ["w1", "w2", "w3"]),
        ({"worker_selector": {"a": "1"}}, ["w1"]),
        ({"worker_selector": {"a": "01"}}, ["w2"]),
        ({"worker_selector": {"a": "1", "b": "x"}}, []),
        ({"gpu_ids": ["w3:cuda:0", "nobody:cuda:0"]}, ["w3"]),
        ({"gpu_ids": ["w1:rocm:7"]}, ["w1"]),
        ({"cluster_id": 1, "worker_selector": {"a": "01"}, "gpu_ids": ["w2:cuda:0"]}, ["w2"]),
    ],
)
def test_cluster_labels_and_picked_workers(fields: dict[str, Any], names: list[str]) -> None:
    assert kept("1x1xA-24[a=1] + 1x1xA-24[a=01] + 1x1xA-24[cluster=2,c=1]", **fields) == names


def test_only_ready_workers_stay() -> None:
    text = " + ".join(f"1x1xA-24[state={state}]" for state in WorkerState)
    assert kept(text) == [f"w{1 + list(WorkerState).index(WorkerState.READY)}"]


def test_an_empty_pool_keeps_its_reasons_in_order_and_tells_what_else_would_fail() -> None:
    on = fleet("2x1xA-24[cluster=2,zone=b,state=MAINTENANCE]")
    outcome = ask(on, demand(8, model(cluster_id=1, worker_selector={"zone": "a"})))
    assert isinstance(outcome, NoFit)
    assert [(r.filter, r.level) for r in outcome.reasons] == [
        ("cluster", "reject"), ("labels", "also"), ("status", "also"),
    ]  # fmt: skip
    assert [(s.filter, s.kept) for s in outcome.pool] == [("cluster", 0), ("labels", 0), ("status", 0)]


@pytest.mark.parametrize(
    "text", ["w1", "w1:cuda", "w1:cuda:x", ":cuda:1", "w1::1", "w1:cuda:-1", "w1:cuda:١"]
)
def test_an_id_that_cannot_be_read_is_its_models_own_trouble(text: str) -> None:
    with pytest.raises(BadRow, match="worker:type:index"):
        GpuId.parse(text)


def test_a_worker_may_have_colons_in_its_name() -> None:
    assert GpuId.parse("rack:1:cuda:0") == GpuId("rack:1", "cuda", 0)


def test_labels_operators_and_preferences_decide_together() -> None:
    on = fleet("1x1xA-24[zone=a] + 1x1xA-24[zone=b] + 1x1xA-24[zone=c,old=1] + 1x1xA-24")
    selector = {
        "match": {},
        "terms": [
            {"key": "zone", "operator": "In", "values": ["a", "b", "c"]},
            {"key": "zone", "operator": "NotIn", "values": ["b"]},
            {"key": "old", "operator": "DoesNotExist"},
        ],
        "preferred": [{"key": "zone", "operator": "In", "values": ["c"], "weight": 50}],
    }
    outcome = ask(on, demand(8, model(worker_selector=selector)))
    assert isinstance(outcome, Placed)
    assert outcome.placement.parts[0].worker_name == "w1"
    del selector["terms"][2]  # type: ignore[attr-defined]
    outcome = ask(on, demand(8, model(worker_selector=selector)))
    assert isinstance(outcome, Placed)
    assert outcome.placement.parts[0].worker_name == "w3"
    assert outcome.placement.score_parts["preferred"] == 50
