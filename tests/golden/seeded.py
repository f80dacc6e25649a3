"""Random situations by a seed, for every engine: what is recorded of them is counts and a digest.

A situation is a fleet and steps on it: decisions one after another, with what happens to a fleet between
them (instances leave, GPUs are cordoned, workers go into maintenance, others take memory). So what is kept
from one decision to the next is used, brought up to date and dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.facts import HyperParameters
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.mix import DemandShape, Mix
from gpustackd.placement.policy import Policy
from tests import fleets, gguf_models
from tests.fleets import GIB, demand, fleet, model
from tests.gguf_sizes import Toy, layered
from tests.golden.published import published
from tests.golden.scenes import FLEET_TERMS, Scene, Step
from tests.unit.placement import pools

T = TypeVar("T")

BACKENDS = {Engine.VLLM: "vLLM", Engine.SGLANG: "SGLang", Engine.CUSTOM: "Custom"}
ENGINES = (Engine.VLLM, Engine.VLLM, Engine.SGLANG, Engine.CUSTOM)


def scenes() -> Iterator[Scene]:
    """Every situation, in its order."""
    for kind, count, make in (
        ("mixed", 70, _mixed), ("burst", 40, _burst), ("picked", 50, _picked), ("gguf", 80, _gguf),
        ("gguf-picked", 40, _gguf_picked), ("gguf-header", 16, _gguf_header), ("mindie", 45, _mindie),
        ("pool", 60, _pool), ("published", 60, _published),
    ):  # fmt: skip
        for seed in range(count):
            chance = Random(f"{kind}/{seed}")
            made = make(chance)
            made.name, made.summed, made.advised = f"sum/{kind}/{seed}", True, seed % 8 == 0
            yield made


# -- what happens to a fleet between decisions ----------------------------------------------------------


def _eventful(chance: Random, demands: Sequence[Demand], count: int) -> list[Step]:
    """So many decisions on these demands as they come, and now and then something that happens."""
    steps: list[Step] = []
    for _ in range(count):
        steps.append(chance.choice(demands))
        if chance.random() < 0.35:
            steps.append(
                chance.choice(
                    (_commit, _leaves(chance), _cordon(chance), _maintain(chance), _foreign(chance))
                )
            )
    return steps


def _commit(on: Fleet) -> None:
    """What was decided so far is booked."""
    for n in list(on.occupancy.assumed):
        on.confirm(n)


def _leaves(chance: Random) -> Callable[[Fleet], None]:
    at = chance.random()

    def leave(on: Fleet) -> None:
        _commit(on)
        there = sorted(on.occupancy.by_instance)
        if not there:
            return
        n = there[int(at * len(there))]
        for b in list(on.occupancy.by_instance[n]):
            place = None if b.gpu_id is None else on.slot[b.gpu_id]
            w = on.position[b.worker_id]
            if place is not None:
                on.vram_allocated[place] -= b.vram
            on.ram_allocated[w] -= b.ram + (b.vram if on.unified[w] else 0)
        on.remove_instance(n)

    return leave


def _cordon(chance: Random) -> Callable[[Fleet], None]:
    at = chance.random()

    def cordon(on: Fleet) -> None:
        ids = sorted(on.gpu_rows)
        if not ids:
            return
        row = on.gpu_rows[ids[int(at * len(ids))]]
        now = not row.schedulable
        w = on.position[row.worker_id]
        on.put_gpu(_as_it_is(on, row, schedulable=now, open=now and on.row(w).state == "READY"))

    return cordon


def _as_it_is(on: Fleet, row: Any, **columns: Any) -> Any:
    """A row of a GPU with what is booked on it now, and other columns."""
    held = int(on.vram_allocated[on.slot[row.id]])
    return replace(row, version=row.version + 1, vram_allocated=held, **columns)


def _maintain(chance: Random) -> Callable[[Fleet], None]:
    at = chance.random()

    def maintain(on: Fleet) -> None:
        names = sorted(on.by_name)
        w = on.by_name[names[int(at * len(names))]]
        row = on.row(w)
        state = "MAINTENANCE" if row.state == "READY" else "READY"
        held = int(on.ram_allocated[w])
        on.put_worker(replace(row, version=row.version + 1, state=state, ram_allocated=held))
        for gpu in [g for g in on.gpu_rows.values() if g.worker_id == row.id]:
            on.put_gpu(_as_it_is(on, gpu, open=gpu.schedulable and state == "READY"))

    return maintain


def _foreign(chance: Random) -> Callable[[Fleet], None]:
    at = [(chance.random(), chance.choice((1, 6, 20, 70))) for _ in range(chance.randint(0, 3))]

    def others(on: Fleet) -> None:
        ids = sorted(on.gpu_rows)
        on.set_foreign({ids[int(x * len(ids))]: size * GIB for x, size in at} if ids else {})

    return others


# -- fleets and policies ----------------------------------------------------------------------------------


def _fleet(chance: Random, terms: Sequence[str] = FLEET_TERMS, most: int = 5) -> Fleet:
    on = fleet(" + ".join(chance.sample(terms, chance.randint(1, most))))
    workers = [w.name for w in on.worker_rows if w is not None]
    for n in range(chance.randint(0, 3)):
        size = chance.choice((2, 10, 30))
        fleets.occupy(
            on, chance.choice(workers), (chance.randint(0, 3),), size, instance=900 + n, model=900 + n % 2
        )
    return on


def _policy(chance: Random, **more: Any) -> Policy:
    shapes = (DemandShape(1, 12 * GIB), DemandShape(4, 0, 0.9), DemandShape(2, 20 * GIB))
    if chance.random() < 0.3:
        more["mix"] = Mix(shapes, (0.5, 0.3, 0.2))
    prefer = [p for p in ("prefer_mean_over_gpus", "prefer_dominant_resource") if chance.random() < 0.15]
    return Policy(strategy=chance.choice(list(Strategy)), prefer=frozenset(prefer), **more)


def _maybe(chance: Random, share: float, value: T) -> T | None:
    return value if chance.random() < share else None


# -- the engines ------------------------------------------------------------------------------------------


def _asking(chance: Random, n: int, **fields: Any) -> Demand:
    engine = chance.choice(ENGINES)
    flags = []
    if chance.random() < 0.3:
        name = "--mem-fraction-static" if engine is Engine.SGLANG else "--gpu-memory-utilization"
        flags.append(f"{name}={chance.choice((0.2, 0.45, 0.7, 0.95))}")
    if chance.random() < 0.2:
        flags.append(f"--tp={chance.choice((1, 2, 4, 8, 3))}")
    if chance.random() < 0.15:
        flags.append(
            f"--{'dp' if engine is Engine.SGLANG else 'pipeline-parallel-size'}={chance.choice((2, 3))}"
        )
    terms = {"terms": [{"key": "zone", "operator": chance.choice(("In", "NotIn")), "values": ["a"]}],
             "preferred": [{"key": "zone", "operator": "Exists", "weight": 3}]}  # fmt: skip
    spec = model(
        n,
        backend=BACKENDS[engine],
        backend_parameters=flags,
        image_name="registry.example/engine:1" if engine is Engine.CUSTOM else None,
        categories=chance.choice(((), ("llm",), ("llm",), ("embedding",), ("image",))),
        cluster_id=_maybe(chance, 0.2, 1),
        worker_selector=chance.choice((None, None, None, {"zone": "a"}, terms)),
        distributed_inference_across_workers=chance.random() < 0.5,
        cpu_offloading=_maybe(chance, 0.2, True),
        placement_strategy=_maybe(chance, 0.4, chance.choice(list(Strategy))),
        **fields,
    )
    return demand(
        chance.choice((0.5, 3, 9, 14, 22, 38, 60, 110, 240, 500)), spec, engine=engine,
        heads=chance.choice((None, 14, 32, 40, 64)), vocabulary=chance.choice((None, 151936)),
        ram=chance.choice((0, 0, 2, 30)),
    )  # fmt: skip


def _mixed(chance: Random) -> Scene:
    wanted = [_asking(chance, n) for n in range(1, 6)]
    return Scene("", _fleet(chance), _eventful(chance, wanted, 16), _policy(chance))


def _burst(chance: Random) -> Scene:
    """Many equal instances on equal workers: most decisions go on from the ranking before."""
    card = chance.choice(("A6000-48", "4090-24", "H100-80"))
    on = fleet(f"{chance.randint(7, 14)}x{chance.choice((1, 2, 4))}x{card}")
    strategy = chance.choice((Strategy.SPREAD, Strategy.SPREAD, *Strategy))
    small, other = (
        demand(need, model(n, placement_strategy=strategy, categories=categories), heads=32)
        for n, (need, categories) in enumerate([(6, ("embedding",)), (16, ("llm",))], 1)
    )
    steps: list[Step] = []
    for _ in range(4):
        steps += [small] * chance.randint(2, 6)
        steps += [other] * chance.randint(0, 2)
        steps += _eventful(chance, [small], 1)
    return Scene("", on, steps, Policy())


def _ids(chance: Random, types: Sequence[str] = ("cuda",)) -> list[str]:
    known = [f"w{w}:{chance.choice(types)}:{i}" for w in range(1, 5) for i in range(4)]
    return chance.sample(known, chance.randint(1, 8))


def _picked(chance: Random) -> Scene:
    wanted = []
    for n in range(1, 5):
        ids = _ids(chance, ("cuda", "cuda", "cuda", "cuda", "rocm"))
        more = {"gpu_ids": ids, "per_replica": _maybe(chance, 0.4, chance.randint(1, len(ids))),
                "allow_overcommit": chance.random() < 0.2,
                "replicas": chance.choice((None, 1, 2))}  # fmt: skip
        if chance.random() < 0.2:
            more["env"] = {"GPUSTACK_SKIP_GPU_COUNT_CHECK": "1"}
        wanted.append(_asking(chance, n, **more))
    return Scene("", _fleet(chance), _eventful(chance, wanted, 10), _policy(chance))


def _toy(chance: Random) -> Toy:
    adds = [chance.choice((0.25, 0.5, 1, 2)) for _ in range(chance.randint(2, 40))]
    if chance.random() < 0.6:
        adds = [adds[0]] * len(adds)
    return Toy(
        tuple(int(x * GIB) for x in (*adds, chance.choice((0.25, 1, 3)))), chance.choice((GIB // 4, GIB)),
        chance.choice((0, GIB // 4, 2 * GIB)), GIB // 8, GIB // 4, GIB,
    )  # fmt: skip


def _layers(chance: Random, n: int, **fields: Any) -> Demand:
    sizes = _toy(chance)
    flags = []
    if chance.random() < 0.25:
        flags.append(f"-ngl={chance.randint(0, len(sizes.adds))}")
    if chance.random() < 0.25:
        flags.append("-ts=" + ",".join(str(chance.randint(1, 4)) for _ in range(chance.randint(2, 3))))
    spec = model(
        n, source="local_path", local_path="/m/x.gguf", backend_parameters=flags,
        cpu_offloading=chance.random() < 0.6, distributed_inference_across_workers=chance.random() < 0.6,
        placement_strategy=_maybe(chance, 0.3, chance.choice(list(Strategy))), **fields,
    )  # fmt: skip
    return layered(sizes, spec, distributable=chance.random() < 0.85, image=chance.random() < 0.1)


GGUF_TERMS = (
    "2x2xA-8", "1x4xB-12", "3x1xC-24", "1x2xD-48[ram=24]", "1x1xM-64[uma,ram=90,type=mps]", "2xcpu[ram=64]",
    "1x3xE-16[type=rocm]", "1x2xF-24[closed]", "1x8xG-24", "2x1xH-48[ram=6]", "1x1xU-32[uma,ram=40]",
)  # fmt: skip


def _gguf(chance: Random) -> Scene:
    policy = _policy(chance, rpc_ram=chance.choice((GIB // 2, 2 * GIB)))
    wanted = [_layers(chance, n) for n in range(1, 5)]
    return Scene("", _fleet(chance, GGUF_TERMS), _eventful(chance, wanted, 10), policy)


def _gguf_picked(chance: Random) -> Scene:
    wanted = []
    for n in range(1, 5):
        ids = _ids(chance)[: chance.randint(1, 5)]
        per = _maybe(chance, 0.3, chance.randint(1, len(ids)))
        wanted.append(
            _layers(chance, n, gpu_ids=ids, per_replica=per, allow_overcommit=chance.random() < 0.15)
        )
    return Scene("", _fleet(chance, GGUF_TERMS[:5]), _eventful(chance, wanted, 8), _policy(chance))


SMALL_8B = gguf_models.llama(32, 4096, 32, 8, 14336)
HEADERS = (SMALL_8B, SMALL_8B, gguf_models.gemma3(48, 3840, 16, 8, 256, 15360, "q8_0"))
HEADER_FLAGS = (
    (), ("--ctx-size=8192",), ("-c", "65536"), ("--parallel=2",), ("--cache-type-k=q8_0",), ("-ngl=12",),
    ("--ubatch-size=1024",), ("--flash-attn=on",), ("--split-mode=row",), ("-ts=2,1",), ("--no-kv-offload",),
)  # fmt: skip


def _gguf_header(chance: Random) -> Scene:
    """Sized from a header, as daemons size a model."""
    wanted = []
    for n in range(1, 4):
        flags = [*chance.choice(HEADER_FLAGS), *chance.choice(HEADER_FLAGS)]
        distributed = chance.random() < 0.5
        wanted.append(
            gguf_models.demand(
                chance.choice(HEADERS), *flags, n=n, cpu_offloading=chance.random() < 0.5,
                distributed_inference_across_workers=distributed,
            )
        )  # fmt: skip
    return Scene("", _fleet(chance, GGUF_TERMS), [*wanted, _commit, *wanted], Policy())


NPU_TERMS = ("1x8x910B-64", "2x8x910B-64", "2x4x910B-64", "3x1x910B-64", "1x8x910B-32", "1x4x910B-64[closed]",
             "1x8x310P-24[state=NOT_READY]", "2x2x910B-64[zone=a]")  # fmt: skip
NPU_FLAGS = (
    (), (), ("--npu-memory-fraction=0.5",), ("-tp", "2"), ("-tp", "4"), ("--tensor-parallel-size=16",),
    ("--data-parallel-size=2",), ("-dp", "2", "-tp", "4"), ("--pipeline-parallel-size=2",), ("-tp", "3"),
    ("--moe-expert-parallel-size=4", "-tp", "4"), ("--npu-memory-fraction=2",),
)  # fmt: skip


def _mindie(chance: Random) -> Scene:
    on = fleet(" + ".join(chance.sample(NPU_TERMS, chance.randint(1, 3))), type="cann")
    for gpu in list(on.gpu_rows.values()):
        link = {"status": chance.choice(("up",) * 9 + ("down",)), "inet": f"10.1.{gpu.worker_id}.{gpu.index}"}
        on.put_gpu(replace(gpu, network=link))
    wanted = []
    for n in range(1, 5):
        more: dict[str, Any] = {}
        if chance.random() < 0.25:
            ids = _ids(chance, ("cann",))
            more = {"gpu_ids": ids, "per_replica": _maybe(chance, 0.4, chance.randint(1, len(ids)))}
        spec = model(
            n, backend="MindIE", backend_parameters=chance.choice(NPU_FLAGS),
            distributed_inference_across_workers=chance.random() < 0.6,
            worker_selector=_maybe(chance, 0.1, {"zone": "a"}),
            placement_strategy=_maybe(chance, 0.3, chance.choice(list(Strategy))), **more,
        )  # fmt: skip
        hyper = HyperParameters(
            num_attention_heads=chance.choice((32, 64, 128)), vocab_size=chance.choice((None, 151936)),
            max_sequence_length=32768,
        )  # fmt: skip
        size = chance.choice((8, 20, 50, 57, 110, 300, 650))
        wanted.append(demand(size, spec, engine=Engine.MINDIE, hyper=hyper, ram=0.5))
    return Scene("", on, _eventful(chance, wanted, 10), _policy(chance))


def _pool(chance: Random) -> Scene:
    on = fleet(" + ".join(chance.sample(("2x4xA100-80", "1x8xA100-80", "3x1xA100-80", "1x4xA100-40"), 2)))
    for gpu in list(on.gpu_rows.values()):
        on.put_gpu(replace(gpu, name=chance.choice(("NVIDIA A100", "NVIDIA A100", "NVIDIA H100"))))
    wanted = []
    for n in range(1, 5):
        make = chance.choice((pools.half, pools.partition, pools.whole, pools.asking))
        flags = [f"--tensor-parallel-size={chance.choice((2, 4))}"] if chance.random() < 0.3 else []
        more: dict[str, Any] = {"n": n, "ram": chance.choice((0, 4)), "heads": chance.choice((None, 32, 64))}
        more["distributed_inference_across_workers"] = chance.random() < 0.5
        if make is pools.asking:
            more["selector"] = {"accelerator_sliced_memory_percentage": chance.choice((25, 33, 80))}
        wanted.append(make(chance.choice((5, 18, 30, 60, 130, 300)), *flags, **more))
    node = pools.node(*(chance.choice((100, 100, 60, 20)) for _ in range(4)), profiles=chance.randint(0, 3))
    known = replace(pools.policy(devices=_maybe(chance, 0.6, node)), strategy=chance.choice(list(Strategy)))
    return Scene("", on, _eventful(chance, wanted, 10), known)


def _published(chance: Random) -> Scene:
    """Models as they are published, sized and judged as daemons do it."""
    wanted = [published(chance, n) for n in range(1, 5)]
    return Scene("", _fleet(chance), _eventful(chance, [w for w in wanted if w], 8), _policy(chance))
