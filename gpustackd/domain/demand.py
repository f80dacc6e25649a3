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
    """RAM to write into every claim; None = none, or by `ram_ratio`."""
    ram_ratio: float | None = None
    """RAM per VRAM claimed on that worker, where no static amount is given."""
    sequence: int | None = None
    """KV cache of one sequence of the longest length that the engine accepts, over all GPUs of one copy;
    None = not known. No part of the claim: a booking that cannot hold it deserves a warning."""
    unknown_because: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """Everything about one model that a decision looks at. Equal keys share one pass over the fleet."""

    spec: ModelSpec
    facts: ModelFacts = field(compare=False)
    need: Need
    engine: Engine
    digest: str = ""
    """Digest of facts and estimate; with the spec it is the identity of this demand."""
    gguf: GgufNeed | None = field(default=None, compare=False)
    """Sizes by number of layers on GPUs, where the model is a GGUF file."""

    @property
    def categories(self) -> tuple[str, ...]:
        return self.spec.categories or self.facts.categories
