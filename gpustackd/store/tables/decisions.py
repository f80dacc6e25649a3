"""One record of every decision that was written."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Column, Double, Index, text
from sqlmodel import Field, SQLModel

from gpustackd.store.tables import columns as c


class SchedulingDecision(SQLModel, table=True):
    """One decision. It outlives its instance until it is pruned, as evidence."""

    __tablename__ = "scheduling_decisions"

    id: int | None = Field(default=None, sa_column=c.key())
    instance_id: int = Field(sa_column=c.size("instance_id", nullable=False))
    placement_epoch: int = Field(sa_column=c.size("placement_epoch", nullable=False))
    attempt: int = Field(default=0, sa_column=c.size("attempt", default=0, nullable=False))
    replica: str | None = Field(default=None, sa_column=c.words("replica"))
    outcome: str = Field(sa_column=c.words("outcome", nullable=False))
    pool: Any = Field(default=None, sa_column=c.data("pool"))
    candidates: Any = Field(default=None, sa_column=c.data("candidates"))
    reasons: Any = Field(default=None, sa_column=c.data("reasons"))
    duration_ms: float | None = Field(default=None, sa_column=Column("duration_ms", Double))
    created_at: datetime = Field(sa_column=c.now("created_at"))

    __table_args__ = (
        Index(
            "scheduling_decisions_placed_once_key",
            "instance_id",
            "placement_epoch",
            unique=True,
            postgresql_where=text("outcome = 'PLACED'"),
        ),
        Index("scheduling_decisions_instance_id_id_idx", "instance_id", "id"),
    )
