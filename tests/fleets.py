"""The fixture language: a fleet in one line of text, and the models that are put on it.

    fleet("2x8xH100-80 + 4x4xA6000-48[zone=a] + 1x1x4090-24[state=NOT_READY] + 1xcpu")

A term is `workers x GPUs x name-GiB`, or `workers x cpu`; numbers are GiB. Options in brackets:
`type=rocm`, `state=…`, `cluster=2`, `ram=512`, `reserved=1` (VRAM per GPU), `ram_reserved=2`, `uma`,
`name=w` (prefix of worker names), `closed`, `unknown` (VRAM); any other `key=value` is a label. Workers
are called w1, w2, … and have ids 1, 2, …; GPU ids run from 1 too, in the order of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpustackd.domain.bookings import Booking
from gpustackd.domain.demand import Demand, Engine, Need
from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import GpuId, GpuSelector, ModelSpec
from gpustackd.domain.outcome import NoFit, Outcome, Placed, Placement
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject

GIB = 1024**3

_TERM = re.compile(
    r"(?P<workers>\d+)x(?:(?P<cpu>cpu)|(?P<gpus>\d+)x(?P<name>[^-\[\s]+)-(?P<size>[\d.]+))(?:\[(?P<options>[^\]]*)\])?\Z"
)


def rows(text: str, **common: Any) -> tuple[list[WorkerRow], list[GpuRow]]:
    """Workers and GPUs that a text describes; `common` are options of every term."""
    workers: list[WorkerRow] = []
    gpus: list[GpuRow] = []
    for term in (t.strip() for t in text.split("+")):
        found = _TERM.match(term)
        if found is None:
            raise ValueError(f"{term!r} is no term of a fleet")
        options = {**common, **_options(found["options"] or "")}
        for _ in range(int(found["workers"])):
            _worker(found, dict(options), workers, gpus)
    return workers, gpus


def _options(text: str) -> dict[str, Any]:
    pairs = (o.partition("=") for o in text.split(",") if o.strip())
    return {k.strip(): v.strip() if eq else True for k, eq, v in pairs}


def _worker(term: re.Match[str], o: dict[str, Any], workers: list[WorkerRow], gpus: list[GpuRow]) -> None:
    n = len(workers) + 1
    state, closed, unknown = o.pop("state", "READY"), o.pop("closed", False), o.pop("unknown", False)
    reserved = int(float(o.pop("reserved", 0)) * GIB)
    uma, kind = bool(o.pop("uma", False)), o.pop("type", "cuda")
    ram = float(o.pop("ram", 512)) * GIB - float(o.pop("ram_reserved", 0)) * GIB - (reserved if uma else 0)
    row = WorkerRow(
        id=n,
        name=f"{o.pop('name', 'w')}{n}",
        cluster_id=int(o.pop("cluster", 1)),
        state=state,
        ram_capacity=int(ram),
        unified_memory=uma,
        vram_reserved=reserved,
        ip=f"10.0.{n // 256}.{n % 256}",
        labels={k: str(v) for k, v in o.items()},
    )
    workers.append(row)
    for index in range(0 if term["cpu"] else int(term["gpus"])):
        total = None if unknown else int(float(term["size"]) * GIB)
        gpus.append(
            GpuRow(
                id=len(gpus) + 1, worker_id=n, index=index, type=kind, vram_total=total,
                capacity=None if total is None else max(0, total - reserved),
                open=state == "READY" and not closed, schedulable=not closed, name=term["name"],
                vendor={"cuda": "nvidia", "rocm": "amd", "cann": "ascend"}.get(kind),
            )
        )  # fmt: skip


def fleet(text: str, **common: Any) -> Fleet:
    """The fleet that a text describes, empty."""
    made = Fleet()
    workers, gpus = rows(text, **common)
    for w in workers:
        made.put_worker(w)
    for g in gpus:
        made.put_gpu(g)
    return made


def model(n: int = 1, *, gpu_ids: Sequence[str] = (), per_replica: int | None = None,
          allow_overcommit: bool = False, **fields: Any) -> ModelSpec:  # fmt: skip
    """A model; `gpu_ids` as people write them."""
    if gpu_ids:
        fields["gpu_selector"] = GpuSelector(
            tuple(GpuId.parse(g) for g in gpu_ids), per_replica, allow_overcommit
        )
    fields["backend_parameters"] = tuple(fields.get("backend_parameters", ()))
    return ModelSpec(id=n, version=fields.pop("version", 1), name=fields.pop("name", f"model-{n}"), **fields)


def demand(
    need: float | None,
    spec: ModelSpec | None = None,
    *,
    engine: Engine = Engine.VLLM,
    heads: int | None = None,
    vocabulary: int | None = None,
    ram: float = 0,
    ram_ratio: float | None = None,
    hyper: HyperParameters | None = None,
    **fields: Any,
) -> Demand:
    """What a model of `need` GiB asks for. `ram` GiB is both checked and booked."""
    spec = spec or model(**fields)
    hyper = hyper or HyperParameters(num_attention_heads=heads, vocab_size=vocabulary)
    claim = int(ram * GIB)
    return Demand(
        spec,
        ModelFacts(None, hyper=hyper, categories=spec.categories or ("llm",)),
        Need(None if need is None else int(need * GIB), claim, claim or None, ram_ratio),
        engine,
        f"{need}",
    )


def place(
    on: Fleet, wanted: Demand, name: str = "x-1", n: int = 1, policy: Policy | None = None, **more: Any
) -> Placement:
    """Decide, expect a place, and let it count as a committed one."""
    outcome = ask(on, wanted, name, n, policy, **more)
    assert isinstance(outcome, Placed), outcome.message
    on.assume(outcome.placement, n, wanted.spec.id)
    on.confirm(n)
    return outcome.placement


def ask(
    on: Fleet, wanted: Demand, name: str = "x-1", n: int = 1, policy: Policy | None = None, **more: Any
) -> Outcome:
    """Decide and leave the fleet as it is."""
    return decide(on, wanted, Subject(n, name), policy or Policy(), **more)


def refused(on: Fleet, wanted: Demand, **more: Any) -> NoFit:
    """Decide and expect a refusal."""
    outcome = ask(on, wanted, **more)
    assert isinstance(outcome, NoFit), outcome
    return outcome


def positions(on: Fleet) -> Ints:
    """Positions of the workers that are there, by their ids."""
    live = np.flatnonzero(on.alive[: on.count])
    return live[np.argsort(on.worker_id[live], kind="stable")]


def seats(placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """(worker name, GPU indexes) of every part."""
    return [(p.worker_name, p.gpu_indexes) for p in placement.parts]


def occupy(
    on: Fleet,
    worker: str,
    indexes: Sequence[int],
    gib: float,
    *,
    instance: int = 900,
    model: int = 900,
    ram: float = 0,
    backend: str = "",
) -> None:
    """Let an instance of another model hold `gib` on each of these cards of a worker."""
    w = on.by_name[worker]
    row = on.row(w)
    size = int(gib * GIB)
    for gpu in list(_gpus(on, w)):
        if gpu.index in indexes:
            place = on.slot[gpu.id]
            on.vram_allocated[place] += size
            on.add_booking(Booking(instance, model, row.id, gpu.id, size, 0, backend=backend))
            if row.unified_memory:
                on.ram_allocated[w] += size
    if ram or not indexes:
        on.ram_allocated[w] += int(ram * GIB)
        on.add_booking(
            Booking(instance, model, row.id, None, 0, int(ram * GIB), occupies=not indexes, backend=backend)
        )
    on.touch(w)


def _gpus(on: Fleet, w: int) -> Iterator[GpuRow]:
    for gpu_id in on.gpu_id[w].tolist():
        if gpu_id:
            yield on.gpu_rows[gpu_id]
