"""Where the files of a model, its adapters and its draft model are, and the key of downloaded copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.errors import ModelUnreadable

DOWNLOADING = "downloading:"
"""Prefix of the source index of files that are being downloaded, in maps of workers' files."""


@dataclass(frozen=True, slots=True)
class FileOrigin:
    """A repository of a hub at a revision (None = the default branch), or a path."""

    source: Source
    name: str
    revision: str | None = None
    file: str | None = field(default=None, compare=False)
    """The file of the repository, where one is named."""

    @property
    def index(self) -> str:
        """`model_files.source_index` of a downloaded copy: SHA-256 of the
        path or repository, after `model_scope/` for that hub and before the file where one is named."""
        scope = ("model_scope",) if self.source is Source.MODEL_SCOPE else ()
        parts = "/".join((*scope, self.name, *filter(None, (self.file,))))
        return sha256(parts.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def path(self) -> str | None:
        """The local path; None for a hub."""
        return self.name if self.source is Source.LOCAL_PATH else None


def origin_of(spec: ModelSpec) -> FileOrigin:
    """Where the model itself is. Raise ModelUnreadable (`no_source`) where the row does not say."""
    name, column = {
        Source.HUGGINGFACE: (spec.huggingface_repo_id, "huggingface_repo_id"),
        Source.MODEL_SCOPE: (spec.model_scope_model_id, "model_scope_model_id"),
        Source.LOCAL_PATH: (spec.local_path, "local_path"),
        None: (None, "source"),
    }[spec.source]
    if spec.source is None or not name:
        raise ModelUnreadable("no_source", f"the model has no {column}", f"set {column}")
    return FileOrigin(spec.source, name, spec.revision)


def adapter_origins(spec: ModelSpec) -> tuple[FileOrigin, ...]:
    """Where the entries of `lora_list` are; entries without a name or with an unknown source are left out."""
    return tuple(o for entry in spec.lora_list if (o := _adapter(entry)) is not None)


def draft_origin(spec: ModelSpec) -> FileOrigin | None:
    """Where the draft model of a speculative configuration is: a path, else a repository of the hub that
    the model itself is from."""
    raw = (spec.speculative_config or {}).get("draft_model")
    if isinstance(raw, Mapping):
        raw = raw.get("local_path") or raw.get("huggingface_repo_id") or raw.get("model_scope_model_id")
    if not isinstance(raw, str) or not raw:
        return None
    if raw.startswith("/"):
        return FileOrigin(Source.LOCAL_PATH, raw)
    hub = Source.MODEL_SCOPE if spec.source is Source.MODEL_SCOPE else Source.HUGGINGFACE
    return FileOrigin(hub, raw)


def _adapter(entry: Mapping[str, Any]) -> FileOrigin | None:
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
        return FileOrigin(Source.LOCAL_PATH, path) if path else None
    column = "model_scope_file_path" if source == Source.MODEL_SCOPE else "huggingface_filename"
    return FileOrigin(Source(source), repo or name, file=text(column) or None)
