"""A model as asked for: one row of `models` as a checked, immutable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from types import MappingProxyType
from typing import Any, TypeVar

from gpustackd.errors import BadRow

E = TypeVar("E", bound=StrEnum)

SKIP_GPU_COUNT_CHECK = "GPUSTACK_SKIP_GPU_COUNT_CHECK"
VRAM_CLAIM = "GPUSTACK_MODEL_VRAM_CLAIM"
RAM_CLAIM = "GPUSTACK_MODEL_RAM_CLAIM"
SKIP_EVALUATION = "GPUSTACK_SKIP_MODEL_EVALUATION"


class Source(StrEnum):
    """Where the files of a model live."""

    HUGGINGFACE = "huggingface"
    MODEL_SCOPE = "model_scope"
    LOCAL_PATH = "local_path"


class Strategy(StrEnum):
    """Placement strategies a model or the settings may name."""

    SPREAD = "spread"
    BINPACK = "binpack"
    FIRST_FIT = "first_fit"
    BEST_FIT = "best_fit"
    FRAGMENTATION = "fragmentation"


@dataclass(frozen=True, slots=True)
class GpuId:
    """One hand-picked GPU, `worker:type:index`. The worker's name may contain colons, the type may not."""

    worker: str
    type: str
    index: int

    @classmethod
    def parse(cls, text: str) -> GpuId:
        """Raises BadRow where `text` is not `worker:type:index` with digits at the end."""
        worker, _, rest = text.rpartition(":")
        worker, _, kind = worker.rpartition(":")
        if not worker or not kind or not rest.isascii() or not rest.isdigit():
            raise BadRow("gpu_selector.gpu_ids", f"{text!r} is not worker:type:index, as in node-1:cuda:0")
        return cls(worker, kind, int(rest))


