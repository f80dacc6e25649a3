"""Scores: of places for a new instance, and of replicas when there are too many.

A case names scorers with their maxima; the score of a place or an instance is their sum. Sizes in bytes;
what a case leaves out is 0 or not there.
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
from gpustackd.replicas.ranking import deletion_order
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.retention_score import RetentionWeights, retention_scores
from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.production import decisions

DRAFT = "owner/draft"
OTHER_MODEL = 10**6
KINDS = {
    "StatusScorer": "status", "OffloadLayerScorer": "offload_layers", "PlacementScorer": "placement",
}  # fmt: skip
"""Scorers that some cases call by another name."""


# -- places (scale-up) ---------------------------------------------------------------------------------------


def of_candidates(case: Case, scorer: Mapping[str, Any]) -> list[float]:
    """One scorer's part for every candidate, by the search that decisions are made with."""
    on = fleet_of(case)
    search = _search(on, case, scorer)
    seats = [_seats(on, c) for c in case["inputs"]["candidates"]]
    _, parts = search.ranker.rate(seats)
    found = parts.get("locality" if scorer["type"] == "file_locality" else "placement")
    return [0.0] * len(seats) if found is None else [float(v) for v in found]


def totals(case: Case, scorers: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """What a decision takes for the total of every candidate under a placement and a locality scorer, and the
    sums of its parts."""
    on = fleet_of(case)
    search = _search(on, case, *scorers)
    found, parts = search.ranker.rate([_seats(on, c) for c in case["inputs"]["candidates"]])
    return [float(t) for t in found], [float(sum(v[k] for v in parts.values())) for k in range(len(found))]


def _search(on: Fleet, case: Case, *scorers: Mapping[str, Any]) -> Search:
    """A search for the case's model with these scorers at their maxima."""
    placed = next((s for s in scorers if s["type"] != "file_locality"), {})
    local = next((s for s in scorers if s["type"] == "file_locality"), {})
    row: dict[str, Any] = {
        "id": 0, "name": "m", "version": 1, "source": "huggingface", "huggingface_repo_id": "owner/model",
    }  # fmt: skip
    row |= {k: v for k, v in (case.get("model") or {}).items() if v is not None}
    row["speculative_config"] = {"draft_model": DRAFT} if local.get("has_draft") else None
    spec = model_spec(row)
    files = {spec.source_index: dict.fromkeys(local.get("ready_main") or (), 1)}
    origin = draft_origin(spec)
    if origin is not None:
        files[origin.index] = dict.fromkeys(local.get("ready_draft") or (), 1)
    named = placed.get("strategy") or row.get("placement_strategy") or "binpack"
    policy = Policy(
        strategy=Strategy(named),
        placement_max=placed.get("max_score", 100.0),
        locality_max=local.get("max_score", 0.0),
        ready_files=files,
    )
    wanted = Demand(spec, ModelFacts(1, categories=("llm",)), Need(1), Engine.VLLM)
    search = Search(on, wanted, policy, rules_of(wanted))
    search.refresh()
    return search


def _seats(on: Fleet, candidate: Mapping[str, Any]) -> list[GpuAllocation]:
    return [_seat(on, part) for part in cases.parts(candidate)]


def _seat(on: Fleet, part: Mapping[str, Any]) -> GpuAllocation:
    w = on.position[part["worker_id"]]
    vram = part["claim"].get("vram") or {}
    slots = [_slot(on, w, i, part.get("gpu_type")) for i in part.get("gpu_indexes") or ()]
    sizes = [int(vram.get(str(i)) or 0) for i in part.get("gpu_indexes") or ()]
    return GpuAllocation(w, tuple(slots), tuple(sizes), ram=part["claim"].get("ram") or 0)


def _slot(on: Fleet, w: int, index: int, kind: str | None) -> int:
    for s, gpu_id in enumerate(on.gpu_id[w].tolist()):
        row = on.gpu_rows.get(gpu_id)
        if row is not None and row.index == index and kind in (None, row.type):
            return s
    raise cases.Unreadable("gpu_indexes", f"{on.row(w).name} has no GPU {index}")


# -- one part, of which the case says what is free -----------------------------------------------------------


def of_item(case: Case, scorer: Mapping[str, Any]) -> float:
    """The score of one part on one worker, for a new instance or for one that is there."""
    inputs = case["inputs"]
    indexes = inputs.get("gpu_indexes")
    on = Fleet()
    _give(on, 1, "w", inputs.get("allocatable") or {}, indexes=indexes or ())
    part = {"worker_id": 1, "gpu_indexes": indexes, "claim": inputs.get("claim") or {}}
    if scorer.get("scale") == "scale_down":
        where = PlacementScores(on, 1, Strategy(scorer["strategy"]), scorer["max_score"])
        row = {"id": 1, "state": "RUNNING", "worker_state": "READY", **part,
               "computed_resource_claim": part["claim"]}  # fmt: skip
        return where.score(replica(row))
    search = _search(on, case, scorer)
    _, parts = search.ranker.rate([[_seat(on, part)]])
    return float(parts["placement"][0])


# -- replicas (scale-down) -----------------------------------------------------------------------------------


def of_replicas(case: Case, only: str | None = None) -> dict[str, float]:
    """What each instance of the model is worth keeping; `only`: by this scorer alone."""
    there, weights, where = _replicas(case, only)
    return {str(i): v for i, v in retention_scores(there, weights, where).items()}


def order(case: Case) -> list[int]:
    """Ids of the model's instances, the one to go first in front."""
    there, weights, where = _replicas(case, None)
    return [r.id for r in deletion_order(there, weights, where)]


class _Given:
    """Scores that the case gives, in the place of those of placements."""

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = values

    def score(self, replica: Replica) -> float:
        return self._values[replica.id]


def _replicas(case: Case, only: str | None) -> tuple[list[Replica], RetentionWeights, Any]:
    inputs = case["inputs"]
    listed = [{**s, "type": KINDS.get(s["type"], s["type"])} for s in inputs["scorers"]]
    by_type = {s["type"]: s for s in listed if only in (None, s["type"])}
    maxima = {
        k: (by_type.get(k) or {}).get("max_score") or 0.0 for k in ("status", "offload_layers", "placement")
    }
    total = inputs.get("total_max_score") if only is None else None
    model = case.get("model") or {}
    model_id = model.get("id") or (case["existing_instances"][0].get("model_id") or 1)
    mine = [
        _replica(case, n, i)
        for n, i in enumerate(cases.existing(case))
        if (i.get("model_id") or model_id) == model_id
    ]
    given = [s for s in listed if s["type"] == "given" and (s.get("max_score") or 0) > 0]
    if given:
        values = {r.id: sum(_given(s["scores"], n, r.id) for s in given) for n, r in enumerate(mine)}
        most = sum(s["max_score"] for s in given)
        return mine, RetentionWeights(0.0, 0.0, most, 0.0, total), _Given(values)
    weights = RetentionWeights(
        maxima["status"], maxima["offload_layers"], maxima["placement"], pairing=0.0, total=total
    )
    named = (by_type.get("placement") or {}).get("strategy") or model.get("placement_strategy") or "spread"
    return mine, weights, PlacementScores(fleet_of(case), model_id, Strategy(named), weights.placement)


def _given(values: Any, position: int, id_: int) -> float:
    """A given score: by position in a list, or by id in a map; null counts as 0."""
    found = values.get(str(id_)) if isinstance(values, Mapping) else values[position]
    return float(found or 0.0)


def _replica(case: Case, n: int, instance: Mapping[str, Any]) -> Replica:
    states = {w["id"]: w["state"].upper() for w in cases.workers(case)}
    others = instance["parts"][1:]
    row = {
        **instance,
        "state": (instance.get("state") or "").upper(),
        "worker_state": states.get(instance.get("worker_id")),
        "computed_resource_claim": instance.get("claim") or instance.get("computed_resource_claim"),
        "created": n,
        "distributed_servers": {
            "subordinate_workers": [{**p, "computed_resource_claim": p["claim"]} for p in others]
        },
    }
    return replica(row)


# -- the fleet -----------------------------------------------------------------------------------------------


def fleet_of(case: Case) -> Fleet:
    """Workers, who sits where, and what the case says is free on some of them."""
    on = decisions.fleet(decisions.ready(case) | {"existing_instances": []})
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
