"""The claim that decides placement: what all GPUs together must offer, and host RAM."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import VRAM_CLAIM, ModelSpec
from gpustackd.estimate.categories import IMAGE, TEXT_TO_SPEECH, is_llm

MIB = 1024**2
GIB = 1024**3
FACTOR = 1.2
SPEECH_FACTOR = 3.0
LLM_OVERHEAD = 2 * GIB
OVERHEAD = 512 * MIB
DEFAULT_RAM_RATIO = 1.2
LARGEST = 2**62
"""No claim is larger: sums over a fleet stay inside 64 bits."""


@dataclass(frozen=True, slots=True)
class VramClaim:
    """Bytes of VRAM and how they come about. `vram` None = the size of the weights is unknown."""

    vram: int | None
    weights: int | None = None
    lora: int = 0
    draft: int = 0
    allowance: int = 0
    """What the factor of the formula adds to the weights."""
    overhead: int = 0
    overridden: bool = False
    unknown_because: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RamClaim:
    """Bytes of host RAM per worker: `static` if given, else `ratio` times the VRAM claimed there."""

    static: int | None = None
    ratio: float | None = None

    @property
    def check(self) -> int:
        """What a worker must have free before a search; 0 = nothing to check."""
        return self.static or 0


def override(env: Mapping[str, str], key: str = VRAM_CLAIM) -> tuple[int | None, tuple[str, ...]]:
    """An amount of bytes set in a model's env, or None; and a warning where what is set cannot be used."""
    raw = str(env.get(key, "")).strip()
    if not raw:
        return None, ()
    try:
        amount = int(raw) if len(raw) <= 40 else -1
    except ValueError:
        amount = -1
    if not 0 <= amount <= LARGEST:
        return None, (f"{key} is {raw[:40]!r}, not a number of bytes; it is not used",)
    return amount, ()


def vram_claim(
    spec: ModelSpec, facts: ModelFacts, categories: Collection[str], *, count_draft: bool = False
) -> VramClaim:
    """The env override as it stands; of image pipelines the weights; else
    `int((weights + lora) * factor) + overhead`. `count_draft` adds the weights of a speculative draft
    model, which is a preference and off by default."""
    forced, warnings = override(spec.env)
    if forced is not None:
        return VramClaim(forced, facts.weight_bytes, overridden=True, warnings=warnings)
    weights = facts.weight_bytes
    if weights is None:
        because = facts.unknown_because or "the size of its weights is not known"
        return VramClaim(None, unknown_because=because, warnings=warnings)
    if IMAGE in categories:
        return _bounded(VramClaim(weights, weights, warnings=warnings))
    draft = facts.draft_bytes if count_draft else 0
    factor = SPEECH_FACTOR if TEXT_TO_SPEECH in categories else FACTOR
    overhead = LLM_OVERHEAD if is_llm(categories) else OVERHEAD
    loaded = weights + facts.lora_bytes + draft
    scaled = int(loaded * factor)
    return _bounded(
        VramClaim(
            scaled + overhead, weights, facts.lora_bytes, draft, scaled - loaded, overhead, warnings=warnings
        )
    )


def _bounded(claim: VramClaim) -> VramClaim:
    if claim.vram is not None and claim.vram > LARGEST:
        return VramClaim(
            None, unknown_because=f"files of {claim.weights} bytes cannot be real", warnings=claim.warnings
        )
    return claim


def kv_cache_ram(extended: Mapping[str, Any] | None) -> tuple[RamClaim, tuple[str, ...]]:
    """Host RAM of an extended KV cache in local mode: `ram_size` GiB before `ram_ratio`."""
    if not extended or not extended.get("enabled") or extended.get("mode") == "shared":
        return RamClaim(), ()
    size, bad_size = _positive(extended, "ram_size")
    if size:
        return RamClaim(static=int(size * GIB)), bad_size
    ratio, bad_ratio = _positive(extended, "ram_ratio")
    if ratio is None and not bad_ratio:
        ratio = DEFAULT_RAM_RATIO
    return RamClaim(ratio=ratio or None), bad_size + bad_ratio


def _positive(extended: Mapping[str, Any], key: str) -> tuple[float | None, tuple[str, ...]]:
    raw = extended.get(key)
    if raw is None:
        return None, ()
    if isinstance(raw, (int, float)) and not isinstance(raw, bool) and 0 <= raw < LARGEST / GIB:
        return raw, ()
    return None, (f"extended_kv_cache.{key} is {str(raw)[:40]!r}, not a number; it is not used",)
