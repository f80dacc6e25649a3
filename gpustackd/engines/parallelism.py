"""Parallel sizes: how many GPUs an engine's flags ask for, and by how many a model can be split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.errors import BadRow

MOST = 1_000_000
"""No engine runs with a larger size; beyond it products would leave 64 bits."""


@dataclass(frozen=True, slots=True)
class WorldSize:
    """Parallel sizes that flags give: their product, and which flags they are."""

    size: int
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes by which estimates divide a model, whichever engine runs it. `world`: GPUs of one instance, None
    where the flags leave the number open."""

    tp: int = 1
    pp: int = 1
    world: int | None = None


def world(parameters: BackendParameters, flags: Sequence[tuple[str, Sequence[str]]]) -> WorldSize | None:
    """Product of the sizes given; None where no flag is given. Raises BadRow for a size <= 0."""
    size, labels = 1, []
    for label, names in flags:
        value = positive(parameters, names)
        if value is not None:
            size *= value
            labels.append(label)
    return WorldSize(size, tuple(labels)) if labels else None


def positive(parameters: BackendParameters, names: Sequence[str]) -> int | None:
    """A size given by a flag. Raises BadRow naming flag and value where it is not from 1 to `MOST`."""
    value = parameters.integer(*names)
    if value is not None and value <= 0:
        raise BadRow(COLUMN, f"--{names[0]} is {value}, it must be positive")
    if value is not None and value > MOST:
        raise BadRow(COLUMN, f"--{names[0]} is {value}, it must be at most {MOST}")
    return value


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
        """The complaint as data of a refusal."""
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
