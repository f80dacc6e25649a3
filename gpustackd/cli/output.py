"""Output of commands: JSON of a stable shape or tables for people, and how values look in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 200
"""Columns where the output is no terminal: wide enough that tables are not cut."""

STATE_STYLES = {
    "RUNNING": "green",
    "READY": "green",
    "SCHEDULED": "cyan",
    "INITIALIZING": "cyan",
    "DOWNLOADING": "cyan",
    "STARTING": "cyan",
    "PENDING": "yellow",
    "ANALYZING": "yellow",
    "MAINTENANCE": "yellow",
    "NOT_READY": "red",
    "UNREACHABLE": "red",
    "ERROR": "red",
}


def console(*, stderr: bool = False) -> Console:
    """A console for people; without colours, and without wrapping, where the output is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, highlight=False, soft_wrap=False, width=None if stream.isatty() else PIPED_WIDTH
    )


def print_json(value: Any) -> None:
    """The value, indented; what JSON does not know as text."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(
    out: Console, headings: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()
) -> None:
    """A table without lines; columns named in `right` are aligned to the right. In a terminal cells are
    wrapped to fit; elsewhere a row is a line, however long."""
    right = set(right)
    cells = [[cell if isinstance(cell, Text) else Text(_shown(cell)) for cell in row] for row in rows]
    if out.is_terminal:
        made = Table(box=None, pad_edge=False, header_style="bold")
        for heading in headings:
            made.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
        for row in cells:
            made.add_row(*row)
        out.print(made)
        return
    lines = [list(headings), *([cell.plain for cell in row] for row in cells)]
    widths = [max(cell_len(line[n]) for line in lines) for n in range(len(headings))]
    for line in lines:
        padded = []
        for cell, width, heading in zip(line, widths, headings, strict=True):
            gap = " " * (width - cell_len(cell))
            padded.append(gap + cell if heading in right else cell + gap)
        out.out("  ".join(padded).rstrip(), highlight=False)


def print_text(out: Console, text: str, indent: str = "  ", first: str | None = None) -> None:
    """A sentence or an item (`- …`) behind an indent (`first` for its first line), wrapped at words in a
    terminal; elsewhere one line, however long."""
    start = indent if first is None else first
    lines = [start + text]
    if out.is_terminal:
        hanging = indent + "  " if text.startswith("- ") else indent
        lines = wrap(
            text,
            max(out.width, 40),
            initial_indent=start,
            subsequent_indent=hanging,
            break_on_hyphens=False,
            break_long_words=False,
        )
    for line in lines:
        out.out(line, highlight=False)


def state(word: str) -> Text:
    """The state of a worker or an instance, coloured by how well it is."""
    return Text(word, style=STATE_STYLES.get(word, ""))


def gib(size: int | None) -> str:
    """Bytes in GiB, as people compare cards; `?` where unknown."""
    return "?" if size is None else f"{size / 2**30:.1f} GiB" if size else "0"


def size_of(size: int | None) -> str:
    """Bytes in GiB or MiB, to the hundredth or tenth; empty where unknown."""
    if size is None:
        return ""
    if not size:
        return "0"
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def on_gpus(worker: str | None, gpu_type: str | None, indexes: Any) -> str:
    """`worker type:0,1`, or `worker cpu`: where a part of an instance is."""
    listed = ",".join(str(i) for i in as_list(indexes))
    return f"{worker} {gpu_type}:{listed}" if listed else f"{worker} cpu"


def as_list(value: Any) -> list[Any]:
    """A jsonb column that should hold a list; a user's statement may have written anything."""
    return value if isinstance(value, list) else []


def first_line(text: str | None, limit: int = 90) -> str:
    """The beginning of a message, for a table."""
    line = (text or "").strip().splitlines()[0] if text and text.strip() else ""
    return line if len(line) <= limit else line[: limit - 1] + "…"


def moment(iso: str | None) -> str:
    """A time for people, to the second."""
    return (
        "?" if iso is None else iso[:19].replace("T", " ") + (" UTC" if iso.endswith("+00:00") else iso[26:])
    )


def _shown(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return str(cell)
