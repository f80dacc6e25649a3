"""The peer's cases of queues, scaling windows and scale-down, through the code that the daemon runs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any
from zoneinfo import ZoneInfo

import anyio
import pytest

from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.queue.key_queue import KeyChange, KeyQueue, QueuedKey
from gpustackd.daemon.scheduling.backoff import Backoff
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.model_spec import Strategy
from gpustackd.errors import BadRow
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.ranking import ranked
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.retention_score import RetentionWeights, scores
from gpustackd.replicas.schedule import scaling_schedule, scheduled_replicas
from gpustackd.store.memory.store import MemoryStore
from tests import peer_cases as peer
from tests.waiting import TimelessLoop

QUEUES = peer.cases("queue")
SCHEDULES = peer.cases("scaling_schedule")
SCALE_DOWNS = [*peer.cases("scale_down"), *peer.cases("scorer.instance_chain")]
ITEMS = [c for c in peer.cases("scorer.placement") if c["inputs"]["scorers"][0].get("scale") == "scale_down"]

SCORERS = {
    "StatusScorer": "status", "OffloadLayerScorer": "offload", "PlacementScorer": "placement",
    "status": "status", "offload_layers": "offload", "placement": "placement",
}  # fmt: skip


def named(case: dict[str, Any]) -> str:
    return str(case["id"])


# -- scale-down --------------------------------------------------------------------------------------------


def model_of(case: dict[str, Any]) -> dict[str, Any]:
    """The model; of a chain's own tests, whose scorers name the strategy, the first one."""
    strategies = [s["strategy"] for s in case["inputs"].get("scorers", []) if s.get("strategy")]
    return case.get("model") or {"id": 1, "placement_strategy": next(iter(strategies), None)}


def fleet_of(case: dict[str, Any]) -> Fleet:
    """The workers with what is left of them, where the case says so by name."""
    fleet = peer.fleet(case)
    for name, left in (case["inputs"].get("allocatable_given") or {}).items():
        w = fleet.by_name[name]
        fleet.ram_capacity[w], fleet.ram_allocated[w] = left["ram"], 0
        for slot, index in enumerate(fleet.gpu_index[w].tolist()):
            if (size := left["vram"].get(str(index))) is not None:
                fleet.vram_capacity[w, slot], fleet.vram_allocated[w, slot] = size, 0
    return fleet


def candidates(case: dict[str, Any]) -> list[Replica]:
    states = {w["id"]: w["state"].upper() for w in map(peer.worker, case["workers"])}
    found = []
    for n, i in enumerate(case["existing_instances"]):
        if i.get("model_id", model_of(case)["id"]) != model_of(case)["id"]:
            continue
        subordinates = i.get("subordinates") or i.get("subordinate_workers") or []
        parts = [{**s, "computed_resource_claim": s.get("claim")} for s in subordinates]
        found.append(
            replica(
                {
                    **i,
                    "state": str(i.get("state", "")).upper(),
                    "worker_state": states.get(i.get("worker_id")),
                    "computed_resource_claim": i.get("claim"),
                    "distributed_servers": {"subordinate_workers": parts},
                    "created": n,
                }
            )
        )
    return found


def weights(case: dict[str, Any], only: str | None = None) -> RetentionWeights:
    maxima = dict.fromkeys((*SCORERS.values(), "pairing"), 0.0)
    for scorer in case["inputs"].get("scorers", []):
        if only in (None, scorer["type"]):
            maxima[SCORERS[scorer["type"]]] = scorer["max_score"] or 0.0
    return RetentionWeights(**maxima, total=None if only else case["inputs"].get("total_max_score"))


@pytest.mark.parametrize("case", SCALE_DOWNS, ids=named)
def test_scale_down(case: dict[str, Any]) -> None:
    model = model_of(case)
    strategy = Strategy(model.get("placement_strategy") or "spread")
    there, fleet, expect = candidates(case), fleet_of(case), case["expect"]

    def places(chain: RetentionWeights) -> PlacementScores:
        return PlacementScores(fleet, model["id"], strategy, chain.placement)

    chain = weights(case)
    found = scores(there, chain, places(chain))
    if "scores" in expect:
        assert found == {int(i): pytest.approx(v, abs=1e-4) for i, v in expect["scores"].items()}
    for scorer, values in (expect.get("parts") or {}).items():
        alone = weights(case, scorer)
        part = scores(there, alone, places(alone))
        assert part == {int(i): pytest.approx(v, abs=1e-4) for i, v in values.items()}, scorer
    order = [r.id for r in ranked(there, chain, places(chain))]
    assert order == expect.get("order", order)


@pytest.mark.parametrize("case", ITEMS, ids=named)
def test_placement_of_one_item(case: dict[str, Any]) -> None:
    inputs = case["inputs"]
    (scorer,), left, claim = inputs["scorers"], inputs["allocatable"], inputs["claim"]
    fleet = Fleet()
    fleet.put_worker(WorkerRow(1, "w", 1, "READY", ram_capacity=left["ram"]))
    for index, size in left["vram"].items():
        fleet.put_gpu(GpuRow(10 + int(index), 1, int(index), "cuda", vram_total=size, capacity=size))
    item = replica(
        {
            "id": 1,
            "state": "RUNNING",
            "worker_id": 1,
            "worker_state": "READY",
            "gpu_indexes": inputs.get("gpu_indexes"),
            "computed_resource_claim": claim,
        }
    )
    places = PlacementScores(fleet, 1, Strategy(scorer["strategy"]), scorer["max_score"])
    told = claim.get("vram") is not None  # a claim that is silent of its cards is worth nothing here
    assert places.score(item) == pytest.approx(case["expect"]["score"] if told else 0.0)


