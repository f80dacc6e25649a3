"""Sizes in bytes as people and Kubernetes write them: `80GiB`, `81559 MiB`, `81920Mi`, `1.5T`, `129e6`.

Units count in any case, with or without `B`: `k`, `M`, `G`, `T`, `P`, `E` are powers of 1000, with `i` of
1024.
A lower-case `m` alone is a thousandth of a byte, as in Kubernetes
(https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/).
"""

from __future__ import annotations

import re
from fractions import Fraction

MIB = 1024**2
MAX_SIZE = 2**62
"""Bytes; beyond any memory or disk."""

_FORM = re.compile(
    r"\+?(\d{1,24}(?:\.\d{0,24})?|\.\d{1,24})\s*(?:(e[+-]?\d{1,2})|([a-z]{0,5}))",
    re.ASCII | re.IGNORECASE,
)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}


def parse_size(raw: object) -> Fraction | None:
    """The exact number of bytes, which may be no whole number; None for anything that is no size.

    Takes a whole number or text; never raises.
    """
    if isinstance(raw, int) and not isinstance(raw, bool):
        return Fraction(raw) if raw >= 0 else None
    match = _FORM.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        return None
    number, exponent, unit = match.groups()
    scale = _scale(unit or "") if exponent is None else Fraction(10) ** int(exponent[1:])
    return None if scale is None else Fraction(f"0{number}".rstrip(".")) * scale


def _scale(unit: str) -> Fraction | None:
    if unit == "m":
        return Fraction(1, 1000)
    word = unit.lower().removesuffix("bytes").removesuffix("b")
    power = _POWERS.get(word.removesuffix("i"))
    if power is None or word == "i":
        return None
    return Fraction((1024 if word.endswith("i") else 1000) ** power)


def quantity(raw: object) -> int | None:
    """Whole bytes, fractions cut off; None for what is no size, or is more than `MAX_SIZE`."""
    size = parse_size(raw)
    return None if size is None or size > MAX_SIZE else int(size)
