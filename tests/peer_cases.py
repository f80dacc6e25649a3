"""Cases of the peer as fleets and demands, and our candidates in the shape of its answers.

What a case fixes (weights, dimensions, claims) goes in as facts; everything else is worked out by the same
functions that the daemon uses.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from gpustackd.domain.bookings import Booking
from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.gguf_levels import GgufNeed, Level, Share
from gpustackd.domain.model_spec import ModelSpec, model_spec
from gpustackd.domain.outcome import Part, Placement
from gpustackd.domain.pools import Pools, instance_type
from gpustackd.estimate.demand import build_demand
from gpustackd.placement.policy import Policy
from gpustackd.sources.formats.config_json import hyper_parameters

HERE = Path(__file__).parent / "fixtures" / "peer"
PARSED = {
    "derived_max_seq_len": "max_sequence_length",
    "is_multimodel": "is_multimodal",
    "vision_num_attention_heads": "vision_heads",
}
"""What the peer's names for dimensions are here."""
BACKENDS = {"vLLM", "SGLang", "MindIE", "VoxBox"}


def cases(*areas: str, handed: bool = False) -> list[dict[str, Any]]:
    """Cases of these areas, in the order of the file; `handed`: of the project's own file in any case.

    Where the peer's test went to the custom selector directly, the model's backend says so here.
    """
    path = HERE / "peer-cases.jsonl"
    if not handed:
        path = Path(os.environ.get("GPUSTACKD_PEER_CASES") or path)
    read = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for case in read:
        if case["area"] == "selector.custom" and not case["model"].get("backend"):
            case["model"]["backend"] = "Custom"
    return [c for c in read if c["area"] in areas]


@lru_cache(maxsize=1)
def _fixtures() -> tuple[dict[str, Any], dict[str, Any]]:
    folder = Path(os.environ.get("GPUSTACKD_PEER_FIXTURES") or HERE)
    workers = json.loads((folder / "fixtures-workers.json").read_text())["fixtures"]
    models = json.loads((folder / "models.json").read_text())["models"]
    return workers, models


def known_models() -> dict[str, Any]:
    """Facts of public models by name."""
    return _fixtures()[1]


# -- the fleet -------------------------------------------------------------------------------------------


def worker(described: dict[str, Any]) -> dict[str, Any]:
    """A worker as a case describes it: a fixture or inline, then `set`, `gpus`, `gpus_take`, `gpus_patch`."""
    base = described.get("inline") or _fixtures()[0][described["fixture"]]
    made: dict[str, Any] = json.loads(json.dumps(base))
    for key, value in (described.get("set") or {}).items():
        made.pop(key, None) if value is None else made.__setitem__(key, value)
    if "gpus" in described:
        made["gpus"] = json.loads(json.dumps(described["gpus"]))
    if "gpus_take" in described:
        made["gpus"] = made.get("gpus", [])[: described["gpus_take"]]
    for position, fields in (described.get("gpus_patch") or {}).items():
        made["gpus"][int(position)].update(fields)
    return made


def fleet(case: dict[str, Any]) -> Fleet:
    """The workers of a case with what its existing instances hold."""
    made = Fleet()
    gpu_id = 0
    for w in map(worker, case["workers"]):
        reserved = {"ram": 0, "vram": 0} | (w.get("system_reserved") or {})
        uma = bool(w.get("uma") or any(g.get("uma") for g in w.get("gpus") or []))
        ram = w.get("ram_total")
        made.put_worker(
            WorkerRow(
                id=w["id"], name=w["name"], cluster_id=w.get("cluster_id", 1), state=w["state"].upper(),
                labels=w.get("labels") or {}, ip=w.get("ip"), unified_memory=uma,
                vram_reserved=reserved["vram"],
                ram_capacity=None if ram is None else max(ram - reserved["ram"] - uma * reserved["vram"], 0),
            )
        )  # fmt: skip
        for g in w.get("gpus") or []:
            gpu_id += 1
            link = {"status": g["net_status"], "inet": g.get("net_ip")} if "net_status" in g else None
            total = g.get("vram_total")
            made.put_gpu(
                GpuRow(
                    id=gpu_id, worker_id=w["id"], index=g["index"], type=g["type"], vram_total=total,
                    capacity=None if total is None else max(total - reserved["vram"], 0),
                    open=w["state"].upper() == "READY", vendor=g.get("vendor"), name=g.get("product"),
                    arch_family=g.get("arch_family"), runtime_version=g.get("runtime_version"),
                    network=link,
                )
            )  # fmt: skip
    for instance in case.get("existing_instances") or []:
        _hold(made, instance)
    return made


