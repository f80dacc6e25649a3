"""Models: what is to run."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Index, UniqueConstraint
from sqlmodel import Field, SQLModel

from gpustackd.domain.model_spec import Source, Strategy
from gpustackd.store.tables import columns as c


class Model(SQLModel, table=True):
    """One model. `version` rises with every edit of a column that decisions look at."""

    __tablename__ = "models"

    id: int | None = Field(default=None, sa_column=c.key())
    name: str = Field(sa_column=c.words("name", nullable=False))
    owner: str | None = Field(default=None, sa_column=c.words("owner"))
    cluster_id: int | None = Field(
        default=None, sa_column=c.reference("cluster_id", "clusters.id", on_delete="RESTRICT", nullable=True)
    )
    source: str | None = Field(default=None, sa_column=c.words("source"))
    huggingface_repo_id: str | None = Field(default=None, sa_column=c.words("huggingface_repo_id"))
    huggingface_filename: str | None = Field(default=None, sa_column=c.words("huggingface_filename"))
    model_scope_model_id: str | None = Field(default=None, sa_column=c.words("model_scope_model_id"))
    model_scope_file_path: str | None = Field(default=None, sa_column=c.words("model_scope_file_path"))
    local_path: str | None = Field(default=None, sa_column=c.words("local_path"))
    revision: str | None = Field(default=None, sa_column=c.words("revision"))
    replicas: int | None = Field(default=None, sa_column=c.size("replicas"))
    categories: Any = Field(default=None, sa_column=c.data("categories"))
    meta: Any = Field(default=None, sa_column=c.data("meta"))
    backend: str | None = Field(default=None, sa_column=c.words("backend"))
    backend_version: str | None = Field(default=None, sa_column=c.words("backend_version"))
    backend_parameters: Any = Field(default=None, sa_column=c.data("backend_parameters"))
    image_name: str | None = Field(default=None, sa_column=c.words("image_name"))
    run_command: str | None = Field(default=None, sa_column=c.words("run_command"))
    env: Any = Field(default=None, sa_column=c.data("env"))
    placement_strategy: str | None = Field(default=None, sa_column=c.words("placement_strategy"))
    cpu_offloading: bool | None = Field(default=None, sa_column=c.flag("cpu_offloading"))
    distributable: bool | None = Field(default=None, sa_column=c.flag("distributable"))
    distributed_inference_across_workers: bool | None = Field(
        default=None, sa_column=c.flag("distributed_inference_across_workers")
    )
    worker_selector: Any = Field(default=None, sa_column=c.data("worker_selector"))
    gpu_selector: Any = Field(default=None, sa_column=c.data("gpu_selector"))
    gpu_type_selector: Any = Field(default=None, sa_column=c.data("gpu_type_selector"))
    speculative_config: Any = Field(default=None, sa_column=c.data("speculative_config"))
    extended_kv_cache: Any = Field(default=None, sa_column=c.data("extended_kv_cache"))
    lora_list: Any = Field(default=None, sa_column=c.data("lora_list"))
    roles: Any = Field(default=None, sa_column=c.data("roles"))
    disaggregation: Any = Field(default=None, sa_column=c.data("disaggregation"))
    gather: Any = Field(default=None, sa_column=c.data("gather"))
    scaling_schedule: Any = Field(default=None, sa_column=c.data("scaling_schedule"))
    restart_on_error: bool | None = Field(default=True, sa_column=c.flag("restart_on_error", default=True))
    min_available: int | None = Field(default=None, sa_column=c.size("min_available"))
    """Running replicas that a drain leaves; NULL = all but one."""
    priority: int = Field(default=0, sa_column=c.size("priority", default=0, nullable=False))
    preemption: str | None = Field(default=None, sa_column=c.words("preemption"))
    version: int = Field(default=0, sa_column=c.size("version", default=0, nullable=False))
    created_at: datetime = Field(sa_column=c.now("created_at"))
    updated_at: datetime = Field(sa_column=c.now("updated_at"))

    __table_args__ = (
        UniqueConstraint("name", name="models_name_key"),
        c.one_of("models_source_known", "source", list(Source)),
        c.one_of("models_placement_strategy_known", "placement_strategy", list(Strategy)),
        c.one_of("models_preemption_known", "preemption", ["PreemptLowerPriority", "Never"]),
        c.not_negative("models_replicas_not_negative", "replicas", "min_available"),
        CheckConstraint("jsonb_typeof(worker_selector) = 'object'", name="models_worker_selector_is_a_map"),
        CheckConstraint("jsonb_typeof(gpu_selector) = 'object'", name="models_gpu_selector_is_a_map"),
        Index("models_cluster_id_idx", "cluster_id"),
    )
