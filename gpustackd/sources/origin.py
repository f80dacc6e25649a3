"""Where the files of a model, an adapter or a draft model live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.errors import ModelUnreadable


@dataclass(frozen=True, slots=True)
class Origin:
    """A repository of a hub at a revision (None = its default), or a path."""

    source: Source
    name: str
    revision: str | None = None


def origin_of(spec: ModelSpec) -> Origin:
    """Where the model itself lives. Raise ModelUnreadable (`no_source`) where the row does not say."""
    name, column = {
        Source.HUGGINGFACE: (spec.huggingface_repo_id, "huggingface_repo_id"),
        Source.MODEL_SCOPE: (spec.model_scope_model_id, "model_scope_model_id"),
        Source.LOCAL_PATH: (spec.local_path, "local_path"),
        None: (None, "source"),
    }[spec.source]
    if spec.source is None or not name:
        raise ModelUnreadable("no_source", f"the model has no {column}", f"set {column}")
    return Origin(spec.source, name, spec.revision)


def adapter_origins(spec: ModelSpec) -> tuple[Origin, ...]:
    """Where the entries of `lora_list` live (estimate spec section 3); entries without a name or with an
    unknown source are left out."""
    return tuple(o for entry in spec.lora_list if (o := _adapter(entry)) is not None)


def draft_origin(spec: ModelSpec) -> Origin | None:
    """Where the draft model of a speculative configuration lives: a path, else a repository of the hub that
    the model itself is from."""
    raw = (spec.speculative_config or {}).get("draft_model")
    if isinstance(raw, Mapping):
        raw = raw.get("local_path") or raw.get("huggingface_repo_id") or raw.get("model_scope_model_id")
    if not isinstance(raw, str) or not raw:
        return None
    if raw.startswith("/"):
        return Origin(Source.LOCAL_PATH, raw)
    hub = Source.MODEL_SCOPE if spec.source is Source.MODEL_SCOPE else Source.HUGGINGFACE
    return Origin(hub, raw)


def _adapter(entry: Mapping[str, Any]) -> Origin | None:
    def text(key: str) -> str:
        value = entry.get(key)
        return value if isinstance(value, str) else ""

    name = text("lora_name")
    source = (text("source") or "huggingface").lower()
    repo = text("lora_repo_name")
    if not name or source not in set(Source):
        return None
    if source == Source.LOCAL_PATH:
        path = text("local_path") or repo
        return Origin(Source.LOCAL_PATH, path) if path else None
    return Origin(Source(source), repo or name)
