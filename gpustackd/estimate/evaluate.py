"""Before scheduling: what the files of a model say about its row, and why it may not run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_facts import GgufFacts
from gpustackd.domain.model_spec import SKIP_EVALUATION, ModelSpec
from gpustackd.domain.outcome import Reason
from gpustackd.engines import vllm
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.registry import parallel_of
from gpustackd.errors import BadRow, ModelUnreadable
from gpustackd.estimate import categories as kinds
from gpustackd.estimate.categories import NOTHING, meta_of
from gpustackd.estimate.llama_cpp.classify import distributable

STAGE = "evaluate"
REMEDIES = "choose another engine, pin its version or its image, or define a backend of your own"
DISTRIBUTING = ("vLLM", "MindIE", "SGLang")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What to fill in, and why the model may not run. Inside the daemon problems are logged, not final."""

    categories: tuple[str, ...]
    """In effect: those of the row, else the detected ones."""
    meta: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    problems: tuple[Reason, ...] = ()
    writes: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Columns of the row to set where they are empty: `categories`, `meta`, `gpu_selector` (JSON shape),
    `distributed_inference_across_workers`."""


def evaluate(
    spec: ModelSpec,
    facts: ModelFacts | None,
    error: ModelUnreadable | None = None,
    *,
    needs_remote_code: bool | None = None,
) -> Evaluation:
    """Check one model. `facts` None with `error` = its configuration could not be read;
    `needs_remote_code` = its configuration class is code of its repository (None = judge by what the
    configuration says). Never raises."""
    if spec.is_gguf:
        return _gguf(spec, facts)
    if facts is not None and facts.is_diffusers and (not spec.categories or kinds.IMAGE in spec.categories):
        return _filled(spec, (kinds.IMAGE,), NOTHING, ())
    config = facts.config if facts is not None else NOTHING
    remote = kinds.needs_remote_code(config) if needs_remote_code is None else needs_remote_code
    names, problems = _architectures(spec)
    if names is None:
        names = ()
        if error is not None and not may_skip_check(spec):
            problems += (_problem("config_unreadable", str(error), error=error.code),)
        elif remote and not trusts_remote_code(spec) and not may_skip_check(spec):
            problems += (_remote_code(),)
        elif facts is not None:
            names = facts.hyper.architectures if facts.hyper else _stated(config)
            if not names and not may_skip_check(spec):
                problems += (
                    _problem("architecture_unknown", f"config.json names no architecture; {REMEDIES}"),
                )
    found = kinds.detect(names)
    if names and found == kinds.UNKNOWN and spec.effective_backend == "vLLM" and not kinds.is_pinned(spec):
        listed = ", ".join(names)[:200]
        problems += (
            _problem("unsupported_architecture", f"vLLM is not known to run {listed}; {REMEDIES}",
                     architectures=list(names)),
        )  # fmt: skip
    return _filled(spec, in_effect(spec, names), meta_of(names, config), problems)


def _gguf(spec: ModelSpec, facts: ModelFacts | None) -> Evaluation:
    """A GGUF model: its header says what it is for, and GPUs picked on several workers ask for a placement
    over several."""
    writes: dict[str, Any] = {}
    header = facts.gguf if facts is not None else None
    categories = spec.categories
    if not categories and facts is not None and facts.categories:
        categories = facts.categories
        writes["categories"] = list(categories)
    several = len({gpu.worker for gpu in spec.gpu_ids}) > 1
    unsaid = spec.distributed_inference_across_workers is None
    if several and unsaid and isinstance(header, GgufFacts) and distributable(header):
        writes["distributed_inference_across_workers"] = True
    return Evaluation(categories, writes=MappingProxyType(writes))


def in_effect(
    spec: ModelSpec, architectures: tuple[str, ...], *, is_diffusers: bool = False
) -> tuple[str, ...]:
    """Categories of the row, else what the architectures say, else `llm`."""
    if is_diffusers and (not spec.categories or kinds.IMAGE in spec.categories):
        return (kinds.IMAGE,)
    if spec.categories:
        return spec.categories
    found = kinds.guess(architectures)
    return (kinds.LLM,) if found == kinds.UNKNOWN else (found,)


def overridden_architectures(spec: ModelSpec) -> tuple[str, ...] | None:
    """Architectures of the last `--hf-overrides` of a vLLM model. Raise BadRow where it is no JSON object."""
    if spec.effective_backend != "vLLM":
        return None
    return vllm.overridden_architectures(parse_flags(spec.backend_parameters))


def may_skip_check(spec: ModelSpec) -> bool:
    """Whether the tables do not apply: the user chose engine, version, image or tokenizer mode."""
    backend = spec.effective_backend
    if backend not in kinds.BUILT_IN or kinds.is_pinned(spec):
        return True
    try:
        return parse_flags(spec.backend_parameters).has("tokenizer-mode")
    except BadRow:
        return False


def trusts_remote_code(spec: ModelSpec) -> bool:
    """Whether the model's own flags allow code of its repository (in the engine; never here)."""
    try:
        return parse_flags(spec.backend_parameters).flag("trust-remote-code")
    except BadRow:
        return False


