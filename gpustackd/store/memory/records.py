"""Rows in memory, and what the CHECK constraints and capacity triggers of the schema say of one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

from gpustackd.domain.lifecycle import PLACED, WAITING, InstanceState, WorkerState
from gpustackd.errors import Refused

UNVERSIONED = frozenset(
    {"replicas", "scaling_schedule", "restart_on_error", "meta", "distributable", "created_at", "updated_at"}
)
"""Columns of a model whose change does not raise its version: no decision looks at them."""

PLACEMENT_COLUMNS = (
    "worker_id", "worker_name", "worker_ip", "worker_advertise_address", "worker_ifname", "gpu_type",
    "gpu_indexes", "gpu_addresses", "computed_resource_claim", "distributed_servers", "scheduled_at",
)  # fmt: skip
"""Columns of an instance that say where it is placed."""


@dataclass(slots=True)
class WorkerRecord:
    """A row of `workers`. Sizes in bytes."""

    id: int
    name: str
    cluster_id: int | None = None
    state: str = "NOT_READY"
    labels: Mapping[str, str] | None = None
    ram_total: int | None = None
    ram_reserved: int = 0
    vram_reserved: int = 0
    unified_memory: bool = False
    cpu_arch: str | None = None
    ip: str | None = None
    ifname: str | None = None
    advertise_address: str | None = None
    port: int | None = None
    heartbeat_at: datetime | None = None
    ram_allocated: int = 0
    over_committed: bool = False
    version: int = 0
    changed: int = 0
    """Number of the last change, over workers and GPUs."""

    @property
    def allocated(self) -> int:
        """What claims take of the capacity."""
        return self.ram_allocated

    @allocated.setter
    def allocated(self, size: int) -> None:
        self.ram_allocated = size

    @property
    def capacity(self) -> int | None:
        """RAM that claims may fill; on unified memory less the GPU's reserve too. None = unknown."""
        if self.ram_total is None:
            return None
        reserves = self.ram_reserved + (self.vram_reserved if self.unified_memory else 0)
        return max(self.ram_total - reserves, 0)


@dataclass(slots=True)
class GpuRecord:
    """A row of `gpu_devices`. Sizes in bytes."""

    id: int
    host: WorkerRecord
    index: int
    type: str
    vendor: str | None = None
    name: str | None = None
    uuid: str | None = None
    arch_family: str | None = None
    compute_capability: str | None = None
    runtime_version: str | None = None
    vram_total: int | None = None
    vram_used: int | None = None
    vram_used_at: datetime | None = None
    links: Mapping[str, Any] | None = None
    network: Mapping[str, Any] | None = None
    schedulable: bool = True
    vram_allocated: int = 0
    over_committed: bool = False
    version: int = 0
    changed: int = 0
    """Number of the last change, over workers and GPUs."""

    @property
    def allocated(self) -> int:
        """What claims take of the capacity."""
        return self.vram_allocated

    @allocated.setter
    def allocated(self, size: int) -> None:
        self.vram_allocated = size

    @property
    def capacity(self) -> int | None:
        """Total less the worker's reserve; None = unknown."""
        return None if self.vram_total is None else max(self.vram_total - self.host.vram_reserved, 0)

    @property
    def open(self) -> bool:
        """Whether placements may use it."""
        return self.schedulable and self.host.state == WorkerState.READY


@dataclass(slots=True)
class ModelRow:
    """A row of `models`: `columns` as in the table."""

    id: int
    name: str
    columns: dict[str, Any] = field(default_factory=dict)
    version: int = 0

    @property
    def priority(self) -> int:
        """Priority of its instances that name none."""
        return int(self.columns.get("priority") or 0)


@dataclass(slots=True)
class InstanceRecord:
    """A row of `model_instances`. Times in seconds of the store's clock."""

    id: int
    name: str
    model_id: int
    created_at: float
    state: InstanceState = InstanceState.PENDING
    state_message: str | None = None
    reasons: list[dict[str, Any]] | None = None
    priority: int | None = None
    role: str | None = None
    group_id: str | None = None
    draining_since: float | None = None
    worker_id: int | None = None
    worker_name: str | None = None
    worker_ip: str | None = None
    worker_advertise_address: str | None = None
    worker_ifname: str | None = None
    gpu_type: str | None = None
    gpu_indexes: list[int] | None = None
    gpu_addresses: list[str] | None = None
    computed_resource_claim: dict[str, Any] | None = None
    distributed_servers: dict[str, Any] | None = None
    scheduled_at: float | None = None
    placement_epoch: int = 0
    attempts: int = 0
    next_attempt_at: float | None = None
    lease_owner: UUID | None = None
    lease_until: float | None = None

    def clear_placement(self) -> None:
        """Clear the placement."""
        for name in PLACEMENT_COLUMNS:
            setattr(self, name, None)


def check_instance(row: InstanceRecord) -> None:
    """Raise Refused where the state of an instance and what it holds disagree."""
    held = row.worker_id is not None, row.computed_resource_claim is not None
    if row.state in WAITING and (any(held) or row.gpu_indexes is not None):
        raise Refused(f"an instance in {row.state} holds nothing")
    if row.state in PLACED and not all(held):
        raise Refused(f"an instance in {row.state} holds a placement")
    if row.state == InstanceState.ERROR and held[0] != held[1]:
        raise Refused("an instance in ERROR holds a whole placement or none")
    if (row.state == InstanceState.ANALYZING) != (row.lease_owner is not None):
        raise Refused("an instance has a lease while it is ANALYZING, and only then")


def mark_over_commit(row: WorkerRecord | GpuRecord, *, shrank: bool) -> None:
    """Set or remove the over-commit mark.

    A row is marked where its capacity fell below the allocation (`shrank`), until the allocation fits again.
    Raises Refused where anything else would allocate too much.
    """
    if row.allocated == 0 or (row.capacity is not None and row.allocated <= row.capacity):
        row.over_committed = False
    elif shrank:
        row.over_committed = True
    elif not row.over_committed:
        raise Refused(f"{row.allocated} bytes do not fit into {row.capacity}")


def is_less(now: int | None, before: int | None) -> bool:
    """Whether a capacity shrank or became unknown."""
    return now is None or (before is not None and now < before)
