"""From the parts that were read to the facts of a model: categories in effect, dimensions, sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.model_spec import SKIP_EVALUATION, ModelSpec, Source
from gpustackd.errors import BadRow, ModelUnreadable
from gpustackd.estimate.categories import IMAGE, UNKNOWN, is_omni
from gpustackd.estimate.demand import reads_dimensions
from gpustackd.estimate.evaluate import in_effect, overridden_architectures
from gpustackd.estimate.meta import meta_of
from gpustackd.sources.formats.config_json import hyper_parameters, root_architectures


@dataclass(slots=True)
class Parts:
    """What was read of one model; an error in place of what could not be."""

    config: Mapping[str, Any] | None = None
    config_error: ModelUnreadable | None = None
    is_diffusers: bool = False
    weight_bytes: int | None = None
    unknown_because: str = ""
    listed_bytes: int | None = None
    on_this_host: bool = False
    lora_bytes: int = 0
    draft_bytes: int = 0
    warnings: list[str] = field(default_factory=list)


def wants_pipeline(spec: ModelSpec) -> bool:
    """Whether a `model_index.json` is worth a look: no category yet, or an image model (section 11, 1)."""
    return not spec.categories or IMAGE in spec.categories


def facts_key(spec: ModelSpec) -> tuple[Any, ...]:
    """What facts depend on, of a row: equal keys share one read. Not the version, so that an edit of a
    scaling rule reads nothing anew."""
    key: tuple[Any, ...] = (
        spec.source, spec.huggingface_repo_id, spec.huggingface_filename, spec.model_scope_model_id,
        spec.model_scope_file_path, spec.local_path, spec.revision, spec.categories, spec.backend,
        spec.backend_parameters, bool(spec.gpu_type_selector), bool(spec.env.get(SKIP_EVALUATION)),
    )  # fmt: skip
    if spec.lora_list or spec.speculative_config:
        key += (repr([dict(x) for x in spec.lora_list]), repr(dict(spec.speculative_config or {})))
    if spec.source is Source.LOCAL_PATH:  # another disk may answer for other workers
        key += (spec.cluster_id, repr(spec.worker_selector), spec.gpu_ids)
    return key


def assemble(spec: ModelSpec, parts: Parts, label: str) -> ModelFacts:
    """Judge the parts. Raise ModelUnreadable where the search needs `config.json` and it cannot be used,
    unless the model's env says to go on without (`GPUSTACK_SKIP_MODEL_EVALUATION`)."""
    config = parts.config or {}
    warnings = list(parts.warnings)
    names = root_architectures(config)
    overridden = None
    try:
        overridden = overridden_architectures(spec)
    except BadRow as e:
        warnings.append(str(e))  # the search refuses it and says so; reading goes on
    categories = in_effect(spec, overridden or names, is_diffusers=parts.is_diffusers)
    hyper = _dimensions(spec, parts, categories, label, warnings)
    if hyper is not None and overridden:
        hyper = replace(hyper, architectures=overridden)
    facts = ModelFacts(
        weight_bytes=parts.weight_bytes,
        unknown_because=parts.unknown_because,
        listed_bytes=parts.listed_bytes,
        on_this_host=parts.on_this_host,
        lora_bytes=parts.lora_bytes,
        draft_bytes=parts.draft_bytes,
        config=MappingProxyType(dict(config)),
        hyper=hyper,
        categories=categories,
        meta=MappingProxyType(dict(meta_of(overridden or names, config))),
        is_diffusers=parts.is_diffusers,
        warnings=tuple(warnings),
    )
    return replace(facts, digest=digest_of(facts))


def digest_of(facts: ModelFacts) -> str:
    """Equal for facts that lead to the same decision."""
    hyper = asdict(facts.hyper) if facts.hyper else None
    told = [facts.weight_bytes, facts.unknown_because, facts.lora_bytes, facts.draft_bytes, hyper,
            facts.categories, facts.is_diffusers, facts.warnings]  # fmt: skip
    return sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _dimensions(
    spec: ModelSpec, parts: Parts, categories: tuple[str, ...], label: str, warnings: list[str]
) -> HyperParameters | None:
    needed = _needed(spec, categories)
    error = parts.config_error
    if error is None and parts.config is None:
        error = ModelUnreadable(
            "no_config", f"{label} has no config.json", "add it, or pin another engine", retryable=True
        )
    if error is None and parts.config is not None and not _omni(spec, categories):
        try:
            hyper = hyper_parameters(parts.config, f"{label}/config.json")
            if hyper.is_multimodal and hyper.vision_heads is None:
                warnings.append(
                    f"{label}/config.json states no vision heads; no split is checked against them"
                )
            return hyper
        except ModelUnreadable as e:
            error = e
    if error is not None and needed:
        raise error
    if error is not None and not parts.is_diffusers:
        warnings.append(error.problem)
    return None


def _needed(spec: ModelSpec, categories: tuple[str, ...]) -> bool:
    if spec.env.get(SKIP_EVALUATION) or IMAGE in categories or UNKNOWN in categories:
        return False
    try:
        return reads_dimensions(spec, categories)
    except BadRow:
        return True


def _omni(spec: ModelSpec, categories: tuple[str, ...]) -> bool:
    try:
        return is_omni(spec, categories)
    except BadRow:
        return False
