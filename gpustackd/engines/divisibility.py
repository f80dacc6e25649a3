"""By how many GPUs tensor parallelism can split a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Indivisible:
    """The first quantity that does not split: `what` of `value` over `by` GPUs."""

    what: str
    value: int
    by: int

    WORDS = {  # noqa: RUF012 - read only
        "num_attention_heads": "heads",
        "vision_heads": "vision heads",
        "vocab_size": "vocabulary entries",
    }

    def __str__(self) -> str:
        return f"{self.value} {self.WORDS[self.what]} cannot be split evenly over {self.by} GPUs"

    def as_params(self) -> Mapping[str, Any]:
        return {"what": self.what, "value": self.value, "by": self.by}


@dataclass(frozen=True, slots=True)
class Divisors:
    """Quantities that must split evenly; 0 = not known, and then not checked."""

    num_attention_heads: int = 0
    vision_heads: int = 0
    vocab_size: int = 0

    def complaint(self, n: int) -> Indivisible | None:
        """What keeps n GPUs from sharing the model; None for n <= 0 (nothing to complain of)."""
        if n <= 0:
            return None
        for what in ("num_attention_heads", "vision_heads", "vocab_size"):
            value = getattr(self, what)
            if value and value % n:
                return Indivisible(what, value, n)
        return None

    def allowed(self, least: int, most: int) -> tuple[int, ...]:
        """The numbers of GPUs from `least` to `most` that can share the model."""
        return _allowed(self, least, most)

    def allows(self, n: int) -> bool:
        """Whether n GPUs can share the model; never for n <= 0."""
        return n > 0 and self.complaint(n) is None


@lru_cache(maxsize=4096)
def _allowed(divisors: Divisors, least: int, most: int) -> tuple[int, ...]:
    # asked for every type of card of a search, and again whenever workers change
    return tuple(n for n in range(least, most + 1) if divisors.allows(n))
