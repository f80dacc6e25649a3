"""What became of the instances of the demo: a row for each model, the fleet, and why the others wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gpustackd.cli.fleet_picture import WIDTH, legend, picture
from gpustackd.cli.output import print_table
from gpustackd.demo.narration import Narration
from gpustackd.store.postgres.connect import Connection
from gpustackd.store.postgres.inventory import InventoryReads

Row = Mapping[str, Any]

CANNOT_FIT = ("deepseek-r1", "llama-3.1-8b", "mixtral-8x7b")
"""Models of the example that no worker can take, each for another reason."""


async def show_fleet(narration: Narration, connection: Connection) -> None:
    """The models in a table, the fleet in a picture, the waiting instances with their reasons; and checks."""
    inventory = InventoryReads(connection)
    instances = await inventory.rows("instances")
    gpus = await inventory.rows("gpus")
    out = narration.out
    narration.say("\nWhat became of them")
    _show_models(out, instances)
    narration.say(f"\nThe fleet: {legend(gpus)}")
    out.print(picture(await inventory.rows("workers"), gpus, min(out.width, WIDTH)), end="")
    narration.say("\nWhy the others wait")
    for line in reasons_of_waiting(instances):
        narration.say(f"  {line}")
    narration.say()
    waiting = [i for i in instances if i["state"] == "PENDING"]
    placed = len(instances) - len(waiting)
    narration.check(
        all(i["state"] in ("PENDING", "SCHEDULED") for i in instances) and placed >= len(instances) // 2,
        f"{placed} of {len(instances)} instances are placed, none is in error",
    )
    narration.check(
        all(i["reasons"] and i["state_message"] for i in waiting), "every waiting instance says why"
    )
    hopeless = [i for i in instances if i["model"] in CANNOT_FIT]
    narration.check(
        all(i["state"] == "PENDING" for i in hopeless),
        f"the {len(hopeless)} that fit nowhere were placed nowhere",
    )


def _show_models(out: Console, instances: Sequence[Row]) -> None:
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
    print_table(out, headings, rows, right=["ASKED", "PLACED"])


def _range(values: Sequence[float]) -> str:
    return f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


def reasons_of_waiting(instances: Sequence[Row]) -> list[str]:
    """Each reason once, with the instances that it keeps waiting and the newest of its messages."""
    alike: dict[tuple[str, ...], list[Row]] = {}
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
