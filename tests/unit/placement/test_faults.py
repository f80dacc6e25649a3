"""Filters and scorers cannot kill a decision: each fails on purpose, and the decision goes on without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpustackd.domain.backends import Backends
from gpustackd.domain.model_spec import Source, Strategy
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.domain.paths import PathKnowledge, Presence
from gpustackd.placement.decide import Searches, decide
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.cluster import ClusterFilter
from gpustackd.placement.filters.framework import FrameworkFilter
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.filters.local_path import LocalPathFilter
from gpustackd.placement.filters.picked import PickedFilter
from gpustackd.placement.filters.status import StatusFilter
from gpustackd.placement.policy import Policy, Subject
from gpustackd.placement.scoring import soft_scores
from gpustackd.placement.scoring.strategies import Scorer
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import ask, demand, fleet, model, positions

FILTERS = [
    ("cluster", ClusterFilter),
    ("gpu_selector", PickedFilter),
    ("labels", LabelFilter),
    ("status", StatusFilter),
    ("backend", FrameworkFilter),
    ("local_path", LocalPathFilter),
]
PATH = "/m"


class Broken(RuntimeError):
    """What fails on purpose."""


def fail(*_: Any, **__: Any) -> Any:
    raise Broken("on purpose")


def wanted(**fields: Any) -> Any:
    """A demand that calls for every filter."""
    return demand(
        8,
        model(
            cluster_id=1,
            gpu_ids=["w2:cuda:0", "w3:cuda:0"],
            per_replica=1,
            worker_selector={"match": {"zone": "a"}, "preferred": [{"key": "zone", "operator": "Exists"}]},
            source=Source.LOCAL_PATH,
            local_path=PATH,
            **fields,
        ),
    )


def everything() -> Policy:
    known = PathKnowledge({1: Presence.MISSING}, False)
    return Policy(backends=Backends.of(()), paths={PATH: known}, ready_files={"x": {1: 1}})


def the_fleet(size: int = 24) -> Any:
    return fleet(f"4x2xA-{size}[zone=a]")


@pytest.mark.parametrize("what", ["keep", "__init__"])
@pytest.mark.parametrize(("name", "kind"), FILTERS, ids=[f[0] for f in FILTERS])
def test_a_filter_that_fails_is_left_out_and_told(
    name: str, kind: type, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, what, fail)
    outcome = ask(the_fleet(), wanted(), policy=everything())
    assert isinstance(outcome, Placed), outcome.message
    assert [f.params["stage"] for f in outcome.faults] == [f"filter.{name}"]
    assert "Broken: on purpose" in outcome.faults[0].text
    assert outcome.faults[0] in outcome.placement.warnings
    assert [s.filter for s in outcome.pool] == [n for n, _ in FILTERS if n != name or what == "keep"]


@pytest.mark.parametrize(("name", "kind"), FILTERS, ids=[f[0] for f in FILTERS])
def test_a_refusal_tells_of_a_filter_that_failed(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "keep", fail)
    outcome = ask(the_fleet(4), wanted(), policy=everything())
    assert isinstance(outcome, NoFit)
    assert f"filter.{name}" in [r.params.get("stage") for r in outcome.reasons]
    assert f"the filter {name} failed" in outcome.message


@pytest.mark.parametrize(("name", "kind"), FILTERS, ids=[f[0] for f in FILTERS])
def test_a_filter_that_cannot_say_why_still_counts_whom_it_dropped(
    name: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "reasons", fail)
    fields = {
        "cluster": {"cluster_id": 9},
        "gpu_selector": {"gpu_ids": ["w9:cuda:0"]},
        "labels": {"worker_selector": {"zone": "b"}},
        "local_path": {"source": Source.LOCAL_PATH, "local_path": PATH},
        "backend": {"backend": "nobody-knows"},
    }
    on = the_fleet()
    state = {"status": "MAINTENANCE"}.get(name)
    if state:
        on = fleet(f"4x2xA-24[state={state}]")
    everyone = PathKnowledge(dict.fromkeys(range(1, 5), Presence.MISSING), False)
    policy = Policy(backends=Backends.of(()), paths={PATH: everyone})
    outcome = ask(on, demand(8, model(**fields.get(name, {}))), policy=policy)
    assert isinstance(outcome, NoFit)
    if name == "gpu_selector":  # refusals of hand-picked GPUs have words of their own
        return
    assert f"filter.{name}" in [r.params.get("stage") for r in outcome.reasons]
    [dropped] = [r for r in outcome.reasons if r.code == f"{name}.dropped" and r.level == "reject"]
    assert dropped.params["dropped"] == 4


SCORERS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("scorer.placement", lambda m: m.setattr(Scorer, "cards", fail)),
    ("scorer.placement", lambda m: m.setattr(Scorer, "worker", fail)),
    ("scorer.placement", lambda m: m.setattr(Scorer, "taken", fail)),
    ("scorer.placement", lambda m: m.setattr(Scorer, "together", fail)),
    ("scorer.placement", lambda m: m.setattr(Scorer, "several_workers", fail)),
    ("scorer.locality", lambda m: m.setattr(soft_scores, "known", fail)),
    ("scorer.locality", lambda m: m.setattr(soft_scores, "shares", fail)),
    ("scorer.locality", lambda m: m.setattr(soft_scores, "missing", fail)),
    ("scorer.preferred", lambda m: m.setattr(LabelFilter, "preference", fail)),
]


def shapes(strategy: Strategy) -> Iterator[Any]:
    """Demands that take one GPU, several, several workers, picked ones, none."""
    selector = {"match": {"zone": "a"}, "preferred": [{"key": "zone", "operator": "Exists"}]}
    more: dict[str, Any] = {
        "worker_selector": selector, "placement_strategy": strategy,
        "source": Source.LOCAL_PATH, "local_path": PATH,
    }  # fmt: skip
    yield demand(8, model(1, **more))
    yield demand(40, model(2, **more), heads=16)
    yield demand(70, model(3, distributed_inference_across_workers=True, **more), heads=16)
    yield demand(8, model(4, gpu_ids=["w2:cuda:0", "w3:cuda:1"], per_replica=1, **more))
    yield demand(8, model(5, backend="Custom", cpu_offloading=True, **more))


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize(("stage", "break_"), SCORERS)
def test_a_scorer_that_fails_is_left_out_and_told(
    stage: str,
    break_: Callable[[pytest.MonkeyPatch], None],
    strategy: Strategy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_(monkeypatch)
    told = set()
    for wanted in shapes(strategy):
        policy = Policy(ready_files={wanted.spec.source_index: {2: 9}})
        outcome = ask(the_fleet(), wanted, policy=policy)
        assert isinstance(outcome, Placed), outcome.message
        told |= {f.params["stage"] for f in outcome.faults}
    assert told <= {stage}
    unused = {"several_workers", "taken", "together"}
    assert told == {stage} or any(u in break_.__code__.co_consts for u in unused)


def test_what_is_known_of_paths_may_fail_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalPathFilter, "renew", fail)
    outcome = ask(the_fleet(), wanted(), policy=everything())
    assert isinstance(outcome, Placed)
    assert [f.params["stage"] for f in outcome.faults] == ["filter.local_path"]


def test_what_was_scored_while_a_scorer_failed_is_not_kept() -> None:
    on = the_fleet()
    memo: Searches = SearchCache()
    plain = demand(8, model(placement_strategy=Strategy.BINPACK, worker_selector={"zone": "a"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scorer, "cards", fail)
        patch.setattr(LabelFilter, "keep", fail)
        first = decide(on, plain, Subject(1, "x"), Policy(), memo)
        assert isinstance(first, Placed)
        assert {f.params["stage"] for f in first.faults} == {"filter.labels", "scorer.placement"}
        assert first.placement.score == 0
    again = decide(on, plain, Subject(2, "x"), Policy(), memo)
    assert isinstance(again, Placed)
    assert not again.faults
    assert again.placement.score > 0
    assert again == decide(on, plain, Subject(2, "x"), Policy())


def test_a_selector_that_cannot_be_read_is_no_failure_of_a_filter() -> None:
    outcome = ask(the_fleet(), demand(8, model(worker_selector={"terms": [{"key": 1}]})))
    assert isinstance(outcome, NoFit)
    assert not outcome.faults
    assert outcome.reasons[0].code == "model.unusable"


def test_filters_without_anybody_to_tell_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatusFilter, "keep", fail)
    on = the_fleet()
    with pytest.raises(Broken):
        chain.failures([StatusFilter()], on, positions(on))
