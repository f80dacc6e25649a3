"""The local path filter: what workers are known to have goes before what they say, silence is no absence."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Source
from gpustackd.domain.outcome import Cure, NoFit
from gpustackd.domain.paths import PathKnowledge, Presence
from gpustackd.placement.policy import Policy
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import ask, demand, fleet, model, place, refused

PATH = "/models/m"
HERE, MISSING, SILENT = Presence.HERE, Presence.MISSING, Presence.SILENT


def local(need: float = 8, **fields: Any) -> Demand:
    return demand(need, model(source=Source.LOCAL_PATH, local_path=PATH, **fields))


def said(*answers: Presence | None, shared: bool = False, files: Any = None) -> Policy:
    """What workers 1, 2, … said (None = were not asked)."""
    known = {n: a for n, a in enumerate(answers, 1) if a is not None}
    return Policy(paths={PATH: PathKnowledge(known, shared)}, ready_files=files or {})


def kept(policy: Policy, wanted: Demand | None = None, workers: int = 3) -> list[str]:
    on = fleet(f"{workers}x1xA-24")
    outcome = ask(on, wanted or local(), policy=policy)
    if isinstance(outcome, NoFit):
        return []
    found = []
    for n in range(1, 20):
        outcome = ask(on, wanted or local(), name=f"x-{n}", policy=policy)
        assert not isinstance(outcome, NoFit)
        found.append(outcome.placement.parts[0].worker_name)
    return sorted(set(found))


def test_workers_that_have_it_or_cannot_be_asked_stay():
    assert kept(said(HERE, MISSING, None)) == ["w1", "w3"]


def test_where_nobody_was_asked_all_stay():
    assert kept(Policy()) == ["w1", "w2", "w3"]


def test_a_worker_that_does_not_answer_stays_only_where_the_path_may_be_shared():
    assert kept(said(HERE, SILENT, SILENT)) == ["w1"]
    assert kept(said(HERE, SILENT, MISSING, shared=True)) == ["w1", "w2"]


@pytest.mark.parametrize(
    "key", ["path:/models/m", model(source=Source.LOCAL_PATH, local_path=PATH).source_index]
)
def test_a_ready_file_goes_before_what_the_worker_says(key):
    policy = said(MISSING, MISSING, SILENT, files={key: {2: 100, 3: 100}})
    assert kept(policy) == ["w2", "w3"]


def test_missing_and_unreachable_are_told_apart():
    on = fleet("6x1xA-24")
    outcome = refused(on, local(), policy=said(MISSING, MISSING, MISSING, MISSING, SILENT, SILENT))
    missing, silent = (r for r in outcome.reasons if r.filter == "local_path")
    assert (missing.code, silent.code) == ("local_path.missing", "local_path.unreachable")
    assert missing.text == "4 workers (w1, w2, w3 and 1 more) do not have the path /models/m"
    assert (missing.params["workers"], missing.params["more"]) == (["w1", "w2", "w3"], 1)
    assert silent.text == "2 workers (w5, w6) did not answer when asked for the path /models/m"
    assert outcome.cures & (Cure.FILES | Cure.TIME) == Cure.FILES | Cure.TIME
    assert Cure.TIME not in refused(on, local(), policy=said(*[MISSING] * 6)).cures


def test_every_worker_of_a_placement_must_have_it():
    on = fleet("3x2xA-24")
    wanted = local(80, distributed_inference_across_workers=True)
    made = place(on, wanted, policy=said(HERE, MISSING, HERE))
    assert [p.worker_name for p in made.parts] == ["w1", "w3"]
    refused(fleet("3x2xA-24"), wanted, policy=said(HERE, MISSING, MISSING))


def test_kept_results_follow_what_is_said_though_no_worker_changed():
    on, memo = fleet("2x1xA-24"), SearchCache()
    wanted = local()

    def where(policy: Policy) -> str | None:
        outcome = ask(on, wanted, policy=policy, memo=memo)
        return None if isinstance(outcome, NoFit) else outcome.placement.parts[0].worker_name

    assert where(said(MISSING, HERE)) == "w2"
    assert where(said(HERE, MISSING)) == "w1"
    assert where(said(MISSING, MISSING)) is None
    assert where(said(MISSING, MISSING, files={f"path:{PATH}": {2: 1}})) == "w2"
    assert where(said(HERE, MISSING)) == "w1"
    assert memo.misses == 1


def test_picked_workers_without_the_path_are_named():
    spec = local(gpu_ids=["w1:cuda:0"])
    outcome = refused(fleet("2x1xA-24"), spec, policy=said(MISSING, HERE))
    assert "1 worker (w1) does not have the path /models/m" in outcome.message


def test_a_model_of_a_hub_has_no_path_to_look_for():
    wanted = demand(8, model(source=Source.HUGGINGFACE, local_path=PATH))
    assert kept(said(MISSING, MISSING, MISSING), wanted) == ["w1", "w2", "w3"]


def test_a_path_of_any_length_makes_no_flood():
    path = "/m/" + "x" * 5000
    wanted = demand(8, model(source=Source.LOCAL_PATH, local_path=path))
    policy = Policy(paths={path: PathKnowledge({1: MISSING})})
    assert len(refused(fleet("1x1xA-24"), wanted, policy=policy).message) < 600