def _architectures(spec: ModelSpec) -> tuple[tuple[str, ...] | None, tuple[Reason, ...]]:
    try:
        return overridden_architectures(spec), ()
    except BadRow as e:
        return None, (_problem("bad_parameters", str(e)),)


def _stated(config: Mapping[str, Any]) -> tuple[str, ...]:
    raw = config.get("architectures")
    return tuple(x for x in raw if isinstance(x, str)) if isinstance(raw, (list, tuple)) else ()


def _filled(
    spec: ModelSpec, categories: tuple[str, ...], meta: Mapping[str, Any], problems: tuple[Reason, ...]
) -> Evaluation:
    writes: dict[str, Any] = {}
    if categories != spec.categories:
        writes["categories"] = list(categories)
    if meta:
        writes["meta"] = dict(meta)
    if (per := gpus_per_replica(spec)) and spec.gpu_selector is not None:
        picked = [f"{g.worker}:{g.type}:{g.index}" for g in spec.gpu_selector.gpu_ids]
        writes["gpu_selector"] = {"gpu_ids": picked, "gpus_per_replica": per}
        if spec.gpu_selector.allow_overcommit:
            writes["gpu_selector"]["allow_overcommit"] = True
    if spec.distributed_inference_across_workers is None:
        writes["distributed_inference_across_workers"] = spec.effective_backend in DISTRIBUTING
    if spec.env.get(SKIP_EVALUATION):
        problems = ()
    return Evaluation(categories, meta, problems, MappingProxyType(writes))


def _remote_code() -> Reason:
    return _problem(
        "needs_trust_remote_code",
        "the model brings code of its own for its configuration; add --trust-remote-code to its"
        " backend_parameters if you trust it",
    )


def _problem(code: str, text: str, **params: Any) -> Reason:
    return Reason(code, STAGE, text, MappingProxyType(params))


def gpus_per_replica(spec: ModelSpec) -> int | None:
    """The figure to write, or None where there is nothing to fill in: no picked GPUs, or already stated.

    0 = fewer GPUs were picked than there are replicas; a caller should refuse instead of writing it.
    """
    selector = spec.gpu_selector
    if selector is None or not selector.gpu_ids or selector.gpus_per_replica:
        return None
    backend = spec.effective_backend
    if backend == "VoxBox":
        return 1
    base = len(selector.gpu_ids) // (spec.replicas or 1)
    if spec.skips_gpu_count_check:
        return base
    if spec.backend_parameters and (world := _world_size(spec)):
        return world
    return 1 << (base.bit_length() - 1) if base else 0


def _world_size(spec: ModelSpec) -> int | None:
    try:
        flags = parse_flags(spec.backend_parameters)
        return parallel_of(spec.effective_backend, flags).world
    except BadRow:
        return None  # the search names the flag at fault; filling in is no place to stop at it
