"""The example models as sparse directories, with documents for `gpustackd apply` that point at them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gpustackd.demo.models import folder
from gpustackd.demo.models.sparse import ModelFiles, write_model

Document = dict[str, Any]


def model_documents(source: Path | None = None) -> list[Document]:
    """The `Model` documents of `models.yaml`, `x-files` included."""
    path = source or folder() / "models.yaml"
    return [d for d in yaml.safe_load_all(path.read_text()) if d and d.get("kind") == "Model"]


def write_models(
    into: Path, source: Path | None = None, tell: Callable[[str, int], None] = lambda name, size: None
) -> Path:
    """Write every example model below `into` and return the documents that name those directories.

    `tell` hears of each model once it is there: its repository and the bytes of its weights.
    """
    into = into.resolve()
    documents = []
    for document in model_documents(source):
        files = ModelFiles.of(document["x-files"])
        repository = document["huggingface_repo_id"]
        directory = into / repository
        tell(repository, write_model(directory, files))
        documents.append(local(document, directory))
    path = into / "models.yaml"
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path


def local(document: Document, directory: Path) -> Document:
    """The same model, read from a directory instead of a hub."""
    hub = ("source", "huggingface_repo_id", "x-files")
    kept = {k: v for k, v in document.items() if k not in hub}
    return {**kept, "source": "local_path", "local_path": str(directory)}