def _hold(on: Fleet, instance: dict[str, Any]) -> None:
    subordinates = instance.get("subordinates") or instance.get("subordinate_workers") or []
    for n, part in enumerate([instance, *subordinates]):
        w = on.position.get(part.get("worker_id", -1))
        claim = part.get("claim") or part.get("computed_resource_claim") or {}
        if w is None:
            continue
        for s, gpu_id in enumerate(on.gpu_id[w].tolist()):
            if not gpu_id:
                continue
            row = on.gpu_rows[gpu_id]
            size = (claim.get("vram") or {}).get(str(row.index))
            kind = part.get("gpu_type") or instance.get("gpu_type") or row.type
            if size is None or kind != row.type or (part.get("gpu_indexes") is None and not n):
                continue
            on.vram_allocated[w, s] += size
            on.ram_allocated[w] += size if on.unified[w] else 0
            model = instance.get("model_id") or 10**6 + instance["id"]
            part_of = "subordinate" if n else "main"
            on.add_booking(Booking(instance["id"], model, on.row(w).id, gpu_id, size, 0, part_of))
        on.ram_allocated[w] += 0 if n else claim.get("ram") or 0
        on.touch(w)


# -- the demand ------------------------------------------------------------------------------------------


def ready(case: dict[str, Any]) -> dict[str, Any]:
    """The same case with every worker READY: the original test went past the filters."""
    workers = [w | {"set": {**(w.get("set") or {}), "state": "ready"}} for w in case["workers"]]
    return case | {"workers": workers}


def spec_of(case: dict[str, Any]) -> ModelSpec:
    """The model's row."""
    asked = case["model"]
    row = {"id": 1, "version": 1, "name": asked.get("name", "model")} | asked
    if not row.get("backend") and case.get("backend") in BACKENDS:
        row["backend"] = case["backend"]
    return model_spec(row)


def demand(case: dict[str, Any]) -> Demand:
    """What the case's model asks for."""
    asked = case["model"]
    spec = spec_of(case)
    config = asked.get("config") or {}
    if ref := asked.get("config_ref"):
        config = _fixtures()[1][ref].get("hf_config") or {}
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
        return _gguf(spec, facts, asked)
    made = build_demand(spec, facts)
    if "vram_claim" in asked:
        made = replace(made, need=replace(made.need, vram=asked["vram_claim"]))
    return made


