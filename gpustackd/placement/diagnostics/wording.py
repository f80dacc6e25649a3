"""Words for people: a few names out of many, sizes in GiB."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 1024**3


def some(names: Sequence[str], shown: int = 3, of: int | None = None) -> str:
    """The first names and how many more there are (of `of` in all); each cut to a length that cannot
    flood a message."""
    cut = [n if len(n) <= 64 else n[:61] + "..." for n in names[:shown]]
    more = (len(names) if of is None else of) - len(cut)
    return ", ".join(cut) + (f" and {more} more" if more > 0 else "")


def gib(size: float) -> str:
    """`12.34 GiB`."""
    return f"{size / GIB:.2f} GiB"


def gib_number(size: float) -> float:
    """GiB with two decimals, as data."""
    return round(size / GIB, 2)
