"""One part of a possible placement, and how parts become a placement with all that a commit needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow
from gpustackd.domain.outcome import Check, Part, Placement, Reason
from gpustackd.placement.rules.resource_rules import ResourceRules

NO_ADDRESS = "-.-.-.-"
"""Stands for an NPU without an address in the network of NPUs."""


@dataclass(frozen=True, slots=True)
class Offload:
    """How many layers of a model run on GPUs, and how they are divided (GGUF)."""

    layers: int
    total: int
    split: tuple[int, ...] | None = None
    """Shares of the devices, remote ones first; None for one device or none."""


@dataclass(frozen=True, slots=True)
class GpuAllocation:
    """GPU slots of one worker position and the VRAM booked on each; no slots = CPU only."""

    position: int
    slots: tuple[int, ...] = ()
    claims: tuple[int, ...] = ()
    of: int | None = None
    """GPUs of that type that were considered on the worker, where that is told."""
    ram: int | None = None
    """RAM booked, where it does not follow from the VRAM."""
    layers: int | None = None
    """Layers that a subordinate part runs."""
    offload: Offload | None = None
    """Of the whole placement; on the main worker's allocation only."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A place that was found: main worker first."""

    allocations: tuple[GpuAllocation, ...]
    kind: str
    """Kind of the selector that found it."""
    score: float = 0.0
    scores: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    over_commit: bool = False
    warnings: tuple[Reason, ...] = ()
    also: tuple[Mapping[str, object], ...] = ()
    """The best five, this one first, as JSON-ready maps."""


def part(fleet: Fleet, rules: ResourceRules, allocation: GpuAllocation) -> Part:
    """The part of a placement that takes these GPUs; versions are those the decision saw."""
    row = fleet.row(allocation.position)
    w = allocation.position
    booked = sum(allocation.claims)
    places = [(w, s) for s in allocation.slots]
    gpu_ids = tuple(int(fleet.gpu_id[p]) for p in places)
    return Part(
        worker_id=row.id,
        worker_name=row.name,
        gpu_type=fleet.types[int(fleet.gpu_type[places[0]])] if places else None,
        gpu_ids=gpu_ids,
        gpu_indexes=tuple(int(fleet.gpu_index[p]) for p in places),
        gpu_versions=tuple(int(fleet.gpu_version[p]) for p in places),
        vram=allocation.claims,
        ram=rules.ram_claim(booked) if allocation.ram is None else allocation.ram,
        worker_version=int(fleet.worker_version[w]),
        unified=bool(fleet.unified[w]),
        total_gpus=allocation.of,
        gpu_addresses=npu_addresses(fleet, gpu_ids) if rules.addresses else (),
        worker_ip=row.ip,
        worker_advertise_address=row.advertise_address,
        worker_ifname=row.ifname,
        offload_layers=allocation.layers,
    )


def placement(fleet: Fleet, rules: ResourceRules, choice: Candidate, check: Check) -> Placement:
    """Everything that the commit books, in bytes."""
    parts = tuple(part(fleet, rules, s) for s in choice.allocations)
    share = rules.memory_fraction(parts[0].gpu_type or "")
    offload = choice.allocations[0].offload
    return Placement(
        parts=parts,
        check=Check.UNCHANGED if choice.over_commit or rules.unchanged else check,
        vram_utilization=share if share > 0 and parts[0].gpu_ids else None,
        offload_layers=offload.layers if offload else None,
        total_layers=offload.total if offload else None,
        tensor_split=offload.split if offload else None,
        sized_for=rules.gguf.sized_for if rules.gguf else None,
        over_commit=choice.over_commit,
        mode=rules.mode if len(parts) > 1 else None,
        strategy=choice.kind,
        score=choice.score,
        score_parts=choice.scores,
        warnings=choice.warnings,
    )


def npu_address(gpu: GpuRow) -> str | None:
    """Address of an NPU in the network of NPUs; None where its link is not up."""
    net = gpu.network or {}
    inet = net.get("inet")
    if net.get("status") != "up" or not isinstance(inet, str) or not inet.strip():
        return None
    return inet.split("/")[0].strip()


def npu_addresses(fleet: Fleet, gpu_ids: Sequence[int]) -> tuple[str, ...]:
    """Addresses in the order of the ids, a placeholder where there is none."""
    return tuple(npu_address(fleet.gpu_rows[g]) or NO_ADDRESS for g in gpu_ids)