class Captured:
    """Estimates that the peer's estimator gave, by how layers were divided; empty where it was not asked."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self._levels: dict[tuple[tuple[float, ...], bool, bool], tuple[Level, ...]] = {}
        for a in answers:
            split = tuple(float(x) for x in a.get("tensor_split") or ())
            remote = bool((a.get("extra") or {}).get("rpc"))
            self._levels[split, remote, a["offload"] == "full"] = _levels(a["estimate"])
        self.total_layers = self.levels()[-1].offload_layers
        self.layer_bytes = (0,) * self.total_layers

    def levels(self, split: tuple[float, ...] = (), remotes: int = 0) -> tuple[Level, ...]:
        keys = [(split, remote, full) for full in (False, True) for remote in (bool(remotes), not remotes)]
        return next((self._levels[k] for k in keys if k in self._levels), ())

    def level(self, offload_layers: int, split: tuple[float, ...] = (), remotes: int = 0) -> Level:
        return self.levels(split, remotes)[offload_layers]


@lru_cache(maxsize=64)
def _levels(name: str) -> tuple[Level, ...]:
    folder = Path(os.environ.get("GPUSTACKD_PEER_FIXTURES") or HERE)
    files = [path / "gguf-estimates.json" for path in (folder, HERE)]
    captured = next(found[name] for f in files if f.exists() and name in (found := _estimates(f)))
    return tuple(
        Level(
            n,
            tuple(Share(layers, own, unified) for unified, own, layers in devices),
            ram[1],
            ram[0],
            bool(full),
        )
        for n, full, ram, devices in captured["items"]
    )


@lru_cache(maxsize=2)
def _estimates(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["estimates"]
    return found


def _gguf(spec: ModelSpec, facts: ModelFacts, asked: dict[str, Any]) -> Demand:
    sizes = Captured(asked["gguf_estimates"])
    full = sizes.levels()[-1]
    need = Need(full.devices[0].vram, full.ram)
    return Demand(spec, facts, need, Engine.GGUF, "", GgufNeed(sizes, asked.get("distributable", True)))


def _dimensions(config: dict[str, Any], asked: dict[str, Any]) -> HyperParameters | None:
    parsed = dict(asked.get("parsed") or {})
    if asked.get("parsed_only"):
        config = {}
    if not config and not parsed:
        return None
    hyper = hyper_parameters(config) if config else HyperParameters()
    for theirs, own in PARSED.items():
        if theirs in parsed:
            parsed[own] = parsed.pop(theirs)
    known = {k: _hashable(v) for k, v in parsed.items() if k in HyperParameters.__dataclass_fields__}
    return replace(hyper, **known)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def policy(case: dict[str, Any]) -> Policy:
    """What an operator set, with the pools of the case."""
    asked = case["model"]
    types = [
        instance_type(t["name"], t.get("cluster_id"), t.get("detail"))
        for t in asked.get("instance_types") or []
    ]
    devices = {asked["cluster_id"]: asked.get("cluster_devices")} if asked.get("cluster_id") else {}
    return Policy(pools=Pools.of(types, devices))


# -- the answer --------------------------------------------------------------------------------------------


def as_candidate(p: Placement, engine: Engine) -> dict[str, Any]:
    """A placement in the shape of `expect.candidates`, without scores."""
    if engine is Engine.GGUF:
        return _layered(p)
    said = _part(p.parts[0], engine)
    if p.over_commit:
        said["overcommit"] = True
    if len(p.parts) > 1:
        said["subordinates"] = [_part(x, engine) | {"worker_ip": x.worker_ip, "total_gpus": x.total_gpus}
                                for x in p.parts[1:]]  # fmt: skip
    return said


def _layered(p: Placement) -> dict[str, Any]:
    """A placement of a GGUF model: the peer tells no GPU type, and layers in every claim."""
    made = []
    for n, part in enumerate(p.parts):
        said = _part(part, Engine.GGUF)
        del said["gpu_type"]
        layers = part.offload_layers if n else p.offload_layers
        said["claim"] |= {"offload_layers": layers, "total_layers": p.total_layers}
        if part.unified:
            said["claim"]["uma"] = True
        made.append(said)
    if p.tensor_split is not None:
        made[0]["claim"]["tensor_split"] = list(p.tensor_split)
    return made[0] | ({"subordinates": made[1:]} if made[1:] else {})


def _part(part: Part, engine: Engine) -> dict[str, Any]:
    said: dict[str, Any] = {
        "worker_id": part.worker_id,
        "worker": part.worker_name,
        "gpu_type": part.gpu_type,
    }
    if engine in (Engine.VGPU, Engine.WHOLE_CARD):
        # the peer leaves the cards to the node and counts placeholders from 0
        vram = {str(n): v for n, v in enumerate(part.vram)}
    else:
        said["gpu_indexes"] = list(part.gpu_indexes) or None
        vram = {str(i): v for i, v in zip(part.gpu_indexes, part.vram, strict=True)}
    if part.gpu_addresses:
        said["gpu_addresses"] = list(part.gpu_addresses)
    return said | {"claim": {"ram": part.ram, "vram": vram}}
