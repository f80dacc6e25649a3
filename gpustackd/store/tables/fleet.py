"""Clusters, workers and their GPUs. Capacity and allocation are on the row they guard."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, UniqueConstraint, text
from sqlmodel import Field, SQLModel

from gpustackd.domain.lifecycle import WorkerState
from gpustackd.store.tables import columns as c

CURRENT_TRANSACTION = "((pg_current_xact_id())::text)::bigint"


def _changed_in() -> Any:
    """Transaction that last changed what decisions look at; replicas read rows changed since a snapshot."""
    return Column("changed_in", BigInteger, nullable=False, server_default=text(CURRENT_TRANSACTION))


class Cluster(SQLModel, table=True):
    """A set of workers to which a model can be restricted."""

    __tablename__ = "clusters"

    id: int | None = Field(default=None, sa_column=c.key())
    name: str = Field(sa_column=c.words("name", nullable=False))
    topology: Any = Field(default=None, sa_column=c.data("topology"))
    devices: Any = Field(default=None, sa_column=c.data("devices"))
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (UniqueConstraint("name", name="clusters_name_key"),)


class Worker(SQLModel, table=True):
    """A machine. On unified memory `ram_allocated` counts RAM and VRAM claims, since there is one pool."""

    __tablename__ = "workers"

    id: int | None = Field(default=None, sa_column=c.key())
    cluster_id: int | None = Field(
        default=None, sa_column=c.reference("cluster_id", "clusters.id", on_delete="RESTRICT", nullable=True)
    )
    name: str = Field(sa_column=c.words("name", nullable=False))
    state: str = Field(default="NOT_READY", sa_column=c.words("state", nullable=False, default="NOT_READY"))
    state_message: str | None = Field(default=None, sa_column=c.words("state_message"))
    hostname: str | None = Field(default=None, sa_column=c.words("hostname"))
    ip: str | None = Field(default=None, sa_column=c.words("ip"))
    ifname: str | None = Field(default=None, sa_column=c.words("ifname"))
    advertise_address: str | None = Field(default=None, sa_column=c.words("advertise_address"))
    port: int | None = Field(default=None, sa_column=c.size("port"))
    labels: Any = Field(default=None, sa_column=c.data("labels"))
    ram_total: int | None = Field(default=None, sa_column=c.size("ram_total"))
    ram_reserved: int = Field(default=0, sa_column=c.size("ram_reserved", default=0, nullable=False))
    vram_reserved: int = Field(default=0, sa_column=c.size("vram_reserved", default=0, nullable=False))
    unified_memory: bool = Field(default=False, sa_column=c.flag("unified_memory", default=False))
    cpu_arch: str | None = Field(default=None, sa_column=c.words("cpu_arch"))
    service_port_range: str | None = Field(default=None, sa_column=c.words("service_port_range"))
    heartbeat_at: datetime | None = Field(default=None, sa_column=c.moment("heartbeat_at"))
    maintenance: Any = Field(default=None, sa_column=c.data("maintenance"))
    """`{"drain": true, "deadline": "2026-01-31T02:00:00Z"}`: what MAINTENANCE means for its instances."""
    state_since: datetime | None = Field(default=None, sa_column=c.moment("state_since"))
    stale_since: datetime | None = Field(default=None, sa_column=c.moment("stale_since"))
    """Set where the daemon wrote NOT_READY for a missing heartbeat; the next heartbeat reverts that."""
    lost_at: datetime | None = Field(default=None, sa_column=c.moment("lost_at"))
    """When its instances were placed elsewhere."""
    ram_capacity: int | None = Field(default=None, sa_column=c.size("ram_capacity"))
    ram_allocated: int = Field(default=0, sa_column=c.size("ram_allocated", default=0, nullable=False))
    over_committed: bool = Field(default=False, sa_column=c.flag("over_committed", default=False))
    version: int = Field(default=0, sa_column=c.size("version", default=0, nullable=False))
    changed_in: int = Field(default=0, sa_column=_changed_in())
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (
        UniqueConstraint("name", name="workers_name_key"),
        c.one_of("workers_state_known", "state", list(WorkerState)),
        c.not_negative(
            "workers_sizes_not_negative", "ram_total", "ram_reserved", "vram_reserved", "ram_allocated"
        ),
        CheckConstraint("jsonb_typeof(labels) = 'object'", name="workers_labels_are_a_map"),
        CheckConstraint("port BETWEEN 1 AND 65535", name="workers_port_valid"),
        CheckConstraint(
            "over_committed OR ram_allocated = 0"
            " OR (ram_capacity IS NOT NULL AND ram_allocated <= ram_capacity)",
            name="workers_ram_fits",
        ),
        Index("workers_changed_in_idx", "changed_in"),
        Index("workers_cluster_id_idx", "cluster_id"),
        {"postgresql_with": {"fillfactor": "50"}},
    )


class GpuDevice(SQLModel, table=True):
    """A GPU. `capacity` = total minus the worker's reserve; `open` = worker READY and GPU schedulable.
    Triggers maintain both from the row's own copies of its worker's columns."""

    __tablename__ = "gpu_devices"

    id: int | None = Field(default=None, sa_column=c.key())
    worker_id: int = Field(sa_column=c.reference("worker_id", "workers.id", on_delete="CASCADE"))
    index: int = Field(sa_column=c.size("index", nullable=False))
    type: str = Field(sa_column=c.words("type", nullable=False))
    vendor: str | None = Field(default=None, sa_column=c.words("vendor"))
    name: str | None = Field(default=None, sa_column=c.words("name"))
    uuid: str | None = Field(default=None, sa_column=c.words("uuid"))
    arch_family: str | None = Field(default=None, sa_column=c.words("arch_family"))
    compute_capability: str | None = Field(default=None, sa_column=c.words("compute_capability"))
    runtime_version: str | None = Field(default=None, sa_column=c.words("runtime_version"))
    vram_total: int | None = Field(default=None, sa_column=c.size("vram_total"))
    vram_used: int | None = Field(default=None, sa_column=c.size("vram_used"))
    vram_used_at: datetime | None = Field(default=None, sa_column=c.moment("vram_used_at"))
    links: Any = Field(default=None, sa_column=c.data("links"))
    network: Any = Field(default=None, sa_column=c.data("network"))
    schedulable: bool = Field(default=True, sa_column=c.flag("schedulable", default=True))
    worker_ready: bool = Field(default=False, sa_column=c.flag("worker_ready", default=False))
    worker_reserve: int = Field(default=0, sa_column=c.size("worker_reserve", default=0, nullable=False))
    unified: bool = Field(default=False, sa_column=c.flag("unified", default=False))
    capacity: int | None = Field(default=None, sa_column=c.size("capacity"))
    open: bool = Field(default=False, sa_column=c.flag("open", default=False))
    vram_allocated: int = Field(default=0, sa_column=c.size("vram_allocated", default=0, nullable=False))
    over_committed: bool = Field(default=False, sa_column=c.flag("over_committed", default=False))
    version: int = Field(default=0, sa_column=c.size("version", default=0, nullable=False))
    changed_in: int = Field(default=0, sa_column=_changed_in())
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (
        UniqueConstraint("worker_id", "type", "index", name="gpu_devices_worker_id_type_index_key"),
        c.not_negative(
            "gpu_devices_sizes_not_negative", "index", "vram_total", "vram_used", "vram_allocated"
        ),
        CheckConstraint(
            "over_committed OR vram_allocated = 0 OR (capacity IS NOT NULL AND vram_allocated <= capacity)",
            name="gpu_devices_vram_fits",
        ),
        Index("gpu_devices_changed_in_idx", "changed_in"),
        {"postgresql_with": {"fillfactor": "50"}},
    )
