"""Decisions: the fleet of a case, the demand of its model, and the place or refusal that comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpustackd.domain.bookings import Booking
from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import ModelSpec, model_spec
from gpustackd.domain.outcome import NoFit, Part, Placed, Placement, Reason
from gpustackd.domain.pools import Pools, gpu_pool
from gpustackd.errors import BadRow
from gpustackd.estimate.demand import build_demand
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.sources.formats.config_json import hyper_parameters
from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.oracles import layers
from tests.gpustack_reference.production import gguf

BACKENDS = {"vLLM", "SGLang", "MindIE", "VoxBox", "Custom"}
PARSED = {
    "derived_max_seq_len": "max_sequence_length",
    "is_multimodel": "is_multimodal",
    "vision_num_attention_heads": "vision_heads",
}
"""Dimensions that have another name here."""


# -- the fleet -----------------------------------------------------------------------------------------------


Only = Mapping[str, set[tuple[str | None, int]] | None]
"""Workers that may be used, with type (None = any) and index of their GPUs (None = all of them)."""


def fleet(case: Case, *, only: Only | None = None) -> Fleet:
    """The workers of a case with what its existing instances hold. All that is not `only` is full: it is
    there, as sizes of the fleet may depend on it, and takes nothing."""
    made = Fleet()
    gpu_id = 0
    for w in cases.workers(case):
        made.put_worker(_worker_row(w))
        reserved = (w.get("system_reserved") or {}).get("vram") or 0
        for g in w.get("gpus") or []:
            gpu_id += 1
            total = g.get("vram_total")
            link = {"status": g["net_status"], "inet": g.get("net_ip")} if "net_status" in g else None
            made.put_gpu(
                GpuRow(
                    id=gpu_id, worker_id=w["id"], index=g["index"], type=g["type"], vram_total=total,
                    capacity=None if total is None else max(total - reserved, 0),
                    open=w["state"].upper() == "READY", vendor=g.get("vendor"), name=g.get("product"),
                    arch_family=g.get("arch_family"), runtime_version=g.get("runtime_version"),
                    network=link,
                )
            )  # fmt: skip
    for instance in cases.existing(case):
        _hold(made, instance)
    if only is not None:
        _fill(made, only)
    return made


def _fill(on: Fleet, only: Only) -> None:
    for row in list(on.gpu_rows.values()):
        place = on.slot[row.id]
        name = on.row(place[0]).name
        free = only.get(name, set())
        if free is not None and not {(None, row.index), (row.type, row.index)} & free:
            on.vram_allocated[place] = max(on.vram_capacity[place], on.vram_allocated[place])
    for name, w in on.by_name.items():
        if name not in only:
            on.ram_allocated[w] = max(on.ram_capacity[w], on.ram_allocated[w])
        on.touch(w)


def _worker_row(w: Mapping[str, Any]) -> WorkerRow:
    reserved = {"ram": 0, "vram": 0} | (w.get("system_reserved") or {})
    unified = bool(w.get("uma") or any(g.get("uma") for g in w.get("gpus") or []))
    ram = w.get("ram_total")
    capacity = None if ram is None else max(ram - reserved["ram"] - unified * reserved["vram"], 0)
    return WorkerRow(
        id=w["id"], name=w["name"], cluster_id=w.get("cluster_id", 1), state=w["state"].upper(),
        labels=w.get("labels") or {}, ip=w.get("ip"), unified_memory=unified, vram_reserved=reserved["vram"],
        ram_capacity=capacity,
    )  # fmt: skip


def _hold(on: Fleet, instance: Mapping[str, Any]) -> None:
    """Book what an instance claims, part by part."""
    for n, part in enumerate(instance["parts"]):
        w = on.position.get(part.get("worker_id", -1))
        if w is None:
            continue
        claim, name = part["claim"], "subordinate" if n else "main"
        model = instance.get("model_id") or 10**6 + instance["id"]
        for s, gpu_id in enumerate(on.gpu_id[w].tolist()):
            if not gpu_id:
                continue
            row = on.gpu_rows[gpu_id]
            size = (claim.get("vram") or {}).get(str(row.index))
            kind = part.get("gpu_type") or row.type
            if size is None or kind != row.type or (part.get("gpu_indexes") is None and not n):
                continue
            on.vram_allocated[w, s] += size
            on.ram_allocated[w] += size if on.unified[w] else 0
            on.add_booking(Booking(instance["id"], model, on.row(w).id, gpu_id, size, 0, name))
        on.ram_allocated[w] += claim.get("ram") or 0
        on.touch(w)


def ready(case: Case) -> Case:
    """The same case with every worker READY: its test went past the filters."""
    workers = [w | {"set": {**(w.get("set") or {}), "state": "ready"}} for w in case["workers"]]
    return case | {"workers": workers}


# -- the demand ----------------------------------------------------------------------------------------------


def spec_of(case: Case) -> ModelSpec:
    """The model's row. Where a test went to the custom selector itself, the model's backend says so."""
    asked = case["model"]
    given = {k: v for k, v in asked.items() if v is not None and not k.startswith("gguf_")}
    row: dict[str, Any] = {"id": 1, "version": 1, "name": "model"} | given
    if not row.get("backend") and case.get("backend") in BACKENDS:
        row["backend"] = case["backend"]
    if not row.get("backend") and case["area"] == "selector.custom":
        row["backend"] = "Custom"
    return model_spec(row)


def demand(case: Case) -> Demand:
    """What the case's model asks for. What it gives of files and dimensions goes in as facts."""
    asked, spec, config = case["model"], spec_of(case), cases.config_of(case)
    weights = asked.get("weight_bytes")
    if "image" in spec.categories and "diffusion_weight_bytes" in asked:
        weights = asked["diffusion_weight_bytes"]
    facts = ModelFacts(
        0 if weights is None else weights,
        lora_bytes=sum((asked.get("lora_weight_bytes") or {}).values()),
        config=config,
        hyper=_dimensions(config, asked),
        categories=spec.categories,
    )
    if "gguf_estimates" in asked:
        return gguf.given_sizes(spec, facts, case)
    if "gguf_metadata_fixture" in asked:
        return gguf.by_header(spec, case)
    made = build_demand(spec, facts)
    if "vram_claim" in asked:
        made = replace(made, need=replace(made.need, vram=asked["vram_claim"]))
    return made


