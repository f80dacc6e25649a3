"""What one instance of a model asks of the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.gguf_levels import GgufNeed
from gpustackd.domain.model_spec import ModelSpec


class Engine(StrEnum):
    """Which selector searches for a place."""

    ROUTER = "router"
    WHOLE_CARD = "whole_card"
    VGPU = "vgpu"
    GGUF = "gguf"
    MINDIE = "mindie"
    VLLM = "vllm"
    SGLANG = "sglang"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class Need:
    """How much memory an instance needs, in bytes; produced by `estimate`, used by `placement`."""

    vram: int | None
    """What all GPUs together must offer; None = size unknown."""
    ram: int = 0
    """Host RAM to check before a search, per worker; 0 = no check."""
    ram_static: int | None = None
    """RAM of every claim; None = none, or by `ram_ratio`."""
    ram_ratio: float | None = None
    """RAM per byte of VRAM claimed on a worker, where `ram_static` is None."""
    sequence: int | None = None
    """KV cache of one sequence of the longest length that the engine accepts, over all GPUs of one copy;
    None = unknown. It is not part of the claim: a booking that cannot hold it gets a warning."""
    unknown_because: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything about one model that a decision looks at. Equal demands share one search."""

    spec: ModelSpec
    facts: ModelFacts = field(compare=False)
    need: Need
    engine: Engine
    digest: str = ""
    """Digest of facts and estimate; together with the spec it identifies the demand."""
    gguf: GgufNeed | None = field(default=None, compare=False)
    """Sizes by number of layers on GPUs, where the model is a GGUF file."""

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories of the model, else the detected ones."""
        return self.spec.categories or self.facts.categories
