"""From the parts that were read to the facts of a model: categories in effect, dimensions, sizes.

A downloaded copy that is registered as complete is what an engine will load, so its size goes before that
of a hub or of a worker. But a copy holds everything that its source lists, the same weights in a second
format included: a size that the listing explains leaves the weights as they are."""

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
from gpustackd.estimate.categories import IMAGE, UNKNOWN, is_omni, meta_of
from gpustackd.estimate.demand import reads_dimensions
from gpustackd.estimate.evaluate import in_effect, overridden_architectures
from gpustackd.sources.formats.config_json import hyper_parameters, root_architectures

COPY_SLACK = 1.02
"""A copy may hold a little more than its source lists: what the downloader notes down beside the files."""


@dataclass(slots=True)
class ModelParts:
    """What was read of one model; an error in place of what could not be. Sizes in bytes."""

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
    """Whether to look for a `model_index.json`: there is no category yet, or it is an image model."""
    return not spec.categories or IMAGE in spec.categories


def facts_key(spec: ModelSpec) -> tuple[Any, ...]:
    """All of a row that facts depend on: equal keys share one read. The version is no part of it, so that an
    edit of a scaling rule does not read the model again."""
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


def assemble(spec: ModelSpec, parts: ModelParts, label: str) -> ModelFacts:
    """The facts that follow from the parts. Raise ModelUnreadable where the search needs `config.json` and it
    cannot be used, unless the model's env says to go on without (`GPUSTACK_SKIP_MODEL_EVALUATION`)."""
    config = parts.config or {}
    warnings = list(parts.warnings)
    names = root_architectures(config)
    overridden = None
    try:
        overridden = overridden_architectures(spec)
    except BadRow as e:
        warnings.append(str(e))  # the search refuses the row with this; reading goes on
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


def with_copy_size(facts: ModelFacts, copy: int | None) -> ModelFacts:
    """The facts with the size that counts; `copy` is what a downloaded copy weighs, in bytes, None = there is
    none.

    Files on this host need no registry, and the estimate of a GGUF model is made from its header.
    """
    own = facts.weight_bytes
    if not copy or copy <= 0 or copy == own or facts.gguf is not None or facts.on_this_host:
        return facts
    if own is None:
        warning = f"sized by a downloaded copy: {facts.unknown_because}"
    elif own <= copy <= (facts.listed_bytes or 0) * COPY_SLACK:
        return facts
    else:
        warning = f"sized by a downloaded copy of {copy} bytes; its source says {own}"
    sized = replace(facts, weight_bytes=copy, unknown_because="", warnings=(*facts.warnings, warning))
    return replace(sized, digest=digest_of(sized))


def digest_of(facts: ModelFacts) -> str:
    """Equal for facts that lead to the same decision."""
    hyper = asdict(facts.hyper) if facts.hyper else None
    decisive = [facts.weight_bytes, facts.unknown_because, facts.lora_bytes, facts.draft_bytes, hyper,
                facts.categories, facts.is_diffusers, facts.warnings]  # fmt: skip
    return sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()


def _dimensions(
    spec: ModelSpec, parts: ModelParts, categories: tuple[str, ...], label: str, warnings: list[str]
) -> HyperParameters | None:
    needed = _needed(spec, categories)
    error = parts.config_error
    if error is None and parts.config is None:
        error = ModelUnreadable(
            "no_config", f"{label} has no config.json", "add it, or set another backend", retryable=True
        )
    if error is None and parts.config is not None and not _omni(spec, categories):
        try:
            hyper = hyper_parameters(parts.config, f"{label}/config.json")
            if hyper.is_multimodal and hyper.vision_heads is None:
                warnings.append(f"{label}/config.json states no vision heads to check a split against")
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
