"""Scorer cases of the peer through our own scorers: fleets, candidates, replicas as a case describes them.

A case names scorers (`placement`, `placement_item`, `file_locality`, `status`, `offload_layers`, `given`)
with their maxima; the score of a candidate or instance is the sum. Sizes in bytes; what a case leaves out is
0 or not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpustackd.domain.bookings import Booking
from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import Strategy, model_spec
from gpustackd.domain.origin import draft_origin
from gpustackd.placement.context.gpu_allocation import GpuAllocation
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.registry import rules_of
from gpustackd.placement.search import Search
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.retention_score import RetentionWeights, scores
from tests import peer_cases as peer

DRAFT = "owner/draft"
OTHER_MODEL = 10**6


def score_of(case: Mapping[str, Any]) -> list[float] | dict[str, float] | float:
    """What our scorers give, in the shape of `expect.scores` or `expect.score`."""
    kinds = {s["type"] for s in case["inputs"]["scorers"]}
    if kinds == {"placement_item"}:
        return _item(case)
    down = any(s.get("scale") == "scale_down" for s in case["inputs"]["scorers"])
    if kinds & {"status", "offload_layers"} or down:
        return _replicas(case)
    return _candidates(case)


# -- candidates (scale-up) -----------------------------------------------------------------------------------


def _candidates(case: Mapping[str, Any]) -> list[float]:
    candidates = case["inputs"]["candidates"]
    total = [0.0] * len(candidates)
    for scorer in case["inputs"]["scorers"]:
        if scorer["type"] == "given":
            parts = [s or 0.0 for s in scorer["scores"]]
        else:
            parts = _rated(case, scorer)
        total = [t + p for t, p in zip(total, parts, strict=True)]
    return total


def _rated(case: Mapping[str, Any], scorer: Mapping[str, Any]) -> list[float]:
    """One scorer's part for every candidate, by the search that decisions are made with."""
    on = fleet_of(case)
    search = search_of(on, case, scorer)
    seats = [_seats(on, c) for c in case["inputs"]["candidates"]]
    _, parts = search.ranker.rate(seats)
    name = "locality" if scorer["type"] == "file_locality" else "placement"
    found = parts.get(name)
    return [0.0] * len(seats) if found is None else found.tolist()


def search_of(on: Fleet, case: Mapping[str, Any], scorer: Mapping[str, Any]) -> Search:
    """A search for the case's model with this scorer at its maximum."""
    draft = {"draft_model": DRAFT} if scorer.get("has_draft") else None
    asked = {
        "id": 0,
        "name": "m",
        "source": "huggingface",
        "huggingface_repo_id": "owner/model",
    }
    asked |= {k: v for k, v in (case.get("model") or {}).items() if v is not None}
    spec = model_spec({"version": 1, **asked, "speculative_config": draft})
    files = {spec.source_index: dict.fromkeys(scorer.get("ready_main") or (), 1)}
    origin = draft_origin(spec)
    if origin is not None:
        files[origin.index] = dict.fromkeys(scorer.get("ready_draft") or (), 1)
    locality = scorer["type"] == "file_locality"
    policy = Policy(
        strategy=Strategy(scorer.get("strategy") or "binpack"),
        placement_max=100.0 if locality else scorer["max_score"],
        locality_max=scorer["max_score"] if locality else 0.0,
        ready_files=files,
    )
    wanted = Demand(spec, ModelFacts(1, categories=("llm",)), Need(1), Engine.VLLM)
    search = Search(on, wanted, policy, rules_of(wanted))
    search.refresh()
    return search


def _seats(on: Fleet, candidate: Mapping[str, Any]) -> list[GpuAllocation]:
    parts = [candidate, *(candidate.get("subordinates") or ())]
    return [_seat(on, part, candidate.get("gpu_type")) for part in parts]


def _seat(on: Fleet, part: Mapping[str, Any], kind: str | None) -> GpuAllocation:
    w = on.position[part["worker_id"]]
    claim = part.get("claim") or {}
    vram = claim.get("vram") or {}
    slots = [_slot(on, w, i, part.get("gpu_type") or kind) for i in part.get("gpu_indexes") or ()]
    sizes = [int(vram.get(str(i)) or 0) for i in part.get("gpu_indexes") or ()]
    return GpuAllocation(w, tuple(slots), tuple(sizes), ram=claim.get("ram") or 0)


def _slot(on: Fleet, w: int, index: int, kind: str | None) -> int:
    for s, gpu_id in enumerate(on.gpu_id[w].tolist()):
        row = on.gpu_rows.get(gpu_id)
        if row is not None and row.index == index and kind in (None, row.type):
            return s
    raise AssertionError(f"no GPU {index} on {on.row(w).name}")


# -- replicas (scale-down) -----------------------------------------------------------------------------------


def _replicas(case: Mapping[str, Any]) -> dict[str, float]:
    on = fleet_of(case)
    by_type = {s["type"]: s for s in case["inputs"]["scorers"]}
    placed = by_type.get("placement") or {}
    weights = RetentionWeights(
        status=(by_type.get("status") or {}).get("max_score") or 0.0,
        offload=(by_type.get("offload_layers") or {}).get("max_score") or 0.0,
        placement=placed.get("max_score") or 0.0,
        pairing=0.0,
        total=case["inputs"].get("total_max_score"),
    )
    model_id = (case.get("model") or {}).get("id") or case["existing_instances"][0]["model_id"]
    strategy = Strategy(placed.get("strategy") or "spread")
    places = PlacementScores(on, model_id, strategy, weights.placement)
    mine = [_replica(case, i) for i in case["existing_instances"] if i.get("model_id", model_id) == model_id]
    return {str(i): score for i, score in scores(mine, weights, places).items()}


