"""The examples: where they are, and the models as sparse directories with documents that point at them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from gpustackd.demo.models.sparse import SparseModel, write_model
from gpustackd.errors import Refused

_PACKAGE = Path(__file__).resolve().parents[2]


def folder() -> Path:
    """Where `fleet.yaml` and `models.yaml` are: in the checkout, or inside an installed package.

    Raise Refused where neither is there.
    """
    for place in (_PACKAGE.parent / "deploy" / "examples", _PACKAGE / "_examples"):
        if (place / "fleet.yaml").is_file() and (place / "models.yaml").is_file():
            return place
    raise Refused(
        "the example fleet and models are not part of this installation", "run `make demo` in a checkout"
    )


def model_documents() -> list[dict[str, Any]]:
    """The `Model` documents of `models.yaml`, `x-files` included."""
    text = (folder() / "models.yaml").read_text()
    return [d for d in yaml.safe_load_all(text) if d and d.get("kind") == "Model"]


def write_models(into: Path, tell: Callable[[str, int], None] = lambda name, size: None) -> Path:
    """Write every example model below `into`; return the file of the documents that name those directories.

    `tell` is called for each model once it is written, with its repository and the bytes of its weights.
    """
    into = into.resolve()
    documents = []
    for document in model_documents():
        files = SparseModel.of(document["x-files"])
        repository = document["huggingface_repo_id"]
        directory = into / repository
        tell(repository, write_model(directory, files))
        documents.append(_local(document, directory))
    path = into / "models.yaml"
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path


def _local(document: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same model, read from a directory instead of a hub."""
    hub = ("source", "huggingface_repo_id", "x-files")
    rest = {k: v for k, v in document.items() if k not in hub}
    return {**rest, "source": "local_path", "local_path": str(directory)}
