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


def of_needed(free: float, need: float) -> str:
    """`12.34 of the 56.78 GiB needed`, from bytes; where it is not the size that is short, both sizes."""
    if free >= need:
        return f"{gib(free)}, {gib(need)} needed"
    return f"{free / GIB:.2f} of the {gib(need)} needed"


def not_enough_ram(where: str, name: str, free: int, need: int) -> str:
    """Workers (`where`) without enough RAM; `name` is the one with the most free. Sizes in bytes."""
    return f"not enough RAM on {where}; {name} has the most free, {of_needed(free, need)}"


def cpu_ram(name: str, free: int, need: int) -> str:
    """What CPU inference lacks on `name`, the worker with the most free RAM. Sizes in bytes."""
    return f"without a GPU: not enough RAM; {name} has the most free, {of_needed(free, need)}"