def _replica(case: Mapping[str, Any], instance: Mapping[str, Any]) -> Replica:
    states = {w["id"]: w["state"].upper() for w in map(peer.worker, case["workers"])}
    parts = [
        {**p, "computed_resource_claim": p.get("claim")}
        for p in instance.get("subordinates") or instance.get("subordinate_workers") or ()
    ]
    row = {
        **instance,
        "state": (instance.get("state") or "").upper(),
        "worker_state": states.get(instance.get("worker_id")),
        "computed_resource_claim": instance.get("claim") or instance.get("computed_resource_claim"),
        "distributed_servers": {"subordinate_workers": parts} if parts else None,
    }
    return replica(row)


def _item(case: Mapping[str, Any]) -> float:
    """One part on one worker, of which the case gives what is free and what it holds."""
    inputs = case["inputs"]
    scorer = inputs["scorers"][0]
    free = inputs["allocatable"]
    on = Fleet()
    _give(on, 1, "w", free, indexes=inputs.get("gpu_indexes") or ())
    part = {"worker_id": 1, "gpu_indexes": inputs.get("gpu_indexes"), "claim": inputs.get("claim")}
    if scorer.get("scale") == "scale_down":
        places = PlacementScores(on, 1, Strategy(scorer["strategy"]), scorer["max_score"])
        return places._packed(replica({"id": 1, **part, "computed_resource_claim": part["claim"]}).main)
    search = search_of(on, case, scorer)
    _, parts = search.ranker.rate([[_seat(on, part, None)]])
    return float(parts["placement"][0])


# -- the fleet -----------------------------------------------------------------------------------------------


def fleet_of(case: Mapping[str, Any]) -> Fleet:
    """Workers, who sits where, and what the case says is free on some of them."""
    on = peer.fleet(peer.ready(dict(case)) | {"existing_instances": []})
    for part in _parts(case["inputs"].get("candidates") or ()):
        if part["worker_id"] not in on.position:
            on.put_worker(WorkerRow(part["worker_id"], part.get("worker") or "w?", 1, "READY"))
    for part in _parts([*(case["inputs"].get("candidates") or ()), *(case.get("existing_instances") or ())]):
        _reported(on, part)
    for instance in case.get("existing_instances") or ():
        _sit(on, instance)
    for name, free in (case["inputs"].get("allocatable_given") or {}).items():
        w = on.by_name[name]
        _give(on, on.row(w).id, name, free)
    return on


def _parts(candidates: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Main and subordinate parts of candidates or instances."""
    more = ("subordinates", "subordinate_workers")
    return [p for c in candidates for p in (c, *(s for k in more for s in c.get(k) or ()))]


def _reported(on: Fleet, part: Mapping[str, Any]) -> None:
    """Cards that a case names and its worker does not report: they are there, of unknown size."""
    w = on.position.get(part.get("worker_id", -1))
    if w is None:
        return
    there = {on.gpu_rows[g].index for g in on.gpu_id[w].tolist() if g}
    for index in set(part.get("gpu_indexes") or ()) - there:
        worker_id = on.row(w).id
        kind = part.get("gpu_type") or "cuda"
        on.put_gpu(GpuRow(2 * 10**6 + 100 * worker_id + index, worker_id, index, kind))


def _sit(on: Fleet, instance: Mapping[str, Any]) -> None:
    """Count an instance where it is, whatever its state, with what its claim says that it holds."""
    parts = [instance, *(instance.get("subordinates") or instance.get("subordinate_workers") or ())]
    model = instance.get("model_id") or OTHER_MODEL
    for n, part in enumerate(parts):
        w = on.position.get(part.get("worker_id", -1))
        if w is None:
            continue
        claim = part.get("claim") or part.get("computed_resource_claim") or {}
        kind = part.get("gpu_type") or instance.get("gpu_type")
        indexes = part.get("gpu_indexes") or ()
        name = "subordinate" if n else "main"
        for index in indexes:
            s = _slot(on, w, index, kind)
            size = int((claim.get("vram") or {}).get(str(index)) or 0)
            on.vram_allocated[w, s] += size
            gpu_id = int(on.gpu_id[w, s])
            on.add_booking(Booking(instance["id"], model, on.row(w).id, gpu_id, size, 0, name))
        if not indexes and not n:
            on.add_booking(Booking(instance["id"], model, on.row(w).id, None, 0, 0, name))
        on.ram_allocated[w] += 0 if n else int(claim.get("ram") or 0)
        on.touch(w)


def _give(on: Fleet, worker_id: int, name: str, free: Mapping[str, Any], indexes: Sequence[int] = ()) -> None:
    """Let exactly so much be free on a worker and its cards."""
    if worker_id not in on.position:
        on.put_worker(WorkerRow(worker_id, name, 1, "READY"))
    w = on.position[worker_id]
    vram = {int(i): int(size or 0) for i, size in (free.get("vram") or {}).items()}
    there = {on.gpu_rows[g].index for g in on.gpu_id[w].tolist() if g}
    for index in {*vram, *indexes} - there:
        on.put_gpu(
            GpuRow(10**6 + 100 * worker_id + index, worker_id, index, "cuda", vram_total=1, capacity=1)
        )
    for s, gpu_id in enumerate(on.gpu_id[w].tolist()):
        if gpu_id:
            size = vram.get(on.gpu_rows[gpu_id].index, 0)
            on.vram_total[w, s] = on.vram_capacity[w, s] = size
            on.vram_allocated[w, s] = 0
    on.ram_capacity[w], on.ram_allocated[w] = int(free.get("ram") or 0), 0
    on.describe(w)
