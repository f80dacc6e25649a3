"""What llama.cpp allocated in measured runs, and what we say it would: `fixtures/gguf`.

`headers.json`: models by name; tensors of all layers alike in one line, with the layers they are in.
`truth.jsonl` (runs handed with the requirements) and `measured.jsonl` (runs of our own, one small model for
each architecture): flags, and bytes by device (`DEV0`, …; everything else is the host).
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
from gpustackd.domain.gguf import BY_NAME, GgufFacts, Tensor
from gpustackd.estimate.gguf.classify import categories_of
from gpustackd.estimate.gguf.shares import Division
from gpustackd.estimate.gguf.table import Table, table
from tests.specs import a_model

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

    @property
    def pipelined_dry_run(self) -> bool:
        """Several devices hold everything, without loading it. The engine's dry run then forgets where small
        tensors belong and copies one activation more to the second device than its real runs do."""
        return bool(self.flags["no_alloc"]) and self.flags["devices"] > 1

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
            tensors.append(Tensor(full, tuple(shape), of_type.id, size))
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

    def sums(names: list[str]) -> Held:
        return Held(*(sum(held[n][k] for n in names) for k in ("model", "context", "compute")))

    count = told["flags"]["devices"]
    named = [f"DEV{i}" for i in range(count)]
    return Run(
        model=told["model"],
        group=told["group"],
        flags=told["flags"],
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


def held(division: Division, devices: int) -> tuple[tuple[Held, ...], Held]:
    """What an estimate says, in the form of a run."""
    host = division.host
    return (
        tuple(Held(d.weights, d.kv_cache, d.compute) for d in division.devices[:devices]),
        Held(host.weights, host.kv_cache, host.compute),
    )
