"""What llama.cpp allocated in measured runs, and what we say it would: `fixtures/gguf`.

`headers.json`: models by name; tensors of all layers alike in one line, with the layers they are in.
`truth.jsonl` (runs handed with the requirements) and `measured.jsonl` (runs of our own with the same engine,
of headers with random weights or none: published shapes, and for the other architectures a tiny one each):
flags, and bytes by device (`DEV0`, …; everything else is the host).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import BY_NAME, GgufFacts, GgufTensor
from gpustackd.estimate.llama_cpp.classify import categories_of
from gpustackd.estimate.llama_cpp.division import Division
from gpustackd.estimate.llama_cpp.table import Table, table
from tests.specs import a_model

HEADERS = {"truth.jsonl": "headers.json", "measured.jsonl": "measured_headers.json"}
"""The models of each file of runs."""
ORDINARY: Mapping[str, Any] = {
    "n_ctx": 4096, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "type_k": "f16", "type_v": "f16",
    "flash_attn": "on", "n_gpu_layers": 999, "mmap": 0, "cpu_repack": 0, "swa_full": 0, "kv_unified": 0,
    "offload_kqv": 1, "embeddings": 0, "no_alloc": 1, "n_outputs_max": 0, "devices": 1,
}  # fmt: skip
"""Flags of runs of our own that do not say otherwise."""
FIXTURES = Path(__file__).parent / "fixtures" / "gguf"


class Held(NamedTuple):
    """Bytes of one device or of the host."""

    weights: int
    kv_cache: int
    compute: int

    @property
    def total(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Run:
    """One run: a model, its flags, what it held or why it did not start."""

    model: str
    group: str
    flags: Mapping[str, Any]
    devices: tuple[Held, ...]
    host: Held
    error: str

    @property
    def total(self) -> int:
        return sum(held.total for held in (*self.devices, self.host))

    def __str__(self) -> str:
        told = " ".join(f"{k}={v}" for k, v in self.flags.items() if v not in {0, "0"})
        return f"{self.model} {self.group} {told}"


@lru_cache(maxsize=4)
def headers(name: str = "headers.json") -> Mapping[str, GgufFacts]:
    """Header facts by model."""
    found = json.loads((FIXTURES / name).read_text())
    return {model: facts_of(told) for model, told in found.items()}


def facts_of(told: Mapping[str, Any]) -> GgufFacts:
    """Facts of one model of the fixture, its tensors unfolded."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in told["values"].items()}
    tensors = []
    for name, shape, kind, *where in told["tensors"]:
        for layer in _layers(where[0]) if where else (None,):
            of_type = BY_NAME[kind.lower()]
            full = name if layer is None else name.replace("*", str(layer), 1)
            size = of_type.bytes_of(math.prod(shape))
            tensors.append(GgufTensor(full, tuple(shape), of_type.id, size))
    return GgufFacts(
        architecture=str(values["general.architecture"]),
        kind=str(values.get("general.type", "model")),
        values=MappingProxyType(values),
        lengths=MappingProxyType(told["lengths"]),
        tensors=tuple(tensors),
        file_bytes=told["file_bytes"],
        data_bytes=told["data_bytes"],
    )


def _layers(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@lru_cache(maxsize=4)
def runs(name: str = "truth.jsonl") -> tuple[Run, ...]:
    """All measured runs."""
    return tuple(_run(json.loads(line)) for line in (FIXTURES / name).read_text().splitlines())


def _run(told: Mapping[str, Any]) -> Run:
    held = told.get("bytes", {})
    flags = MappingProxyType(ORDINARY | told["flags"])

    def sums(names: list[str]) -> Held:
        return Held(*(sum(held[n][k] for n in names) for k in ("model", "context", "compute")))

    count = flags["devices"]
    named = [f"DEV{i}" for i in range(count)]
    return Run(
        model=told["model"],
        group=told["group"],
        flags=flags,
        devices=tuple(sums([n]) if n in held else Held(0, 0, 0) for n in named),
        host=sums([n for n in held if n not in named]),
        error=told.get("error", ""),
    )


def parameters(flags: Mapping[str, Any]) -> list[str]:
    """The flags of a run as llama-server takes them."""
    found = [
        f"--ctx-size={flags['n_ctx']}",
        f"--batch-size={flags['n_batch']}",
        f"--ubatch-size={flags['n_ubatch']}",
        f"--parallel={flags['n_seq_max']}",
        f"--cache-type-k={flags['type_k']}",
        f"--cache-type-v={flags['type_v']}",
        f"--flash-attn={flags['flash_attn']}",
        f"--gpu-layers={flags['n_gpu_layers']}",
        "--kv-unified" if flags["kv_unified"] else "--no-kv-unified",
    ]
    switches = {"swa_full": "--swa-full", "embeddings": "--embeddings"}
    found += [switch for key, switch in switches.items() if flags[key]]
    switches = {"offload_kqv": "--no-kv-offload", "mmap": "--no-mmap", "cpu_repack": "--no-repack"}
    return found + [switch for key, switch in switches.items() if not flags[key]]


def estimated(header: GgufFacts, flags: Mapping[str, Any]) -> Table:
    """What we say of a model under the flags of a run."""
    spec = a_model(source="local_path", local_path="/models/m.gguf", backend_parameters=parameters(flags))
    facts = ModelFacts(weight_bytes=header.file_bytes, gguf=header, categories=categories_of(header))
    split = str(flags["ts"]).replace("/", ",") if flags.get("ts") else None
    return table(spec, facts, devices=flags["devices"] or None, split=split, rows=flags["n_outputs_max"])


@dataclass(frozen=True)
class Error:
    """How far an estimate was from a run, as shares of what there was: of all devices and the host together,
    and of each of them."""

    run: Run
    architecture: str
    total: float
    devices: tuple[float, ...]
    exact: bool
    """Every buffer to the byte."""
    memory_exact: bool
    """Weights and caches are."""

    @property
    def group(self) -> str:
        return self.run.group


@lru_cache(maxsize=4)
def errors_of(name: str) -> tuple[Error, ...]:
    """Errors over all runs of a file that started."""
    known = headers(HEADERS[name])
    return tuple(error(run, known[run.model]) for run in runs(name) if not run.error)


def error(run: Run, header: GgufFacts) -> Error:
    """Estimate under the flags of a run, and compare."""
    level = estimated(header, run.flags).chosen
    assert level is not None, f"{run}: refused"
    devices, host = held(level, len(run.devices))
    ours, theirs = (*devices, host), (*run.devices, run.host)
    return Error(
        run=run,
        architecture=header.architecture,
        total=sum(h.total for h in ours) / run.total - 1,
        devices=tuple(a.total / b.total - 1 for a, b in zip(ours, theirs, strict=True) if b.total),
        exact=ours == theirs,
        memory_exact=all(a[:2] == b[:2] for a, b in zip(ours, theirs, strict=True)),
    )


def held(division: Division, devices: int) -> tuple[tuple[Held, ...], Held]:
    """What an estimate says, in the form of a run."""
    host = division.host
    return (
        tuple(Held(d.weights, d.kv_cache, d.compute) for d in division.devices[:devices]),
        Held(host.weights, host.kv_cache, host.compute),
    )
