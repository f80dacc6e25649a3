"""The fleet as a plan would leave it: rows for its picture, and the memory that remains free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpustackd.domain.fleet.columns import UNKNOWN
from gpustackd.domain.fleet.fleet import Fleet

Row = dict[str, Any]


def remaining(fleet: Fleet) -> dict[str, Any]:
    """Free bytes: by kind of GPU, and GPU by GPU."""
    free = fleet.free_vram()
    ram = fleet.free_ram()
    workers: list[Row] = []
    kinds: dict[tuple[str, str | None, int | None], Row] = {}
    for w in _by_name(fleet):
        cards: list[Row] = []
        for place, row in _cards(fleet, w):
            usable = bool(fleet.gpu_open[place]) and not fleet.gpu_over[place]
            size = int(free[place]) if usable else 0
            card = {"type": row.type, "index": row.index, "free_bytes": size, "total_bytes": row.vram_total}
            cards.append(card)
            key = (row.type, row.name, row.vram_total)
            kind = kinds.setdefault(
                key, {"type": row.type, "name": row.name, "total_bytes": row.vram_total, "gpus": 0, "open": 0,
                      "untouched": 0, "free_bytes": 0},
            )  # fmt: skip
            kind["gpus"] += 1
            kind["open"] += usable
            kind["untouched"] += usable and not fleet.occupancy.gpu_occupants[place]
            kind["free_bytes"] += size
        ready = bool(fleet.ready[w])
        workers.append(
            {
                "worker": fleet.row(w).name,
                "state": fleet.row(w).state,
                "ram_free_bytes": int(ram[w]) if ready else 0,
                "gpus": cards,
            }
        )
    return {"kinds": list(kinds.values()), "workers": workers}


def worker_rows(fleet: Fleet) -> list[Row]:
    """Workers, as `fleet_picture.picture` takes them."""
    return [
        {
            "name": fleet.row(w).name,
            "state": fleet.row(w).state,
            "unified_memory": bool(fleet.unified[w]),
            "over_committed": bool(fleet.worker_over[w]) or bool(fleet.gpu_over[w].any()),
        }
        for w in _by_name(fleet)
    ]


def gpu_rows(fleet: Fleet, names: Mapping[int, tuple[str, str]]) -> list[Row]:
    """GPUs with the instances on them, as `fleet_picture.picture` takes them; `names`: (instance, model) by
    id."""
    holders: dict[int, dict[int, tuple[str, str]]] = {}
    for instance_id in {*fleet.occupancy.by_instance, *fleet.occupancy.assumed}:
        name = names.get(instance_id, (f"instance {instance_id}", ""))
        for b in fleet.occupancy.rows_of(instance_id):
            if b.gpu_id is not None:
                holders.setdefault(b.gpu_id, {})[instance_id] = name
    rows: list[Row] = []
    for w in _by_name(fleet):
        for place, row in _cards(fleet, w):
            booked = int(fleet.vram_allocated[place] + fleet.occupancy.vram_assumed[place])
            capacity = int(fleet.vram_capacity[place])
            here = sorted(holders.get(row.id, {}).values())
            rows.append(
                {
                    "worker": fleet.row(w).name, "type": row.type, "index": row.index, "name": row.name,
                    "vram_total": row.vram_total, "capacity": None if capacity == UNKNOWN else capacity,
                    "vram_allocated": booked, "open": bool(fleet.gpu_open[place]),
                    "over_committed": bool(fleet.gpu_over[place]),
                    "instances": [{"name": name, "model": model} for name, model in here],
                }
            )  # fmt: skip
    return rows


def _by_name(fleet: Fleet) -> list[int]:
    return [fleet.by_name[name] for name in sorted(fleet.by_name)]


def _cards(fleet: Fleet, w: int) -> list[tuple[tuple[int, int], Any]]:
    """Places and rows of a worker's GPUs, by type and index."""
    cards = [((w, s), fleet.gpu_rows[int(g)]) for s, g in enumerate(fleet.gpu_id[w]) if g]
    return sorted(cards, key=lambda card: (card[1].type, card[1].index))
