"""The kinds of documents that `gpustackd apply` takes, and their fields: columns of the kind's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpustackd.domain.lifecycle import InstanceState, WorkerState
from gpustackd.domain.model_spec import Source, Strategy
from gpustackd.errors import BadRow
from gpustackd.replicas.schedule import scaling_schedule
from gpustackd.replicas.sync_plan import MAX_REPLICAS
from gpustackd.store.documents import fields as f
from gpustackd.store.documents.fields import Check


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """One kind of document."""

    name: str
    table: str
    fields: Mapping[str, Check]
    references: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Fields that name another row: field -> (column, kind referred to)."""
    identity: tuple[str, ...] = ("name",)
    """Columns, after resolving references, by which a document finds its row."""
    required: tuple[str, ...] = ("name",)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What `null` means for a column, where that is not NULL."""


GPU = DocumentKind(
    "GPU",
    "gpu_devices",
    {
        "index": f.count,
        "type": f.name,
        "vendor": f.text,
        "name": f.text,
        "uuid": f.text,
        "arch_family": f.text,
        "compute_capability": f.text,
        "runtime_version": f.text,
        "vram_total": f.size,
        "vram_used": f.size,
        "vram_used_at": f.moment,
        "links": f.mapping,
        "network": f.mapping,
        "schedulable": f.flag,
    },
    identity=("worker_id", "type", "index"),
    required=("type", "index"),
    defaults={"schedulable": True},
)
"""An entry of a Worker's `gpus`; there is no such document."""

PLACEMENT: Mapping[str, Check] = {
    "worker_id": f.count,
    "gpu_type": f.name,
    "gpu_indexes": f.indexes,
    "gpu_addresses": f.texts,
    "computed_resource_claim": f.mapping,
    "distributed_servers": f.mapping,
}
"""Fields of a ModelInstance that place it; with them it is adopted (see `adoption`)."""


def _replicas(value: Any) -> int:
    return f.whole(value, 0, MAX_REPLICAS)


def _schedule(value: Any) -> Any:
    """A schedule that can be followed: its cron lines fire some day, and an enabled one has a baseline."""
    schedule = f.mapping(value)
    try:
        scaling_schedule(schedule)
    except BadRow as error:
        raise ValueError(f"cannot be kept: {error}") from None
    return schedule


def _maintenance(value: Any) -> Any:
    """`drain`, and optionally its `deadline`."""
    if not isinstance(value, Mapping) or not set(value) <= {"drain", "deadline"}:
        raise ValueError("must be a map of drain and deadline, as in {drain: true}")
    maintenance: dict[str, Any] = {"drain": f.flag(value.get("drain", False))}
    if value.get("deadline") is not None:
        maintenance["deadline"] = f.moment(value["deadline"]).isoformat()
    return maintenance


KINDS: Mapping[str, DocumentKind] = {
    kind.name: kind
    for kind in (
        # In the order in which they are written: rows that others refer to come first.
        DocumentKind("Cluster", "clusters", {"name": f.name, "topology": f.mapping, "devices": f.data}),
        DocumentKind(
            "InferenceBackend",
            "inference_backends",
            {"name": f.name, "owner": f.text, "versions": f.mapping},
            identity=("name", "owner"),
        ),
        DocumentKind(
            "InstanceType",
            "instance_types",
            {"name": f.name, "cluster_id": f.count, "detail": f.data},
            references={"cluster": ("cluster_id", "Cluster")},
            identity=("name", "cluster_id"),
        ),
        DocumentKind(
            "Worker",
            "workers",
            {
                "name": f.name,
                "cluster_id": f.count,
                "state": f.one_of(list(WorkerState)),
                "state_message": f.text,
                "hostname": f.text,
                "ip": f.text,
                "ifname": f.text,
                "advertise_address": f.text,
                "port": f.port,
                "labels": f.labels,
                "ram_total": f.size,
                "ram_reserved": f.size,
                "vram_reserved": f.size,
                "unified_memory": f.flag,
                "cpu_arch": f.text,
                "service_port_range": f.text,
                "heartbeat_at": f.moment,
                "maintenance": _maintenance,
            },
            references={"cluster": ("cluster_id", "Cluster")},
            defaults={
                "state": WorkerState.NOT_READY.value,
                "ram_reserved": 0,
                "vram_reserved": 0,
                "unified_memory": False,
            },
        ),
        DocumentKind(
            "Model",
            "models",
            {
                "name": f.name,
                "owner": f.text,
                "cluster_id": f.count,
                "source": f.one_of(list(Source)),
                "huggingface_repo_id": f.text,
                "huggingface_filename": f.text,
                "model_scope_model_id": f.text,
                "model_scope_file_path": f.text,
                "local_path": f.text,
                "revision": f.text,
                "replicas": _replicas,
                "categories": f.texts,
                "meta": f.mapping,
                "backend": f.text,
                "backend_version": f.text,
                "backend_parameters": f.texts,
                "image_name": f.text,
                "run_command": f.text,
                "env": f.labels,
                "placement_strategy": f.one_of(list(Strategy)),
                "cpu_offloading": f.flag,
                "distributable": f.flag,
                "distributed_inference_across_workers": f.flag,
                "worker_selector": f.mapping,
                "gpu_selector": f.mapping,
                "gpu_type_selector": f.mapping,
                "speculative_config": f.mapping,
                "extended_kv_cache": f.mapping,
                "lora_list": f.array,
                "roles": f.array,
                "disaggregation": f.mapping,
                "gather": f.data,
                "scaling_schedule": _schedule,
                "restart_on_error": f.flag,
                "min_available": f.count,
                "priority": f.whole,
                "preemption": f.one_of(["PreemptLowerPriority", "Never"]),
            },
            references={"cluster": ("cluster_id", "Cluster")},
            defaults={"restart_on_error": True, "priority": 0},
        ),
        DocumentKind(
            "ModelFile",
            "model_files",
            {
                "worker_id": f.count,
                "source_index": f.name,
                "resolved_path": f.text,
                "size": f.size,
                "state": f.one_of(["READY", "DOWNLOADING", "ERROR"]),
            },
            # source_index is a hash of where the model comes from; `model` stands for it by name
            references={"worker": ("worker_id", "Worker"), "model": ("source_index", "Model")},
            identity=("worker_id", "source_index"),
            required=("worker_id", "source_index"),
            defaults={"state": "DOWNLOADING"},
        ),
        DocumentKind(
            "ModelInstance",
            "model_instances",
            {
                "name": f.name,
                "model_id": f.count,
                "state": f.one_of(list(InstanceState)),
                "state_message": f.text,
                "priority": f.whole,
                "role": f.text,
                "group_id": f.text,
                "group_size": f.count,
                "draining_since": f.moment,
                "restart_count": f.count,
                "last_restart_time": f.moment,
                "named_ports": f.data,
                **PLACEMENT,
            },
            references={"model": ("model_id", "Model"), "worker": ("worker_id", "Worker")},
            required=("name", "model_id"),
            defaults={"state": InstanceState.PENDING.value, "restart_count": 0},
        ),
    )
}
ORDER = {name: n for n, name in enumerate(KINDS)}
"""Kind -> its place in the order of writing."""
