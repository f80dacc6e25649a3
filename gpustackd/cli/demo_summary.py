"""What became of the instances, in words: a row for each model, a paragraph for each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpustackd.cli.output import print_table
from gpustackd.demo.narration import Narration


def summary(told: Narration, instances: Sequence[dict[str, Any]]) -> None:
    """A row for each model: how many were asked for, how many are placed, on what."""
    models = sorted({i["model"] for i in instances})
    rows = []
    for model in models:
        mine = [i for i in instances if i["model"] == model]
        placed = [i for i in mine if i["worker"]]
        each = "-"
        if placed:
            cards = sorted({len(i["gpu_indexes"]) for i in placed})
            sizes = sorted({round(i["vram"] / len(i["gpu_indexes"]) / 2**30, 1) for i in placed})
            each = f"{_range(cards)} x {_range(sizes)} GiB"
        workers = Counter(i["worker"] for i in placed)
        where = ", ".join(f"{w}" + (f" x{n}" if n > 1 else "") for w, n in sorted(workers.items()))
        rows.append((f"  {model}", len(mine), len(placed), each, where or "-"))
    headings = ["  MODEL", "ASKED", "PLACED", "BOOKED FOR EACH", "ON"]
    print_table(told.out, headings, rows, right=["ASKED", "PLACED"])


def _range(values: Sequence[float]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


def waiting_words(instances: Sequence[dict[str, Any]]) -> list[str]:
    """Each reason once, with the instances that it keeps waiting and the newest of its messages."""
    alike: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for i in instances:
        if i["state"] == "PENDING":
            codes = (f"{r['filter']}:{r['code']}" for r in i["reasons"])
            alike.setdefault((i["model"], *codes), []).append(i)
    lines: list[str] = []
    for waiting in alike.values():
        lines.append(", ".join(i["name"] for i in waiting))
        newest = max(waiting, key=lambda i: int(i["id"]))
        lines.extend(f"    {line}" for line in (newest["state_message"] or "").strip().splitlines())
    return lines