def _dimensions(config: dict[str, Any], asked: Mapping[str, Any]) -> HyperParameters | None:
    parsed = dict(asked.get("parsed") or {})
    if asked.get("parsed_only"):
        config = {}
    if not config and not parsed:
        return None
    hyper = hyper_parameters(config) if config else HyperParameters()
    for theirs, own in PARSED.items():
        if theirs in parsed:
            parsed[own] = parsed.pop(theirs)
    names = {k: _hashable(v) for k, v in parsed.items() if k in HyperParameters.__dataclass_fields__}
    return replace(hyper, **names)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def policy(case: Case) -> Policy:
    """The default policy with the pools of the case."""
    asked = case["model"]
    types = [
        gpu_pool(t["name"], t.get("cluster_id"), t.get("detail")) for t in asked.get("instance_types") or []
    ]
    devices = {asked["cluster_id"]: asked.get("cluster_devices")} if asked.get("cluster_id") else {}
    return Policy(pools=Pools.of(types, devices))


# -- decisions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A decision as plain values."""

    place: dict[str, Any] | None
    """The placement in the shape of a candidate, or None."""
    engine: str
    score: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    text: str = ""
    """The refusal, or the warnings of a placement."""
    reasons: tuple[tuple[str, Mapping[str, Any], str], ...] = ()
    """(code, parameters, filter)."""
    need: int | None = None
    pool: tuple[tuple[str, int], ...] = ()
    """Workers left after each filter."""


def answer(case: Case, name: str = "x-1", *, only: Only | None = None) -> Answer:
    """Decide for an instance of this name."""
    try:
        wanted = demand(case)
    except BadRow as problem:
        return Answer(None, "", text=str(problem), reasons=(("model.bad", {}, "estimate"),))
    outcome = decide(fleet(case, only=only), wanted, Subject(10**6, name), policy(case))
    return _plain(outcome, wanted)


def _plain(outcome: Placed | NoFit, wanted: Demand) -> Answer:
    engine, need = wanted.engine.name, wanted.need.vram
    pool = tuple((s.filter, s.kept) for s in outcome.pool)
    if isinstance(outcome, NoFit):
        return Answer(
            None, engine, text=outcome.message, reasons=_reasons(outcome.reasons), need=need, pool=pool
        )
    made = outcome.placement
    return Answer(
        as_candidate(made, wanted.engine), engine, made.score, dict(made.score_parts),
        "\n".join(r.text for r in made.warnings), _reasons(made.warnings), need, pool,
    )  # fmt: skip


def _reasons(found: Sequence[Reason]) -> tuple[tuple[str, Mapping[str, Any], str], ...]:
    return tuple((r.code, dict(r.params), r.filter) for r in found)


def as_candidate(p: Placement, engine: Engine) -> dict[str, Any]:
    """A placement in the shape of `expect.candidates`, without scores."""
    made = [_part(x, engine, p) for x in p.parts]
    main = made[0]
    if p.over_commit:
        main["overcommit"] = True
    if p.tensor_split is not None:
        main["claim"]["tensor_split"] = list(p.tensor_split)
    for said, x in zip(made[1:], p.parts[1:], strict=True):
        if engine is not Engine.GGUF:
            said |= {"worker_ip": x.worker_ip, "total_gpus": x.total_gpus}
    return main | ({"subordinates": made[1:]} if made[1:] else {})


def _part(part: Part, engine: Engine, p: Placement) -> dict[str, Any]:
    claim: dict[str, Any] = {
        "ram": part.ram,
        "vram": {str(i): v for i, v in zip(part.gpu_indexes, part.vram, strict=True)},
    }
    if p.vram_utilization is not None:
        claim["vram_utilization"] = p.vram_utilization
    said: dict[str, Any] = {
        "worker_id": part.worker_id,
        "worker": part.worker_name,
        "gpu_type": part.gpu_type,
        "gpu_indexes": list(part.gpu_indexes) or None,
        "claim": claim,
    }
    if part.gpu_addresses:
        said["gpu_addresses"] = list(part.gpu_addresses)
    if engine is Engine.GGUF:
        first = part is p.parts[0]
        claim["offload_layers"] = p.offload_layers if first else part.offload_layers
        claim["total_layers"] = p.total_layers
        if part.unified:
            claim["uma"] = True
    return said


def gpus_taken(case: Case, needed: int, *, spans: bool) -> int | None:
    """GPUs that a model of equal layers gets which needs exactly so many of the fleet's equal GPUs."""
    on = fleet(case)
    model = layers.uniform(min(int(r.vram_total or 0) for r in on.gpu_rows.values()), needed)
    row = {"id": 1, "version": 1, "name": "m", "source": "local_path", "local_path": "/m/x.gguf",
           "distributed_inference_across_workers": spans}  # fmt: skip
    wanted = gguf.of_model(model_spec(row), ModelFacts(None, categories=("llm",)), model)
    outcome = decide(on, wanted, Subject(10**6, "x-1"), Policy())
    return outcome.placement.gpu_count if isinstance(outcome, Placed) else None
