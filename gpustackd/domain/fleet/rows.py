"""Rows of workers and GPUs as read from the database. Sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """One worker; capacity and allocation as stored."""

    id: int
    name: str
    cluster_id: int | None
    state: str
    version: int = 0
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    ram_capacity: int | None = None
    """RAM total minus reserves (on unified memory minus the GPUs' reserve too); None = unknown."""
    ram_allocated: int = 0
    unified_memory: bool = False
    over_committed: bool = False
    vram_reserved: int = 0
    cpu_arch: str | None = None
    ip: str | None = None
    advertise_address: str | None = None
    ifname: str | None = None
    port: int | None = None
    """Port of the worker's file API."""
    state_message: str | None = None
    """Why it is in its state, where known."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU; capacity and allocation as stored."""

    id: int
    worker_id: int
    index: int
    type: str
    version: int = 0
    vram_total: int | None = None
    capacity: int | None = None
    """VRAM total minus the worker's reserve; None = unknown, and then nothing is placed there."""
    vram_allocated: int = 0
    open: bool = True
    """Worker READY and GPU schedulable."""
    schedulable: bool = True
    over_committed: bool = False
    vendor: str | None = None
    name: str | None = None
    uuid: str | None = None
    arch_family: str | None = None
    compute_capability: str | None = None
    runtime_version: str | None = None
    vram_used: int | None = None
    links: Mapping[str, Any] | None = None
    network: Mapping[str, Any] | None = None
