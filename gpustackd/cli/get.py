"""`gpustackd get`: lists of what the database holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, Output, OutputOption, database
from gpustackd.cli.output import as_list, console, first_line, gib, on_gpus, print_json, print_table, state

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], Any]]


class ResourceKind(StrEnum):
    """What can be listed."""

    CLUSTERS = "clusters"
    WORKERS = "workers"
    GPUS = "gpus"
    MODELS = "models"
    INSTANCES = "instances"


def get(
    kind: Annotated[ResourceKind, typer.Argument(metavar="KIND", help="What to list.")],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Only this one; a GPU is WORKER:TYPE:INDEX, or WORKER for all of its GPUs."
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """List clusters, workers, GPUs, models or instances.

    JSON is always a list; sizes in it are bytes.

    Example: gpustackd get instances -o wide
    """
    from gpustackd.store.postgres.connect import connected
    from gpustackd.store.postgres.inventory import InventoryReads

    url = database(config, database_url)

    async def run() -> list[dict[str, Any]]:
        async with connected(url, "gpustackd get") as connection:
            return await InventoryReads(connection).rows(kind.value, name)

    rows = anyio.run(run)
    if output is Output.JSON:
        print_json(rows)
    elif not rows:
        console(stderr=True).print(f"no {kind.value} yet", style="dim")
    else:
        columns = [*_COLUMNS[kind], *(_MORE[kind] if output is Output.WIDE else ())]
        _show(columns, rows)


def _show(columns: Sequence[Column], rows: Sequence[Row]) -> None:
    cells = [[cell(r) for _, cell in columns] for r in rows]
    print_table(console(), [heading for heading, _ in columns], cells, right=_NUMBERS)


def _used(used: str, total: str) -> Callable[[Row], str]:
    return lambda r: f"{(r[used] or 0) / 2**30:.0f}/{gib(r[total])}"


def _states(r: Row) -> str:
    return ", ".join(f"{n} {s}" for s, n in sorted(r["instances"].items())) or "none"


def place(r: Row) -> str:
    """`worker type:0,1 + other …`: where an instance is, `-` where it is nowhere."""
    if not r["worker"]:
        return "-"
    main = on_gpus(r["worker"], r["gpu_type"], r["gpu_indexes"])
    others = [
        on_gpus(s.get("worker_name"), s.get("gpu_type"), s.get("gpu_indexes"))
        for s in as_list(r["subordinates"])
        if isinstance(s, Mapping)
    ]
    return " + ".join([main, *others])


def _joined(value: Any, mark: str) -> str:
    return (
        first_line(mark.join(str(x) for x in value) if isinstance(value, list) else str(value or "")) or "-"
    )


def why(r: Row) -> str:
    """The reason that holds for the most workers, else the first one; else the message itself."""
    reasons = [
        x for x in as_list(r["reasons"]) if isinstance(x, Mapping) and x.get("level", "reject") == "reject"
    ]
    if r["worker"] or not reasons:
        lines = [line.strip().removeprefix("- ") for line in (r["state_message"] or "").splitlines()]
        lines = [line for line in lines if line]
        heading = len(lines) > 1 and lines[0].endswith(":")
        return first_line(lines[1] if heading else lines[0] if lines else "")
    return first_line(str(max(reasons, key=_workers_of).get("text") or ""))


def _workers_of(reason: Row) -> int:
    params = reason.get("params")
    counts = [params.get(k) for k in ("dropped", "workers")] if isinstance(params, Mapping) else []
    return max((c for c in counts if isinstance(c, int)), default=0)


_NUMBERS = {
    "GPUS", "WORKERS", "READY", "MODELS", "INSTANCES", "PRIORITY", "ATTEMPTS", "REPLICAS", "RAM", "VRAM",
}  # fmt: skip

_COLUMNS: Mapping[ResourceKind, Sequence[Column]] = {
    ResourceKind.CLUSTERS: [
        ("NAME", lambda r: r["name"]),
        ("WORKERS", lambda r: r["workers"]),
        ("READY", lambda r: r["ready"]),
        ("GPUS", lambda r: r["gpus"]),
        ("MODELS", lambda r: r["models"]),
    ],
    ResourceKind.WORKERS: [
        ("NAME", lambda r: r["name"]),
        ("CLUSTER", lambda r: r["cluster"]),
        ("STATE", lambda r: state(r["state"])),
        ("GPUS", lambda r: r["gpus"]),
        ("VRAM", _used("vram_allocated", "vram_total")),
        ("RAM", _used("ram_allocated", "ram_total")),
        ("INSTANCES", lambda r: r["instances"]),
        ("", lambda r: "OVER-COMMITTED" if r["over_committed"] else ""),
    ],
    ResourceKind.GPUS: [
        ("WORKER", lambda r: r["worker"]),
        ("GPU", lambda r: f"{r['type']}:{r['index']}"),
        ("NAME", lambda r: r["name"]),
        ("VRAM", _used("vram_allocated", "vram_total")),
        ("OPEN", lambda r: r["open"]),
        ("HELD BY", lambda r: ", ".join(i["name"] for i in r["instances"]) or "-"),
    ],
    ResourceKind.MODELS: [
        ("NAME", lambda r: r["name"]),
        ("SOURCE", lambda r: r["source"]),
        ("WHERE", lambda r: first_line(r["location"])),
        ("REPLICAS", lambda r: r["replicas"]),
        ("STATES", _states),
    ],
    ResourceKind.INSTANCES: [
        ("NAME", lambda r: r["name"]),
        ("MODEL", lambda r: r["model"]),
        ("STATE", lambda r: state(r["state"])),
        ("PLACE", place),
        ("WHY", why),
    ],
}

_MORE: Mapping[ResourceKind, Sequence[Column]] = {
    ResourceKind.CLUSTERS: [("ID", lambda r: r["id"])],
    ResourceKind.WORKERS: [
        ("IP", lambda r: r["ip"]),
        ("LABELS", lambda r: ",".join(f"{k}={v}" for k, v in sorted((r["labels"] or {}).items())) or "-"),
        ("MESSAGE", lambda r: first_line(r["state_message"])),
        ("HEARTBEAT", lambda r: r["heartbeat_at"]),
    ],
    ResourceKind.GPUS: [
        ("UUID", lambda r: r["uuid"]),
        ("IN USE", lambda r: gib(r["vram_used"])),
        ("SCHEDULABLE", lambda r: r["schedulable"]),
    ],
    ResourceKind.MODELS: [
        ("CLUSTER", lambda r: r["cluster"]),
        ("BACKEND", lambda r: r["backend"]),
        ("CATEGORIES", lambda r: _joined(r["categories"], ", ")),
        ("PRIORITY", lambda r: r["priority"]),
        ("PARAMETERS", lambda r: _joined(r["backend_parameters"], " ")),
    ],
    ResourceKind.INSTANCES: [
        ("VRAM", lambda r: gib(r["vram"])),
        ("RAM", lambda r: gib(r["ram"])),
        ("PRIORITY", lambda r: r["priority"]),
        ("ATTEMPTS", lambda r: r["attempts"]),
        ("NEXT TRY", lambda r: r["next_attempt_at"]),
        ("CREATED", lambda r: r["created_at"]),
    ],
}
