"""Fleets and demands of the record, each under a name: cases of GPUStack, and fleets by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.errors import BadRow
from gpustackd.placement.policy import Policy
from tests import fleets, gguf_models
from tests.fleets import demand, fleet, model
from tests.gpustack_reference.cases import read_cases
from tests.gpustack_reference.production import decisions
from tests.unit.placement import pools

SEEDS, WHOLE = 60, 25
"""Random fleets in the record, and of how many every decision is in it."""


Step = Demand | Callable[[Fleet], None]
"""A decision, or what happens to the fleet between two."""


@dataclass
class Scene:
    """A fleet, and demands that are decided on it one after another; what finds a place keeps it."""

    name: str
    fleet: Fleet
    demands: Sequence[Step]
    policy: Policy = field(default_factory=Policy)
    repeat: int = 1
    """Instances of each demand, decided one after another."""
    advised: bool = False
    """Whether suggestions are asked for where there is no place."""
    sized: bool = False
    """Whether the size of each demand is recorded too."""
    summed: bool = False
    """Recorded by counts and a digest alone."""


def all_scenes() -> Iterator[Scene]:
    """Every scene of the record, in its order."""
    yield from _handed()
    for seed in range(SEEDS):
        yield _random(seed)
    yield from _engines()


def _handed() -> Iterator[Scene]:
    """Cases that say which place the whole decision finds."""
    for case in read_cases(*AREAS, own=True):
        ready = decisions.ready(case)
        try:
            wanted = decisions.demand(ready)
        except BadRow:
            continue
        yield Scene(f"case/{case['id']}", decisions.fleet(ready), [wanted], decisions.policy(ready), 2)


AREAS = ("selector.vllm", "selector.sglang", "selector.mindie", "selector.custom", "selector.vgpu")
"""Areas whose cases are whole decisions; GGUF models come with headers of their own below."""


FLEET_TERMS = (
    "2x8xH100-80", "3x4xA6000-48[zone=a]", "4x1x4090-24", "1x8xA100-40[zone=b]", "2x2xL40S-45[ram=32]",
    "1x4xA100-80[closed]", "2x4xMI300-192[type=rocm]", "1x1xGB10-96[uma]", "3xcpu", "1x8xH20-96[reserved=2]",
    "2x4xT4-16[zone=b]", "1x2xH100-80[state=NOT_READY]", "1x4x4090-24[ram_reserved=400]",
)  # fmt: skip
NEEDS = (0.5, 3, 6, 14, 20, 30, 44, 70, 100, 150, 300)


def _random(seed: int) -> Scene:
    chance = Random(seed)
    on = fleet(" + ".join(chance.sample(FLEET_TERMS, chance.randint(2, 5))))
    policy = Policy(strategy=chance.choice(list(Strategy)))
    wanted = [_demand(chance, n) for n in range(1, 6)]
    return Scene(f"seed/{seed}", on, wanted, policy, chance.randint(1, 6), summed=seed >= WHOLE)


def _demand(chance: Random, n: int) -> Demand:
    fields: dict[str, Any] = {}
    flags: list[str] = []
    engine = chance.choice((Engine.VLLM, Engine.VLLM, Engine.SGLANG, Engine.CUSTOM))
    if chance.random() < 0.3:
        share = {Engine.SGLANG: "--mem-fraction-static"}.get(engine, "--gpu-memory-utilization")
        flags.append(f"{share}={chance.choice((0.3, 0.5, 0.8))}")
    if chance.random() < 0.25:
        flags.append(f"--tensor-parallel-size={chance.choice((1, 2, 4, 8, 3))}")
    if chance.random() < 0.2:
        fields["worker_selector"] = {"zone": chance.choice("ab")}
    if chance.random() < 0.3:
        fields["distributed_inference_across_workers"] = True
    if chance.random() < 0.2:
        fields["cpu_offloading"] = True
    if chance.random() < 0.15:
        fields["gpu_ids"] = [f"w{chance.randint(1, 3)}:cuda:{k}" for k in range(chance.randint(1, 4))]
    if chance.random() < 0.4:
        fields["placement_strategy"] = chance.choice(list(Strategy))
    if engine is Engine.CUSTOM:
        fields["image_name"] = "registry.example/engine:1"
    backend = {Engine.VLLM: "vLLM", Engine.SGLANG: "SGLang", Engine.CUSTOM: "Custom"}[engine]
    spec = model(n, backend=backend, backend_parameters=flags, **fields)
    return demand(
        chance.choice(NEEDS), spec, engine=engine, heads=chance.choice((32, 64, 40)), vocabulary=151936,
        ram=chance.choice((0, 0, 4, 40)),
    )  # fmt: skip


def _engines() -> Iterator[Scene]:
    """Engines with a search of their own, and sizes that lie at an edge."""
    small = gguf_models.llama(32, 4096, 32, 8, 14336)
    large = gguf_models.llama(80, 8192, 64, 8, 28672)
    gemma = gguf_models.gemma3(48, 3840, 16, 8, 256, 15360, "q8_0")
    for name, text, wanted in (
        ("one-gpu", "2x2x4090-24", [gguf_models.demand(small)]),
        ("several-gpus", "1x8x4090-24 + 1x4xA6000-48", [gguf_models.demand(large)]),
        ("over-workers", "6x1xA6000-48", [
            gguf_models.demand(large, distributed_inference_across_workers=True, cpu_offloading=False)]),
        ("some-layers", "2x1x4090-24", [gguf_models.demand(large, cpu_offloading=True)]),
        ("picked", "2x4xA6000-48", [gguf_models.demand(gemma, gpu_ids=["w2:cuda:0", "w2:cuda:3"])]),
        ("split", "1x4xA6000-48", [gguf_models.demand(large, "--tensor-split=3,1")]),
        ("layers", "1x2x4090-24", [gguf_models.demand(large, "--gpu-layers=20", cpu_offloading=True)]),
        ("no-place", "2x1xT4-16[ram=16]", [gguf_models.demand(large)]),
        ("cpu", "2xcpu", [gguf_models.demand(small, "--gpu-layers=0", cpu_offloading=True)]),
    ):  # fmt: skip
        yield Scene(f"gguf/{name}", fleet(text), wanted, repeat=3)
    for name, asked in (
        ("half", pools.half(20)), ("partition", pools.partition(20)), ("whole", pools.whole(150)),
        ("too-large", pools.half(60)),
    ):  # fmt: skip
        for inventory, devices in (("known", pools.node(100, 100, 50)), ("unreadable", None)):
            on = fleet("2x4xA100-80[cluster=1]")
            for gpu in list(on.gpu_rows.values()):
                on.put_gpu(replace(gpu, name="NVIDIA A100 80GB"))
            yield Scene(f"pool/{name}/{inventory}", on, [asked], pools.policy(devices=devices), 3)
    for strategy in Strategy:
        yield Scene(
            f"strategy/{strategy.value}", fleet("4x8xH100-80 + 4x4xL40S-45"),
            [demand(14, model(1, placement_strategy=strategy), heads=32),
             demand(140, model(2, placement_strategy=strategy), heads=64)], repeat=8,
        )  # fmt: skip
    on = fleet("1x4xA6000-48 + 2x2x4090-24")
    fleets.occupy(on, "w1", (0, 1), 30, instance=900)
    fleets.occupy(on, "w2", (0,), 20, instance=901, model=901)
    yield Scene("refused/occupied", on, [
        demand(80, model(1, backend_parameters=("--tensor-parallel-size=2",)), heads=64),
        demand(60, model(2), heads=64),
        demand(40, model(3, gpu_ids=["w1:cuda:0"]), heads=64),
        demand(40, model(4, gpu_ids=["w9:cuda:0"]), heads=64),
        demand(10, model(5, worker_selector={"zone": "z"}), heads=64),
        demand(10, model(6, cluster_id=7), heads=64),
        demand(None, model(7), heads=64),
        demand(10, model(8, backend_parameters=("--tensor-parallel-size=0",)), heads=64),
        demand(10, model(9, backend_parameters=("--tensor-parallel-size=3",)), heads=64),
        demand(10, model(10), heads=64, ram=4000),
    ])  # fmt: skip