# -- scaling windows ---------------------------------------------------------------------------------------


def moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return datetime(2026, 11, 17, 12, tzinfo=UTC)  # "any time in November"


@pytest.mark.parametrize("case", SCHEDULES, ids=named)
def test_scaling_schedule(case: dict[str, Any]) -> None:
    inputs, expect = case["inputs"], case["expect"]
    if "replicas" in expect:
        assert [by_schedule(check) for check in inputs["checks"]] == expect["replicas"]
    if "accepted" in expect:
        assert accepted(inputs) is expect["accepted"]
    if "replicas_after_save" in expect:
        planned, submitted = scaling_schedule(inputs["schedule"]), inputs.get("submitted_replicas")
        zone = ZoneInfo(inputs.get("timezone", "UTC"))
        if planned.is_active:
            number = scheduled_replicas(planned, moment(inputs.get("now", "")), zone).replicas
            assert number == expect["replicas_after_save"]
        # the row is checked as it was written, before the schedule has a say
        assert expect.get("replicas_seen_by_validation", submitted) == submitted


def by_schedule(check: dict[str, Any]) -> int | None:
    """What a schedule says at an instant; None where it says nothing."""
    planned, zone = scaling_schedule(check["schedule"]), ZoneInfo(check.get("timezone", "UTC"))
    return scheduled_replicas(planned, moment(check["now"]), zone).replicas if planned.is_active else None


def accepted(inputs: dict[str, Any]) -> bool:
    try:
        if "rule" in inputs:
            scaling_schedule({"enabled": True, "baseline_replicas": 1, "rules": [inputs["rule"]]})
        if "schedule" in inputs:
            scaling_schedule(inputs["schedule"])
    except BadRow:
        return False
    return True


# -- queues ------------------------------------------------------------------------------------------------


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Waiting takes no time, and is exact."""
    return "asyncio", {"loop_factory": TimelessLoop}


class Script:
    """Plays the operations of a case on a queue, at the times that it says."""

    def __init__(self, settings: dict[str, Any]) -> None:
        b = settings.get("backoff")
        backoff = Backoff(Random(1), first=b["base"], ceiling=b["cap"], spread=b["jitter"]) if b else None
        window = settings.get("dedup_window") or 0.0
        self.queue: KeyQueue[str] = KeyQueue(anyio.current_time, backoff, window=window)
        self.started = anyio.current_time()

    async def play(self, op: dict[str, Any]) -> None:
        queue, key, expect = self.queue, op.get("key", ""), op.get("expect")
        change = KeyChange(op.get("type", "MODIFIED"))
        match op["op"]:
            case "add":
                queue.add(key, change, op.get("obj"))
            case "add_after":
                queue.add_after(key, op["delay_s"], change, op.get("obj"))
            case "get" if "expect" in op and expect is None:
                assert await queue.get(op.get("timeout_s", 0.1)) is None
            case "get":
                began = anyio.current_time()
                item = await queue.get(op.get("timeout_s", 1))
                assert item is not None, op
                said(item, expect or {})
                assert anyio.current_time() - began >= op.get("elapsed_at_least_s", 0)
                assert anyio.current_time() - self.started >= op.get("elapsed_since_start_at_least_s", 0)
            case "get_nothing":
                assert await queue.get(op.get("within_s", 0.1)) is None
            case "done":
                queue.done(key)
            case "len":
                assert len(queue) == expect
            case "backoff":
                assert queue.backoff(key) == pytest.approx(expect)
            case "failures":
                assert queue._failures.get(key, 0) == expect
            case "forget":
                queue.forget(key)
            case other:
                raise AssertionError(f"no such operation: {other}")


def said(item: QueuedKey[str], expect: dict[str, Any]) -> None:
    told = {"key": item.key, "type": str(item.change), "obj": item.news}
    assert {k: told[k] for k in expect} == expect


@pytest.mark.anyio
@pytest.mark.parametrize("case", [c for c in QUEUES if "ops" in c["inputs"]], ids=named)
async def test_queue(case: dict[str, Any]) -> None:
    script = Script(case["inputs"].get("queue") or {})
    for op in case["inputs"]["ops"]:
        await script.play(op)


@pytest.mark.anyio
@pytest.mark.parametrize("case", [c for c in QUEUES if "events" in c["inputs"]], ids=named)
async def test_events_of_instances(case: dict[str, Any]) -> None:
    """An event makes the queue take up the instance that it names, if that waits, and no other one."""
    assert [await evaluated(e) for e in case["inputs"]["events"]] == case["expect"]["evaluated"]


async def evaluated(event: dict[str, Any]) -> Sequence[int]:
    store, queue = MemoryStore(), InstanceQueue(anyio.current_time)
    model = store.insert("models", name="m")
    named_id = event.get("instance_id", event.get("instance"))
    for id_ in {named_id or 7, 8, 9}:
        store.insert("model_instances", id=id_, name=f"i{id_}", model_id=model)
    if named_id is not None and not event.get("eligible"):
        store.model_instances[named_id].state = InstanceState.RUNNING
    for row in await store.waiting([named_id] if named_id is not None else []):
        queue.put(row.id, row.priority, row.created_at.timestamp(), model_id=row.model_id)
    return [taken.id for taken in queue.take_nowait(10)]
