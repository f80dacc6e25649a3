"""Model instances, and the ledger of what they hold."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, Column, Index, UniqueConstraint, Uuid
from sqlmodel import Field, SQLModel

from gpustackd.domain.lifecycle import InstanceState
from gpustackd.store.tables import columns as c

_WAITING = "state IN ('PENDING', 'ANALYZING')"


class ModelInstance(SQLModel, table=True):
    """One instance. Waiting rows hold no placement, placed rows a complete one."""

    __tablename__ = "model_instances"

    id: int | None = Field(default=None, sa_column=c.key())
    name: str = Field(sa_column=c.words("name", nullable=False))
    model_id: int = Field(sa_column=c.reference("model_id", "models.id", on_delete="CASCADE"))
    state: str = Field(default="PENDING", sa_column=c.words("state", nullable=False, default="PENDING"))
    state_message: str | None = Field(default=None, sa_column=c.words("state_message"))
    priority: int | None = Field(default=None, sa_column=c.size("priority"))
    role: str | None = Field(default=None, sa_column=c.words("role"))
    group_id: str | None = Field(default=None, sa_column=c.words("group_id"))
    group_size: int | None = Field(default=None, sa_column=c.size("group_size"))
    draining_since: datetime | None = Field(default=None, sa_column=c.moment("draining_since"))
    restart_count: int = Field(default=0, sa_column=c.size("restart_count", default=0, nullable=False))
    last_restart_time: datetime | None = Field(default=None, sa_column=c.moment("last_restart_time"))
    worker_id: int | None = Field(default=None, sa_column=c.size("worker_id"))
    worker_name: str | None = Field(default=None, sa_column=c.words("worker_name"))
    worker_ip: str | None = Field(default=None, sa_column=c.words("worker_ip"))
    worker_advertise_address: str | None = Field(default=None, sa_column=c.words("worker_advertise_address"))
    worker_ifname: str | None = Field(default=None, sa_column=c.words("worker_ifname"))
    gpu_type: str | None = Field(default=None, sa_column=c.words("gpu_type"))
    gpu_indexes: Any = Field(default=None, sa_column=c.data("gpu_indexes"))
    gpu_addresses: Any = Field(default=None, sa_column=c.data("gpu_addresses"))
    computed_resource_claim: Any = Field(default=None, sa_column=c.data("computed_resource_claim"))
    distributed_servers: Any = Field(default=None, sa_column=c.data("distributed_servers"))
    named_ports: Any = Field(default=None, sa_column=c.data("named_ports"))
    placement_epoch: int = Field(default=0, sa_column=c.size("placement_epoch", default=0, nullable=False))
    attempts: int = Field(default=0, sa_column=c.size("attempts", default=0, nullable=False))
    next_attempt_at: datetime | None = Field(default=None, sa_column=c.moment("next_attempt_at"))
    reasons: Any = Field(default=None, sa_column=c.data("reasons"))
    lease_owner: UUID | None = Field(default=None, sa_column=Column("lease_owner", Uuid))
    lease_until: datetime | None = Field(default=None, sa_column=c.moment("lease_until"))
    scheduled_at: datetime | None = Field(default=None, sa_column=c.moment("scheduled_at"))
    state_since: datetime | None = Field(default=None, sa_column=c.moment("state_since"))
    """Since when it is in its present state, where that came after SCHEDULED."""
    failures: int = Field(default=0, sa_column=c.size("failures", default=0, nullable=False))
    """How often it went to ERROR in its present place."""
    avoid: Any = Field(default=None, sa_column=c.data("avoid"))
    """`[{"worker_id", "gpu_ids", "until"}]`: places where it failed; any other place is preferred."""
    claim_raise: Any = Field(default=None, sa_column=c.data("claim_raise"))
    """`{"vram", "ram", "first_vram", "first_ram", "times", "model_version"}`: the least to book after
    out-of-memory reports, until the model is edited."""
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (
        UniqueConstraint("name", name="model_instances_name_key"),
        c.one_of("model_instances_state_known", "state", list(InstanceState)),
        CheckConstraint(
            f"NOT {_WAITING} OR (worker_id IS NULL AND gpu_type IS NULL AND gpu_indexes IS NULL"
            " AND computed_resource_claim IS NULL AND distributed_servers IS NULL)",
            name="model_instances_waiting_holds_nothing",
        ),
        CheckConstraint(
            f"{_WAITING} OR state = 'ERROR'"
            " OR (worker_id IS NOT NULL AND computed_resource_claim IS NOT NULL)",
            name="model_instances_placed_holds_a_claim",
        ),
        CheckConstraint(
            "state <> 'ERROR' OR (worker_id IS NULL) = (computed_resource_claim IS NULL)",
            name="model_instances_error_holds_all_or_nothing",
        ),
        CheckConstraint(
            "(state = 'ANALYZING') = (lease_owner IS NOT NULL)"
            " AND (lease_owner IS NULL) = (lease_until IS NULL)",
            name="model_instances_lease_while_analyzing",
        ),
        c.not_negative(
            "model_instances_counts_not_negative", "placement_epoch", "attempts", "restart_count", "failures"
        ),
        Index("model_instances_model_id_idx", "model_id"),
        {"postgresql_with": {"fillfactor": "50"}},
    )


class InstanceClaim(SQLModel, table=True):
    """One ledger row; `gpu_device_id` NULL means RAM of the worker. Rows are never updated; deleting one
    frees what it held. There are no foreign keys on `worker_id` and `gpu_device_id`: they would lock workers
    out of order and slow down commits. The commit's row locks and delete triggers protect them instead."""

    __tablename__ = "instance_claims"

    id: int | None = Field(default=None, sa_column=c.key())
    instance_id: int = Field(sa_column=c.reference("instance_id", "model_instances.id", on_delete="CASCADE"))
    worker_id: int = Field(sa_column=Column("worker_id", BigInteger, nullable=False))
    gpu_device_id: int | None = Field(default=None, sa_column=c.size("gpu_device_id"))
    part: str = Field(default="main", sa_column=c.words("part", nullable=False, default="main"))
    vram: int = Field(default=0, sa_column=c.size("vram", default=0, nullable=False))
    ram: int = Field(default=0, sa_column=c.size("ram", default=0, nullable=False))
    created_at: datetime = Field(sa_column=c.now("created_at"))

    __table_args__ = (
        c.one_of("instance_claims_part_known", "part", ["main", "subordinate"]),
        c.not_negative("instance_claims_sizes_not_negative", "vram", "ram"),
        CheckConstraint(
            "(gpu_device_id IS NOT NULL AND ram = 0) OR (gpu_device_id IS NULL AND vram = 0)",
            name="instance_claims_gpu_or_ram",
        ),
        Index("instance_claims_instance_id_idx", "instance_id"),
        Index("instance_claims_worker_id_idx", "worker_id"),
    )
