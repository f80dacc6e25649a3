"""Names of the instances that the daemon adds: `<model>-<ordinal>`, the lowest free ones."""

from __future__ import annotations

from collections.abc import Collection
from itertools import count, islice


def free_names(model: str, number: int, taken: Collection[str], role: str | None = None) -> list[str]:
    """`number` names that are not taken, lowest ordinal first; members of a role are `<model>-<role>-<n>`.

    The same rows give the same names, so a plan can predict them.
    """
    stem = f"{model}-{role}" if role else model
    held = set(taken)
    return list(islice((name for n in count(1) if (name := f"{stem}-{n}") not in held), number))
