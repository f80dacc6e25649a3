"""A picture of the fleet: a row for each worker, a bar for each card, and the instances on it.

Fits into 100 columns; a worker with many cards takes several lines. Without a terminal it is plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from gpustackd.cli.output import STATE_STYLES
from gpustackd.store.postgres.inventory import by_worker

Row = Mapping[str, Any]

WIDTH = 100
BAR = 4
"""Characters of one bar; eighths make it finer."""
CELL = 21
"""Columns of one card: its bar, a space, and its holders' names."""
NAME = 14

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = ("cyan", "green", "magenta", "blue", "yellow", "bright_cyan", "bright_green", "bright_magenta",
            "bright_blue", "bright_yellow")  # fmt: skip


def picture(workers: Sequence[Row], gpus: Sequence[Row], width: int = WIDTH) -> Text:
    """The fleet as text. `workers` and `gpus` are rows of `Inventory.rows`."""
    cards = by_worker(gpus)
    colours = _colours(gpus)
    per_line = max(1, (width - NAME - 2) // CELL)
    out = Text()
    for worker in workers:
        out.append(_clip(worker["name"], NAME).ljust(NAME), style="bold")
        out.append("  ")
        out.append(_headline(worker, cards.get(worker["name"], ())))
        out.append("\n")
        mine = cards.get(worker["name"], [])
        for start in range(0, len(mine), per_line):
            out.append(" " * (NAME + 2))
            for gpu in mine[start : start + per_line]:
                out.append_text(_card(gpu, colours, worker["state"] == "READY"))
            out.rstrip()
            out.append("\n")
    return out


def legend(gpus: Sequence[Row]) -> str:
    """How full the cards are, in a line."""
    known = [g for g in gpus if g["capacity"]]
    held = sum(bool(g["instances"]) for g in known)
    booked = sum(g["vram_allocated"] for g in known)
    offered = sum(g["capacity"] for g in known if g["open"])
    share = f"{100 * booked / offered:.0f} %" if offered else "none"
    return f"{held} of {len(known)} cards in use, {share} of the open memory booked"


def bar(share: float, width: int = BAR) -> str:
    """`share` (0 to 1) as a bar; anything above nothing shows."""
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width, "·")


def _headline(worker: Row, gpus: Sequence[Row]) -> Text:
    kinds = {g["name"] or g["type"]: g["vram_total"] for g in gpus}
    words = " + ".join(
        f"{sum((g['name'] or g['type']) == kind for g in gpus)} x {kind}"
        + (f" {total / 2**30:.0f} GiB" if total else "")
        for kind, total in kinds.items()
    )
    line = Text(words or "no GPUs", style="dim")
    if worker["unified_memory"]:
        line.append(", one pool with its RAM", style="dim")
    if worker["state"] != "READY":
        line.append(f"  {worker['state']}", style=STATE_STYLES.get(worker["state"], "red"))
    if worker["over_committed"]:
        line.append("  OVER-COMMITTED", style="red")
    return line


def _card(gpu: Row, colours: Mapping[str, str], ready: bool) -> Text:
    holders = gpu["instances"]
    capacity = gpu["capacity"]
    text = Text()
    if capacity is None:
        text.append("?" * BAR, style="red")
    else:
        share = gpu["vram_allocated"] / capacity if capacity else 0.0
        text.append(bar(share), style="red" if gpu["over_committed"] else _colour(holders, colours))
    text.append(" ")
    room = CELL - BAR - 2
    if holders:
        text.append(_who(holders, room), style=_colour(holders, colours))
    else:
        text.append("free" if ready and gpu["open"] else "closed", style="dim")
    text.pad_right(CELL - text.cell_len)
    return text


def _who(holders: Sequence[Row], room: int) -> str:
    """Names of the instances on one card; where there is no room, the first and how many more."""
    more = f"+{len(holders) - 1}" if len(holders) > 1 else ""
    return _clip(holders[0]["name"], room - len(more)) + more


def _clip(name: str, room: int) -> str:
    """The name, shortened in its middle: its end tells instances of one model apart."""
    if len(name) <= room:
        return name
    tail = min(4, room - 2)
    return f"{name[: room - tail - 1]}…{name[-tail:]}"


def _colours(gpus: Sequence[Row]) -> dict[str, str]:
    models = sorted({i["model"] for g in gpus for i in g["instances"]})
    return {model: _COLOURS[n % len(_COLOURS)] for n, model in enumerate(models)}


def _colour(holders: Sequence[Row], colours: Mapping[str, str]) -> str:
    return colours[holders[0]["model"]] if holders else "dim"
