"""One measured figure beside the bound that is set for it, and all of them as one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Figure:
    """`bound` None = printed only. `at_most`: small is good (times, bytes); else large is good (rates)."""

    row: str
    what: str
    value: float
    unit: str = ""
    bound: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better than the bound: 1 or more reaches it, whichever way is good."""
        if self.bound is None or not self.value or not self.bound:
            return None
        return self.bound / self.value if self.at_most else self.value / self.bound

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.row, "what": self.what, "value": round(self.value, 6), "unit": self.unit,
            "bound": self.bound, "bound_is": "at_most" if self.at_most else "at_least",
            "ratio": None if self.ratio is None else round(self.ratio, 3), "note": self.note,
        }  # fmt: skip


def number(value: float) -> str:
    """Three significant digits, thousands apart."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def as_table(figures: Sequence[Figure]) -> Table:
    """Rows in order; a row's name once."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("ROW", "WHAT", "FIGURE", "BOUND", "RATIO", "NOTE"):
        made.add_column(heading, justify="right" if heading in ("FIGURE", "BOUND", "RATIO") else "left")
    last = ""
    for f in figures:
        bound = "-" if f.bound is None else f"{'<=' if f.at_most else '>='} {number(f.bound)}"
        ratio = (
            Text("-") if f.ratio is None else Text(f"{f.ratio:.2f}", "green" if f.ratio >= 1 else "yellow")
        )
        name = "" if f.row == last else f.row
        last = f.row
        made.add_row(name, f.what, f"{number(f.value)} {f.unit}".strip(), bound, ratio, f.note)
    return made


def as_json(figures: Sequence[Figure], machine: dict[str, Any], command: str) -> str:
    return json.dumps(
        {"machine": machine, "command": command, "figures": [f.as_json() for f in figures]}, indent=2
    )
