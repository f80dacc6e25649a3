"""Words that refusals and suggestions share: counts, a few names out of many, sizes in GiB, RAM."""

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


def plural(count: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def workers(count: int) -> str:
    """`1 worker`, `2 workers`."""
    return plural(count, "worker")


def have(count: int) -> str:
    """The verb for so many of them."""
    return "has" if count == 1 else "have"


def too_little_ram(name: str, free: int, need: int) -> str:
    """What is told of workers without enough RAM; `name` is the one with most of it. Sizes in bytes."""
    return f"too little RAM; the most is free on {name}: {gib(free)} of the {gib(need)} needed"
