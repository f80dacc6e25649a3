"""What keeps workers out of a decision or draws it to them, a scene for each; and published models, sized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from gpustackd.domain.backends import Backends, backend_row
from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Source, Strategy
from gpustackd.domain.outcome import Check
from gpustackd.domain.paths import PathKnowledge, Presence
from gpustackd.placement.policy import Policy
from tests.fleets import GIB, demand, fleet, model, occupy
from tests.golden.published import models
from tests.golden.scenes import Scene, Step

ZONES = "2x2xA-24[zone=a] + 1x2xA-24[zone=b,disk=ssd] + 1x2xA-24 + 1x2xA-24[zone=a,state=MAINTENANCE]"
PATH = "/models/m"


def scenes() -> Iterator[Scene]:
    """Every scene, in its order."""
    yield from _labels()
    yield from _files()
    yield from _backends()
    yield from _memory()
    yield from _settings()
    on = "1x8xH100-80 + 4x1x4090-24 + 2x8x910B-64[type=cann] + 1xcpu"
    for name, wanted in models():
        yield Scene(f"published/{name}", _linked(fleet(on)), [wanted], sized=True)


def _linked(on: Fleet) -> Fleet:
    """NPUs that reach each other."""
    for gpu in list(on.gpu_rows.values()):
        if gpu.type == "cann":
            address = f"10.1.{gpu.worker_id}.{gpu.index}"
            on.put_gpu(replace(gpu, network={"status": "up", "inet": address}))
    return on


def _labels() -> Iterator[Scene]:
    for name, selector in (
        ("match", {"zone": "a"}),
        ("nowhere", {"zone": "a", "disk": "ssd"}),
        ("in", {"terms": [{"key": "zone", "operator": "In", "values": ["b", "c"]}]}),
        ("not-in", {"match": {}, "terms": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}),
        ("exists", {"terms": [{"key": "disk", "operator": "Exists"}]}),
        ("preferred", {"preferred": [{"key": "disk", "operator": "Exists", "weight": 10}]}),
        ("unreadable", {"terms": [{"key": "zone", "operator": "Near", "values": ["a"]}]}),
    ):
        yield Scene(f"labels/{name}", fleet(ZONES), [demand(8, model(worker_selector=selector))], repeat=2)
    on = "1x1xA-24[cluster=2] + 1x1xA-24[cluster=1,state=NOT_READY] + 1x1xA-24[unknown] + 1x1xA-24[closed]"
    for cluster in (1, 2, 3, None):
        wanted = demand(8, model(cluster_id=cluster))
        yield Scene(f"cluster/{cluster}", fleet(on), [wanted], repeat=2, advised=True)


def _files() -> Iterator[Scene]:
    here, missing, silent = Presence.HERE, Presence.MISSING, Presence.SILENT
    local = demand(8, model(source=Source.LOCAL_PATH, local_path=PATH))
    for name, answers, shared in (
        ("one-has-it", {1: missing, 2: here}, False),
        ("none-has-it", {1: missing, 2: missing, 3: missing}, False),
        ("shared", {1: silent, 2: missing}, True),
    ):
        policy = Policy(paths={PATH: PathKnowledge(answers, shared)})
        yield Scene(f"path/{name}", fleet("3x2xA-24"), [local], policy, 2, advised=True)
    index = local.spec.source_index
    for name, files in (
        ("ready", {index: {2: 100 * GIB}}), ("by-path", {f"path:{PATH}": {3: 9 * GIB}}),
        ("on-its-way", {f"downloading:{index}": {3: 50 * GIB}}),
        ("both", {index: {1: GIB, 2: GIB}, f"downloading:{index}": {3: GIB}}),
    ):  # fmt: skip
        yield Scene(f"files/{name}", fleet("4x2xA-24"), [local], Policy(ready_files=files), 4)


def _told(text: str, **card: Any) -> Fleet:
    on = fleet(text)
    for gpu in list(on.gpu_rows.values()):
        on.put_gpu(replace(gpu, **card))
    return on


def _backends() -> Iterator[Scene]:
    cuda, rocm = {"custom_framework": "cuda"}, {"custom_framework": "rocm"}
    own = Backends.of([backend_row("Mine", None, {"1.0": cuda, "2.0": rocm}),
                       backend_row("vLLM", "anna", {"0.0.1-mine": cuda})])  # fmt: skip
    for name, text, card, columns in (
        ("new-enough", "2x1xA-24", {"runtime_version": "12.8"}, {"backend": "vLLM"}),
        ("too-old", "2x1xA-24", {"runtime_version": "11.8"}, {"backend": "vLLM"}),
        ("old-rocm", "1x1xA-24[type=rocm]", {"runtime_version": "6.4"}, {"backend": "vLLM"}),
        ("cpu", "2xcpu", {}, {"backend": "vLLM", "cpu_offloading": True}),
        ("pinned", "1x1xA-24", {"runtime_version": "12.8"}, {"backend": "vLLM", "backend_version": "0.0.0"}),
        ("own-version", "1x1xA-24 + 1x1xB-24[type=rocm]", {}, {"backend": "Mine", "backend_version": "2.0"}),
        ("of-another", "1x1xA-24", {}, {"backend": "vLLM", "backend_version": "0.0.1-mine", "owner": "bert"}),
        ("unknown", "1x1xA-24", {}, {"backend": "Nobody"}),
        ("sglang-npu", "1x1xA-64[type=cann]", {"arch_family": "910b"}, {"backend": "SGLang"}),
        ("voxbox-rocm", "1x1xA-24[type=rocm]", {}, {"backend": "VoxBox"}),
    ):  # fmt: skip
        policy = Policy(backends=own)
        yield Scene(f"backend/{name}", _told(text, **card), [demand(8, model(**columns))], policy)


def _memory() -> Iterator[Scene]:
    def held(*sizes: float) -> Callable[[Fleet], None]:
        def others(on: Fleet) -> None:
            on.set_foreign({n: int(size * GIB) for n, size in enumerate(sizes, 1) if size})

        return others

    for engine in (Engine.VLLM, Engine.CUSTOM):
        steps: list[Step] = [
            held(78.9, 60, 0, 20), demand(30, model(1), engine=engine), demand(60, model(2), engine=engine),
            held(79, 79, 79, 79), demand(30, model(1), engine=engine),
            held(0), demand(30, model(1), engine=engine),
        ]  # fmt: skip
        yield Scene(f"foreign/{engine}", fleet("1x4xA-80[reserved=1]"), steps)
    ram = "1x2xA-24[ram=6] + 1x1xM-96[uma,ram=100,reserved=2,type=mps] + 2xcpu[ram=30]"
    for need, wants in ((4, 2), (4, 10), (60, 10), (0.5, 25), (4, 60)):
        wanted = demand(need, model(cpu_offloading=True), engine=Engine.CUSTOM, ram=wants)
        yield Scene(f"ram/{need}-{wants}", fleet(ram), [wanted], repeat=4, advised=True)
    router = replace(demand(0, model(cpu_offloading=True), engine=Engine.ROUTER, ram=2))
    yield Scene("router", fleet("2x1xA-24 + 1xcpu"), [router], repeat=3)


def _settings() -> Iterator[Scene]:
    wanted = demand(20, model(1), heads=64)
    several: Demand = demand(140, model(2, distributed_inference_across_workers=True), heads=64)
    for name, policy in (
        ("no-score", Policy(placement_max=0)), ("low-score", Policy(placement_max=10, locality_max=0)),
        ("unchanged", Policy(commit_check=Check.UNCHANGED)),
        ("binpack", Policy(strategy=Strategy.BINPACK, prefer=frozenset({"prefer_mean_over_gpus"}))),
        ("dominant", Policy(strategy=Strategy.BINPACK, prefer=frozenset({"prefer_dominant_resource"}))),
    ):  # fmt: skip
        on = fleet("4x2xA6000-48 + 2x1xL4-24")
        occupy(on, "w2", [0], 20)
        occupy(on, "w3", [0, 1], 8, model=1)
        yield Scene(f"setting/{name}", on, [wanted, several], policy, 2)
