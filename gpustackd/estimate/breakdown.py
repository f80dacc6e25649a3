"""What an engine will really need, part by part: for people, beside the claim that decides placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.demand import Engine
from gpustackd.domain.facts import HyperParameters, ModelFacts
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.parallelism import Parallel
from gpustackd.engines.registry import parallel_of, serving_flags
from gpustackd.engines.serving import ServingFlags
from gpustackd.estimate.answer import common_fields
from gpustackd.estimate.claim import GIB, vram_claim
from gpustackd.estimate.demand import build_demand
from gpustackd.estimate.kv_cache import KvCache, cache_of
from gpustackd.estimate.overhead import activation, runtime_overhead


@dataclass(frozen=True, slots=True)
class PerGpu:
    """Bytes on one GPU of an instance."""

    weights: int
    compute: int
    overhead: int
    kv_per_token: int = 0
    kv_sequence: int = 0
    """One sequence of the longest length that the engine accepts."""

    @property
    def total(self) -> int:
        """With one such sequence."""
        return self.weights + self.compute + self.overhead + self.kv_sequence


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The answer of `gpustackd estimate` for everything but GGUF. Bytes; None = not known."""

    source: str
    backend: str
    architecture: str | None
    categories: tuple[str, ...]
    weights: int | None
    claim_vram: int | None
    claim_ram: int
    parts: Mapping[str, int]
    """Over all GPUs of one copy of the model; `allowance` is what the claim adds for safety."""
    per_gpu: PerGpu | None
    parallel: Parallel
    max_len: int | None
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The answer of `estimate -o json`; keys may be added, none is renamed or removed. Sizes in bytes."""
        each = self.per_gpu
        return {
            **common_fields(self),
            "tensor_parallel_size": self.parallel.tp,
            "pipeline_parallel_size": self.parallel.pp,
            "max_model_len": self.max_len,
            "per_gpu": None
            if each is None
            else {
                "weights": each.weights,
                "kv_cache_per_token": each.kv_per_token,
                "kv_cache_sequence": each.kv_sequence,
                "compute": each.compute,
                "overhead": each.overhead,
                "total": each.total,
            },
            "warnings": list(self.warnings),
        }


def breakdown(
    spec: ModelSpec,
    facts: ModelFacts,
    *,
    booked: int | None = None,
    layout: Parallel | None = None,
) -> Breakdown:
    """Take the need of one instance apart. `booked`: bytes that a placement books over all GPUs of one copy
    (such as 0.9 of each card); without it the claim itself is looked at. `layout`: sizes that the placement
    chose, where the flags leave them open. Raise BadRow for flags that cannot be read."""
    demand = build_demand(spec, facts)
    categories = demand.categories
    backend = spec.effective_backend
    flags = parse_flags(spec.backend_parameters)
    parallel = parallel_of(backend, flags)
    if layout is not None and parallel.world is None:
        parallel = layout
    hyper = facts.hyper or HyperParameters()
    serving = serving_flags(backend, flags, hyper)
    cache = cache_of(facts, categories, serving, parallel)
    each = _per_gpu(facts, serving, parallel, cache)
    count = parallel.tp * parallel.pp
    claim = vram_claim(spec, facts, categories)
    parts: dict[str, int] = {}
    if each is not None and facts.weight_bytes is not None:
        parts = {
            "weights": facts.weight_bytes,
            "kv_cache": each.kv_sequence * count,
            "compute": each.compute * count,
            "overhead": each.overhead * count,
        }
        if facts.lora_bytes:
            parts["lora"] = facts.lora_bytes
        if facts.draft_bytes:
            parts["draft"] = facts.draft_bytes
        if not claim.overridden and demand.engine is not Engine.MINDIE:
            parts["allowance"] = claim.allowance
    warnings = [*facts.warnings, *demand.need.warnings]
    if demand.need.vram is None:
        warnings.append(f"the claim is not known: {demand.need.unknown_because}")
    if (text := _sequence_warning(demand.need.vram, booked, parts, serving)) is not None:
        warnings.append(text)
    return Breakdown(
        source=spec.source.value if spec.source else "",
        backend=backend,
        architecture=_architecture(facts),
        categories=categories,
        weights=facts.weight_bytes,
        claim_vram=demand.need.vram,
        claim_ram=demand.need.ram,
        parts=parts,
        per_gpu=each,
        parallel=parallel,
        max_len=serving.max_len if facts.hyper else None,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _architecture(facts: ModelFacts) -> str | None:
    """The first one named; for models without dimensions (speech, images) by the configuration alone."""
    if facts.hyper is not None and facts.hyper.architectures:
        return facts.hyper.architectures[0]
    named = facts.config.get("architectures")
    first = named[0] if isinstance(named, (list, tuple)) and named else named
    return first if isinstance(first, str) else None


def _per_gpu(
    facts: ModelFacts, serving: ServingFlags, parallel: Parallel, cache: KvCache | None
) -> PerGpu | None:
    if facts.weight_bytes is None:
        return None
    loaded = facts.weight_bytes + facts.lora_bytes + facts.draft_bytes
    world = parallel.world or parallel.tp * parallel.pp
    hyper = facts.hyper or HyperParameters()
    return PerGpu(
        weights=_weights_per_gpu(loaded, parallel.tp, parallel.pp),
        compute=activation(hyper, facts.config, serving, parallel.tp),
        overhead=runtime_overhead(world, graphs=not serving.eager and cache is not None),
        kv_per_token=cache.per_token if cache else 0,
        kv_sequence=cache.sequence(serving.max_len) if cache else 0,
    )


def _sequence_warning(
    claim: int | None, booked: int | None, parts: Mapping[str, int], serving: ServingFlags
) -> str | None:
    """A warning where what is booked has no room for one sequence beside everything else."""
    held = booked if booked is not None else claim
    need = sum(parts.get(k, 0) for k in ("weights", "lora", "draft", "kv_cache", "compute", "overhead"))
    if held is None or not parts.get("kv_cache") or need <= held:
        return None
    what = "the booked share" if booked is not None else "a share of the size of the claim"
    return (
        f"{what} ({held / GIB:.2f} GiB) does not hold one sequence of {serving.max_len} tokens"
        f" (cache {parts['kv_cache'] / GIB:.2f} GiB, {need / GIB:.2f} GiB in all): set a shorter maximum"
        " length, or give it more memory"
    )


def _weights_per_gpu(weights: int, tp: int, pp: int) -> int:
    """Bytes on each of `tp * pp` GPUs: engines split every large matrix evenly, embeddings by vocabulary;
    what they repeat (norms, biases) is far below a thousandth."""
    return -(-weights // (tp * pp))
