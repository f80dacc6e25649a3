"""Where the files of a model, an adapter or a draft model live."""

from __future__ import annotations

from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.origin import FileOrigin, adapter_origins, draft_origin
from gpustackd.errors import ModelUnreadable

__all__ = ["FileOrigin", "adapter_origins", "draft_origin", "origin_of"]


def origin_of(spec: ModelSpec) -> FileOrigin:
    """Where the model itself lives. Raise ModelUnreadable (`no_source`) where the row does not say."""
    name, column = {
        Source.HUGGINGFACE: (spec.huggingface_repo_id, "huggingface_repo_id"),
        Source.MODEL_SCOPE: (spec.model_scope_model_id, "model_scope_model_id"),
        Source.LOCAL_PATH: (spec.local_path, "local_path"),
        None: (None, "source"),
    }[spec.source]
    if spec.source is None or not name:
        raise ModelUnreadable("no_source", f"the model has no {column}", f"set {column}")
    return FileOrigin(spec.source, name, spec.revision)
