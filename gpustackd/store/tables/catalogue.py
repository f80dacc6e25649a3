"""What decisions look up: model files on workers, inference backends, pools of cards."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import Index, UniqueConstraint
from sqlmodel import Field, SQLModel

from gpustackd.store.tables import columns as c


class ModelFile(SQLModel, table=True):
    """A model's file or directory on a worker's disk."""

    __tablename__ = "model_files"

    id: int | None = Field(default=None, sa_column=c.key())
    worker_id: int = Field(sa_column=c.reference("worker_id", "workers.id", on_delete="CASCADE"))
    source_index: str = Field(sa_column=c.words("source_index", nullable=False))
    resolved_path: str | None = Field(default=None, sa_column=c.words("resolved_path"))
    size: int | None = Field(default=None, sa_column=c.size("size"))
    state: str = Field(
        default="DOWNLOADING", sa_column=c.words("state", nullable=False, default="DOWNLOADING")
    )
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (
        UniqueConstraint("worker_id", "source_index", name="model_files_worker_id_source_index_key"),
        c.one_of("model_files_state_known", "state", ["READY", "DOWNLOADING", "ERROR"]),
        c.not_negative("model_files_size_not_negative", "size"),
    )


class InferenceBackend(SQLModel, table=True):
    """An engine and its versions; without an owner, every model may use it."""

    __tablename__ = "inference_backends"

    id: int | None = Field(default=None, sa_column=c.key())
    name: str = Field(sa_column=c.words("name", nullable=False))
    owner: str | None = Field(default=None, sa_column=c.words("owner"))
    versions: Any = Field(default=None, sa_column=c.data("versions"))
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (Index("inference_backends_name_owner_idx", "name", "owner"),)


class InstanceType(SQLModel, table=True):
    """A pool of cards, whole or sliced, that `gpu_type_selector` may name."""

    __tablename__ = "instance_types"

    id: int | None = Field(default=None, sa_column=c.key())
    cluster_id: int | None = Field(
        default=None, sa_column=c.reference("cluster_id", "clusters.id", on_delete="CASCADE", nullable=True)
    )
    name: str = Field(sa_column=c.words("name", nullable=False))
    detail: Any = Field(default=None, sa_column=c.data("detail"))
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (Index("instance_types_cluster_id_name_idx", "cluster_id", "name"),)
