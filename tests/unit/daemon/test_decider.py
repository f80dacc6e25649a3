"""What failed in a decision is logged and counted; the mix of demands follows what waits and is decided."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.demand_mix import DIFFERENT, DemandMix
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.observe.logging import start_logging
from gpustackd.observe.metrics import STAGES, Metrics, exposition
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.filters.status import StatusFilter
from gpustackd.placement.mix import UNKNOWN_MIX, WHOLE, DemandShape
from gpustackd.placement.policy import Policy
from gpustackd.placement.scoring.demand_mix import distance, mix
from gpustackd.placement.scoring.strategies import Scorer
from gpustackd.ports import WaitingInstance
from gpustackd.sources.abandonable_threads import AbandonableThreads
from gpustackd.store.memory.store import MemoryStore
from tests.fleets import GIB, demand, fleet, model, occupy


class Bench:
    """A decider over a fleet, with a real log and real metrics."""

    def __init__(self, folder: Path, text: str, policy: Policy | None = None) -> None:
        self.path = folder / "log"
        self.metrics = Metrics("1", "r")
        self.stream = self.path.open("w")
        self.logging = start_logging(stream=self.stream, form="json")
        store = MemoryStore()
        self.feed = FleetFeed(store)
        self.feed.fleet = fleet(text)
        self.probe = PathProbe(None, FileLocations(store, self.feed), AbandonableThreads(), Clock())
        self.reporter = Reporter(self.logging.log, self.metrics)
        self.decider = Decider(self.feed, self.probe, policy or Policy(), self.reporter)

    def counted(self, stage: str) -> float:
        text = exposition(self.metrics.registry)[0].decode()
        name = f'gpustackd_stage_failures_total{{stage="{stage}"}} '
        [line] = [x for x in text.splitlines() if x.startswith(name)]
        return float(line.removeprefix(name))

    def told(self) -> list[dict[str, Any]]:
        self.logging.close()
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line["event"] == "decision.stage_failed"]

    def close(self) -> None:
        self.logging.close()
        self.stream.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, "2x2xA-24[zone=a]")
    yield made
    made.close()


def fail(*_: Any) -> Any:
    raise RuntimeError("on purpose")


def test_every_stage_is_there_to_be_watched_before_anything_failed(bench: Bench) -> None:
    assert {bench.counted(stage) for stage in STAGES} == {0}


def test_failures_are_counted_each_time_and_logged_once_in_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatusFilter, "keep", fail)
    monkeypatch.setattr(Scorer, "cards", fail)
    for n in range(1, 4):
        outcome, _ = bench.decider.decide(demand(8), n, f"x-{n}")
        assert isinstance(outcome, Placed)
    assert bench.counted("filter.status") == bench.counted("scorer.placement") == 3
    told = bench.told()
    assert sorted(line["stage"] for line in told) == ["filter.status", "scorer.placement"]
    assert all("on purpose" in line["reason"] for line in told)


def test_a_refusal_in_which_something_failed_is_not_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = demand(20, model(worker_selector={"zone": "b"}))
    large = demand(100, model(worker_selector={"zone": "a"}))
    with monkeypatch.context() as patch:
        patch.setattr(LabelFilter, "keep", fail)
        outcome, _ = bench.decider.decide(wanted, 1, "x")
        assert isinstance(outcome, Placed)  # the label is not looked at
        outcome, _ = bench.decider.decide(large, 2, "y")
        assert isinstance(outcome, NoFit)
        assert outcome.faults
    outcome, _ = bench.decider.decide(large, 2, "y")
    assert isinstance(outcome, NoFit)
    assert not outcome.faults
    outcome, _ = bench.decider.decide(wanted, 1, "x")
    assert isinstance(outcome, NoFit)


# -- the mix -------------------------------------------------------------------------------------------------


class Known(ModelCatalog):
    """Demands as given."""

    def __init__(self, demands: dict[int, Demand]) -> None:
        self.demands = demands

    def last_demand(self, model_id: int) -> Demand | None:
        return self.demands.get(model_id)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waiting(n: int, model_id: int) -> WaitingInstance:
    return WaitingInstance(n, f"i{n}", model_id, 0, 0, 0, datetime.now(UTC), 0.0, None)


LARGE = demand(70, model(7, backend_parameters=("--pipeline-parallel-size=4",)))
SMALL = demand(4, model(8, placement_strategy=Strategy.FRAGMENTATION, categories=("embedding",)))


def weight(policy: Policy, shape: DemandShape) -> float:
    found = dict(zip(policy.mix.shapes, policy.mix.weights, strict=True))
    return found.get(shape, 0.0)


@pytest.fixture
def watched(bench: Bench) -> tuple[DemandMix, dict[int, WaitingInstance], Clock]:
    rows: dict[int, WaitingInstance] = {}
    clock = Clock()
    catalog = Known({7: LARGE, 8: SMALL})
    return (
        DemandMix(bench.feed, catalog, lambda: Counter(r.model_id for r in rows.values()), clock),
        rows,
        clock,
    )


def test_only_the_strategy_that_asks_gets_a_mix(watched: Any) -> None:
    demands, _, _ = watched
    policy = Policy()
    assert demands.apply(policy, LARGE) is policy
    assert demands.apply(policy, SMALL) is not policy
    assert demands.apply(Policy(strategy=Strategy.FRAGMENTATION), LARGE).mix is not UNKNOWN_MIX


def test_what_waits_is_half_of_the_mix(watched: Any) -> None:
    demands, rows, clock = watched
    policy = Policy()
    before = demands.apply(policy, SMALL)
    assert set(before.mix.shapes) == set(WHOLE)
    rows.update({n: waiting(n, 7) for n in range(3)})
    assert demands.apply(policy, SMALL) is before  # not looked at yet
    clock.now += 1
    after = demands.apply(policy, SMALL)
    four = next(s for s in after.mix.shapes if s.gpus == 4 and s.share == 0.9)
    assert weight(after, four) == pytest.approx(0.5 / 0.7)
    demands.saw(SMALL)
    clock.now += 1
    assert weight(demands.apply(policy, SMALL), four) == pytest.approx(0.5)


def test_a_mix_that_is_about_the_same_stays_the_same_object(watched: Any) -> None:
    demands, rows, clock = watched
    policy = Policy()
    rows.update({n: waiting(n, 7) for n in range(100)})
    first = demands.apply(policy, SMALL)
    rows.pop(1)
    rows[1000] = waiting(1000, 8)
    clock.now += 1
    assert demands.apply(policy, SMALL) is first
    rows.clear()
    clock.now += 1
    last = demands.apply(policy, SMALL)
    assert last is not first
    assert distance(last.mix, first.mix) > DIFFERENT


def test_what_stands_on_the_fleet_was_seen(bench: Bench) -> None:
    occupy(bench.feed.fleet, "w1", [0, 1], 16, instance=5)
    demands = DemandMix(bench.feed, Known({}), dict, Clock())
    found = demands.apply(Policy(), SMALL)
    assert weight(found, DemandShape(2, 16 * GIB)) == pytest.approx(0.3 / 0.5)


def test_weights_of_a_mix_add_up_to_one() -> None:
    many = {DemandShape(n, n * GIB): 1.0 for n in range(1, 40)}
    for found in (mix({}, {}), mix(many, {}), mix({}, many), mix(many, many)):
        assert sum(found.weights) == pytest.approx(1)
        assert len(found.shapes) <= 16
    assert distance(mix(many, {}), mix(many, {})) == pytest.approx(0)
    assert distance(mix({DemandShape(1, 5): 1.0}, {}), mix({DemandShape(2, 5): 1.0}, {})) == pytest.approx(
        0.5 / 0.7
    )