@dataclass(frozen=True, slots=True)
class GpuSelector:
    """Hand-picked GPUs: a restriction that always holds. `gpus_per_replica` None = all of them."""

    gpu_ids: tuple[GpuId, ...] = ()
    gpus_per_replica: int | None = None
    allow_overcommit: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Equality and hash use (id, version) only: the version rises with every edit."""

    id: int = field(compare=True)
    version: int = field(compare=True)
    name: str = field(compare=False, default="")
    owner: str | None = field(compare=False, default=None)
    cluster_id: int | None = field(compare=False, default=None)
    source: Source | None = field(compare=False, default=None)
    huggingface_repo_id: str | None = field(compare=False, default=None)
    huggingface_filename: str | None = field(compare=False, default=None)
    model_scope_model_id: str | None = field(compare=False, default=None)
    model_scope_file_path: str | None = field(compare=False, default=None)
    local_path: str | None = field(compare=False, default=None)
    revision: str | None = field(compare=False, default=None)
    replicas: int | None = field(compare=False, default=None)
    categories: tuple[str, ...] = field(compare=False, default=())
    backend: str | None = field(compare=False, default=None)
    backend_version: str | None = field(compare=False, default=None)
    backend_parameters: tuple[str, ...] = field(compare=False, default=())
    image_name: str | None = field(compare=False, default=None)
    run_command: str | None = field(compare=False, default=None)
    env: Mapping[str, str] = field(compare=False, default_factory=lambda: MappingProxyType({}))
    placement_strategy: Strategy | None = field(compare=False, default=None)
    cpu_offloading: bool | None = field(compare=False, default=None)
    distributed_inference_across_workers: bool | None = field(compare=False, default=None)
    worker_selector: Mapping[str, Any] | None = field(compare=False, default=None)
    gpu_selector: GpuSelector | None = field(compare=False, default=None)
    gpu_type_selector: Mapping[str, Any] | None = field(compare=False, default=None)
    speculative_config: Mapping[str, Any] | None = field(compare=False, default=None)
    extended_kv_cache: Mapping[str, Any] | None = field(compare=False, default=None)
    lora_list: tuple[Mapping[str, Any], ...] = field(compare=False, default=())
    priority: int = field(compare=False, default=0)

    @property
    def weight_file(self) -> str | None:
        """The file or path that the column of the source names."""
        return {
            Source.HUGGINGFACE: self.huggingface_filename,
            Source.MODEL_SCOPE: self.model_scope_file_path,
            Source.LOCAL_PATH: self.local_path,
            None: None,
        }[self.source]

    @property
    def is_gguf(self) -> bool:
        """Whether the file that the source names ends with `.gguf`."""
        return (self.weight_file or "").endswith(".gguf")

    @property
    def effective_backend(self) -> str:
        """The backend; where it is unset, Custom for GGUF and vLLM for others."""
        return self.backend or ("Custom" if self.is_gguf else "vLLM")

    @property
    def gpu_ids(self) -> tuple[GpuId, ...]:
        """Hand-picked GPUs; empty = any."""
        return self.gpu_selector.gpu_ids if self.gpu_selector else ()

    @property
    def source_index(self) -> str:
        """Key of downloaded files (`model_files.source_index`): SHA-256 of repository and file, or of the
        path."""
        scope = self.source is Source.MODEL_SCOPE
        parts = (
            ("model_scope", self.model_scope_model_id, self.model_scope_file_path)
            if scope
            else (self.huggingface_repo_id, self.huggingface_filename)
            if self.source is Source.HUGGINGFACE
            else (self.local_path,)
        )
        # a path of this host may not be valid text
        return sha256("/".join(p for p in parts if p).encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def skips_gpu_count_check(self) -> bool:
        """Whether a world size that differs from the hand-picked GPUs is let pass; without any there is
        nothing to skip."""
        return bool(self.gpu_ids) and str(self.env.get(SKIP_GPU_COUNT_CHECK, "")).strip().lower() in {
            "1",
            "true",
            "yes",
            "on",
        }


_TEXT = (  # noqa: SIM905
    "owner huggingface_repo_id huggingface_filename model_scope_model_id model_scope_file_path local_path"
    " revision backend backend_version image_name run_command"
).split()


def model_spec(row: Mapping[str, Any]) -> ModelSpec:
    """Check one row of `models` (jsonb columns decoded). Raises BadRow naming the column at fault."""
    values: dict[str, Any] = {k: (row.get(k) or None) for k in _TEXT}
    values |= {k: row.get(k) for k in ("cluster_id", "replicas", "cpu_offloading")}
    values["distributed_inference_across_workers"] = row.get("distributed_inference_across_workers")
    values["source"] = _enum(Source, row, "source")
    values["placement_strategy"] = _enum(Strategy, row, "placement_strategy")
    values["categories"] = _texts(row, "categories")
    values["backend_parameters"] = _texts(row, "backend_parameters")
    values["env"] = MappingProxyType({str(k): str(v) for k, v in (_mapping(row, "env") or {}).items()})
    for name in ("worker_selector", "gpu_type_selector", "speculative_config", "extended_kv_cache"):
        values[name] = _mapping(row, name)
    loras = row.get("lora_list") or []
    if not isinstance(loras, list) or not all(isinstance(x, Mapping) for x in loras):
        raise BadRow("lora_list", "must be a list of objects")
    values["lora_list"] = tuple(loras)
    values["gpu_selector"] = _gpu_selector(_mapping(row, "gpu_selector"))
    return ModelSpec(
        id=int(row["id"]), version=int(row.get("version") or 0), name=str(row["name"]),
        priority=int(row.get("priority") or 0), **values,
    )  # fmt: skip


def filled(spec: ModelSpec, writes: Mapping[str, Any]) -> ModelSpec:
    """The spec with columns that its row leaves empty; `writes` maps columns to their values."""
    values: dict[str, Any] = {}
    if "categories" in writes:
        values["categories"] = tuple(writes["categories"])
    if "gpu_selector" in writes:
        values["gpu_selector"] = _gpu_selector(writes["gpu_selector"])
    if "distributed_inference_across_workers" in writes:
        values["distributed_inference_across_workers"] = writes["distributed_inference_across_workers"]
    return replace(spec, **values)


def _enum(kind: type[E], row: Mapping[str, Any], name: str) -> E | None:
    raw = row.get(name)
    if raw is None or raw == "":
        return None
    try:
        return kind(str(raw))
    except ValueError:
        known = ", ".join(kind)
        raise BadRow(name, f"{raw!r} is not known", f"use one of {known}") from None


def _texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    raw = row.get(name)
    if raw is None:
        return ()
    if not isinstance(raw, list) or not all(isinstance(x, (str, int, float)) for x in raw):
        raise BadRow(name, "must be a list of strings")
    return tuple(str(x) for x in raw)


def _mapping(row: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    raw = row.get(name)
    if raw is None:
        return None
    if not isinstance(raw, Mapping):
        raise BadRow(name, f"must be an object, not {type(raw).__name__}")
    return MappingProxyType(dict(raw))


def _gpu_selector(raw: Mapping[str, Any] | None) -> GpuSelector | None:
    if raw is None:
        return None
    ids = raw.get("gpu_ids") or []
    if not isinstance(ids, list):
        raise BadRow("gpu_selector.gpu_ids", "must be a list of worker:type:index")
    per = raw.get("gpus_per_replica")
    if per is not None and (not isinstance(per, int) or isinstance(per, bool) or per < 0):
        raise BadRow("gpu_selector.gpus_per_replica", f"{per!r} is not a number of GPUs")
    parsed = tuple(GpuId.parse(str(x)) for x in ids)
    if len(set(parsed)) != len(parsed):
        raise BadRow("gpu_selector.gpu_ids", "names a GPU twice")
    return GpuSelector(parsed, per or None, bool(raw.get("allow_overcommit", False)))
