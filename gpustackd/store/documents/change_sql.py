"""A suggested change as SQL: the statements that `explain` prints for people to run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def statements(change: Mapping[str, Any]) -> list[str]:
    """Statements for a change as data, to be run in one transaction. Raises KeyError for an unknown kind."""
    return _KINDS[change["kind"]](change)


def _edit(change: Mapping[str, Any]) -> list[str]:
    sets = ", ".join(f"{_name(k)} = {_column(k, v)}" for k, v in change["columns"].items())
    return [f"UPDATE models SET {sets} WHERE name = {literal(change['model'])}"]


def _open(change: Mapping[str, Any]) -> list[str]:
    cards = ", ".join(f"({literal(g['type'])}, {int(g['index'])})" for g in change["gpus"])
    where = f"worker_id = {_worker(change['worker'])} AND (type, index) IN ({cards})"
    return [f"UPDATE gpu_devices SET schedulable = true WHERE {where}"]


def _ready(change: Mapping[str, Any]) -> list[str]:
    beat = "heartbeat_at = CASE WHEN heartbeat_at IS NOT NULL THEN clock_timestamp() END"
    return [f"UPDATE workers SET state = 'READY', {beat} WHERE name = {literal(change['worker'])}"]


def _stop(change: Mapping[str, Any]) -> list[str]:
    names = ", ".join(literal(n) for n in change["instances"])
    return [f"DELETE FROM model_instances WHERE name IN ({names})"]


def _add_gpu(change: Mapping[str, Any]) -> list[str]:
    return [_gpu(change["worker"], change["gpu"])]


def _add_worker(change: Mapping[str, Any]) -> list[str]:
    columns = {"name": change["worker"], **change["columns"]}
    names = ", ".join(_name(c) for c in columns)
    values = ", ".join(_column(c, v) for c, v in columns.items())
    return [
        f"INSERT INTO workers ({names}) VALUES ({values})",
        *(_gpu(change["worker"], g) for g in change["gpus"]),
    ]


def _together(change: Mapping[str, Any]) -> list[str]:
    return [s for c in change["changes"] for s in statements(c)]


def _gpu(worker: str, gpu: Mapping[str, Any]) -> str:
    names = ", ".join(["worker_id", *(_name(c) for c in gpu)])
    values = ", ".join([_worker(worker), *(_column(c, v) for c, v in gpu.items())])
    return f"INSERT INTO gpu_devices ({names}) VALUES ({values})"


def _worker(name: str) -> str:
    return f"(SELECT id FROM workers WHERE name = {literal(name)})"


def _name(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _column(name: str, value: Any) -> str:
    if isinstance(value, list | Mapping):
        return f"{literal(json.dumps(value))}::jsonb"
    return literal(value)


def literal(value: Any) -> str:
    """A value as an SQL literal."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value).replace("'", "''")
    return f"'{text}'" if "\\" not in text else f"E'{text.replace(chr(92), chr(92) * 2)}'"


_KINDS = {
    "edit_model": _edit,
    "open_gpus": _open,
    "ready_worker": _ready,
    "stop_instances": _stop,
    "add_gpu": _add_gpu,
    "add_worker": _add_worker,
    "together": _together,
}
