"""The answer of `gpustackd plan` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gpustackd.cli.fleet_picture import WIDTH, legend, picture
from gpustackd.cli.output import first_line, gib, on_gpus, print_table, print_text

Row = Mapping[str, Any]

MOST_NAMED = 8
"""Instances that are named where many have the same reason."""
MOST_DRAWN = 40
"""Workers in the picture."""


def show(out: Console, answer: Row) -> None:
    """Print what `plan.plan_documents` returns: where each instance goes, how many fit, what is left."""
    if answer["placements"]:
        rows = [
            (p["instance"], p["model"], _place(p), gib(sum(sum(x["vram"].values()) for x in _parts(p))))
            for p in answer["placements"]
        ]
        print_table(out, ["INSTANCE", "MODEL", "WOULD GO TO", "VRAM"], rows, right=["VRAM"])
        out.print()
    for message, several in _by_message(answer["unplaced"]).items():
        out.print(f"{_listed(several)} no place:", markup=False)
        for line in message.splitlines():
            print_text(out, line)
        out.print()
    models = [
        (
            m["name"],
            f"{m['placed']} of {m['instances']}",
            m["added"],
            _peak(m),
            "" if m["fits"] else "does not fit",
        )
        for m in answer["models"]
    ]
    if models:
        print_table(out, ["MODEL", "FIT", "NEW", "PEAK", ""], models, right=["FIT", "NEW", "PEAK"])
    else:
        out.print("The documents ask for no instances.")
    _show_others(out, answer["others"])
    _show_left(out, answer)
    for warning in answer["warnings"]:
        print_text(out, first_line(warning, 300), "      ", "note: ")
    fits = "everything fits" if answer["fits"] else "not everything fits"
    out.print(f"\n{fits}; nothing was written", style="bold")


def _by_message(unplaced: Sequence[Row]) -> dict[str, list[str]]:
    """Instances by their message: replicas of one model mostly have the same."""
    by_message: dict[str, list[str]] = {}
    for u in unplaced:
        by_message.setdefault((u["message"] or "").strip(), []).append(u["instance"])
    return by_message


def _listed(instances: Sequence[str]) -> str:
    if len(instances) == 1:
        return f"{instances[0]} has"
    if len(instances) <= MOST_NAMED:
        return f"{', '.join(instances)} have"
    return f"{', '.join(instances[: MOST_NAMED - 1])} … {instances[-1]} ({len(instances)} instances) have"


def _show_others(out: Console, others: Sequence[Row]) -> None:
    if others:
        placed = sum(o["placed"] for o in others)
        out.print(
            f"\n{len(others)} instances of other documents already wait; {placed} of them would be placed"
        )


def _show_left(out: Console, answer: Row) -> None:
    workers, gpus = answer["fleet"]
    touched = {x["worker"] for p in answer["placements"] for x in _parts(p)}
    shown = (
        workers if len(workers) <= MOST_DRAWN else [w for w in workers if w["name"] in touched][:MOST_DRAWN]
    )
    if shown:
        names = {w["name"] for w in shown}
        out.print("\nThe fleet would be:" if len(shown) == len(workers) else "\nThese workers would be:")
        width = min(out.width, WIDTH)
        out.print(picture(shown, [g for g in gpus if g["worker"] in names], width))
        out.print(legend(gpus), style="dim")
    rows = [
        (k["name"] or k["type"], k["gpus"], k["open"], k["untouched"], gib(k["free_bytes"]))
        for k in answer["left"]["kinds"]
    ]
    if rows:
        out.print("\nLeft:")
        headings = ["GPU", "GPUS", "OPEN", "UNTOUCHED", "FREE"]
        print_table(out, headings, rows, right=headings[1:])


def _parts(placement: Row) -> list[Row]:
    return [placement, *placement["subordinates"]]


def _place(placement: Row) -> str:
    return " + ".join(on_gpus(p["worker"], p["gpu_type"], p["gpu_indexes"]) for p in _parts(placement))


def _peak(model: Row) -> str:
    peak = model["peak"]
    return "-" if peak is None else f"{peak['placed']} of {peak['replicas']}"
