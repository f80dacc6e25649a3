"""The mix of demands to come, as kinds with weights: what strategy `fragmentation` keeps capacity for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DemandShape:
    """A kind of demand: so many cards of one worker, each with `size` bytes free and a part of it."""

    gpus: int
    size: int = 0
    share: float = 0.0
    """Part of the card, 0..1, that must be free whatever its size."""


WHOLE = tuple(DemandShape(n, 0, 1.0) for n in (1, 2, 4, 8))
"""Whole cards: what capacity is kept for where nothing is known of what comes."""


@dataclass(frozen=True, slots=True, eq=False)
class Mix:
    """Kinds of demands with weights that add up to 1. Compared by identity: a new one has all costs
    worked out anew."""

    shapes: tuple[DemandShape, ...] = WHOLE
    weights: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    columns: tuple[NDArray[Any], ...] = field(init=False, repr=False)
    """GPUs, sizes, shares and weights as (K, 1, 1)."""

    def __post_init__(self) -> None:
        parts = (
            np.array([s.gpus for s in self.shapes], np.int64),
            np.array([max(s.size, 1) for s in self.shapes], np.int64),
            np.array([s.share for s in self.shapes], np.float64),
            np.array(self.weights, np.float64),
        )
        object.__setattr__(self, "columns", tuple(p[:, None, None] for p in parts))


UNKNOWN_MIX = Mix()
