"""What a case says against what production does, one finding at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing that a case expects, and what production gives for it."""

    what: str
    """Its name, such as `place`, `score`, `message.best_gpu.allocatable_gib`."""
    expected: Any
    got: Any
    tolerance: float = 1e-9
    """Relative, for numbers."""

    @property
    def equal(self) -> bool:
        return agree(self.got, self.expected, self.tolerance)


@dataclass(frozen=True)
class OneOf:
    """Any of these values is right."""

    values: tuple[Any, ...]

    @classmethod
    def of(cls, values: Iterable[Any]) -> OneOf:
        return cls(tuple(values))


@dataclass(frozen=True)
class Between:
    """Any number from `least` to `most` is right."""

    least: float
    most: float


@dataclass(frozen=True)
class Tells:
    """A text is right that has all of these in it."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Holds:
    """A value is right of which `complaint` has nothing to say (None)."""

    rule: str
    complaint: Callable[[Any], str | None]


def agree(got: Any, wanted: Any, tolerance: float = 1e-9) -> bool:
    """Whether a value is the one that is wanted. Whole numbers are equal or not; others agree up to a
    relative tolerance."""
    if isinstance(wanted, OneOf):
        return any(agree(got, v, tolerance) for v in wanted.values)
    if isinstance(wanted, Between):
        return isinstance(got, (int, float)) and wanted.least <= got <= wanted.most
    if isinstance(wanted, Tells):
        return isinstance(got, str) and all(w in got for w in wanted.words)
    if isinstance(wanted, Holds):
        return wanted.complaint(got) is None
    if isinstance(wanted, Mapping):
        return (
            isinstance(got, Mapping)
            and got.keys() == wanted.keys()
            and all(agree(got[k], v, tolerance) for k, v in wanted.items())
        )
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return (
            isinstance(got, Sequence)
            and not isinstance(got, str)
            and len(got) == len(wanted)
            and all(agree(g, w, tolerance) for g, w in zip(got, wanted, strict=True))
        )
    if isinstance(wanted, bool) or isinstance(got, bool) or wanted is None or got is None:
        return got is wanted
    if isinstance(wanted, int) and isinstance(got, int):
        return got == wanted
    if isinstance(wanted, (int, float)) and isinstance(got, (int, float)):
        return math.isclose(got, wanted, rel_tol=tolerance, abs_tol=tolerance)
    return bool(got == wanted)


def why_not(got: Any, wanted: Any) -> str:
    """What is wrong with a value, for people."""
    if isinstance(wanted, Holds):
        return f"{wanted.rule}: {wanted.complaint(got)}; it is {got!r}"
    return f"{got!r}, not {wanted!r}"
