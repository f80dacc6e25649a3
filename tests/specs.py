"""Models for tests in one line: `a_model(backend="SGLang", categories=["image"])`."""

from __future__ import annotations

from typing import Any

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import ModelSpec, model_spec
from gpustackd.sources.formats.config_json import hyper_parameters
from tests.gpustack_reference import cases


def a_model(**columns: Any) -> ModelSpec:
    """A model by its columns; it has an id, a version and a name in any case."""
    row: dict[str, Any] = {"id": 1, "version": 1, "name": "model", "source": "huggingface"}
    if columns.get("source", "huggingface") == "huggingface":
        row["huggingface_repo_id"] = "owner/model"
    return model_spec(row | columns)


def known_models() -> dict[str, dict[str, Any]]:
    """Facts of public models by name (`gpustack_reference/fixtures/models.json`)."""
    return cases.known_models()


def facts(weights: int | None = 0, config: dict[str, Any] | None = None, **more: Any) -> ModelFacts:
    """Facts as a reader would give them, from a configuration."""
    hyper = hyper_parameters(config) if config else None
    return ModelFacts(weight_bytes=weights, config=config or {}, hyper=hyper, **more)
