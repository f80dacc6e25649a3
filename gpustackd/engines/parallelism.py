"""Parallel sizes that an engine's flags give, and their product: how many GPUs they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpustackd.engines.flags import COLUMN, BackendParameters
from gpustackd.errors import BadRow

MOST = 1_000_000
"""No engine runs with a larger size; beyond it products would leave 64 bits."""


@dataclass(frozen=True, slots=True)
class WorldSize:
    """Parallel sizes that flags give: their product, and which flags they are."""

    size: int
    labels: tuple[str, ...]


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
