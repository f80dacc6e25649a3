"""Ascend chips by name and the variant of the images built for them."""

from __future__ import annotations

import re
from collections.abc import Sequence

FALLBACK = "910b"
"""What a worker takes for a chip that it cannot name."""

_NAMES: Sequence[tuple[str, str]] = (
    (r"910(pro)?[ab]|910premiuma", "910"),
    (r"310p\d+\w*", "310p"),
    (r"910b\d\w*(-\d+)?", "910b"),
    (r"310b\d\w*", "310b"),
    (r"910_?93\w*|910", "a3"),
    (r"910_?95\w*|950\w*", "950"),
)
_PATTERNS = tuple((re.compile(pattern), variant) for pattern, variant in _NAMES)


def variant(soc: str) -> str | None:
    """The variant for the name of a chip (`Ascend910B3` -> `910b`); None where the chip is not known."""
    name = soc.strip().lower().removeprefix("ascend").lstrip(" -_")
    return next((v for pattern, v in _PATTERNS if pattern.fullmatch(name)), None)


def variant_of_product(product: str) -> str | None:
    """The variant that the name of a product tells, where it names the chip. `910B` without a number stands
    for two generations and says nothing."""
    return None if re.fullmatch(r"(?i)(ascend)?[ -_]*910b?", product.strip()) else variant(product)
