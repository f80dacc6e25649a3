"""The whole database as a store in memory, rows under their own ids and names: what a plan starts from.

`memory_copy` takes what a port tells; here the tables are read, so that documents find rows by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.domain.lifecycle import InstanceState
from gpustackd.store.memory.copy import copied_fleet
from gpustackd.store.memory.store import MemoryStore
from gpustackd.store.memory.tables import InstanceRecord, ModelRecordRow
from gpustackd.store.postgres.inventory import Connection
from gpustackd.store.postgres.store import PostgresStore

_WAITING = frozenset({InstanceState.PENDING, InstanceState.ANALYZING})


async def whole(source: PostgresStore, connection: Connection) -> MemoryStore:
    """Everything of one moment (`snapshot`). An instance that a daemon looks at right now waits in the copy.

    Raises DatabaseUnavailable.
    """
    store = MemoryStore()
    await copied_fleet(source, store)
    for table in ("clusters", "model_files", "instance_types", "inference_backends"):
        rows = await connection.fetch(f"SELECT * FROM {table} ORDER BY id")
        store.table(table).update({r["id"]: dict(r) for r in rows})
    for r in await connection.fetch("SELECT * FROM models ORDER BY id"):
        columns = {k: v for k, v in r.items() if k not in ("id", "name", "version")}
        store.models_by_id[r["id"]] = ModelRecordRow(r["id"], r["name"], columns, r["version"])
    for r in await connection.fetch("SELECT id, ram_total, ram_reserved, heartbeat_at FROM workers"):
        worker = store.workers[r["id"]]
        worker.ram_total, worker.ram_reserved = r["ram_total"], r["ram_reserved"]
        worker.heartbeat_at = r["heartbeat_at"]
    for r in await connection.fetch(_INSTANCES):
        store.model_instances[r["id"]] = _instance(r)
    store.begin_ids_after(_ids(store))
    return store


_INSTANCES = """
SELECT id, name, model_id, state, state_message, reasons, priority, worker_id, worker_name, gpu_type,
       gpu_indexes, computed_resource_claim, distributed_servers, placement_epoch, attempts,
       extract(epoch FROM created_at)::double precision AS created_at,
       extract(epoch FROM next_attempt_at)::double precision AS next_attempt_at
  FROM model_instances ORDER BY id"""


def _instance(row: Mapping[str, Any]) -> InstanceRecord:
    values = dict(row)
    state = InstanceState(values.pop("state"))
    reasons = values.pop("reasons")
    readable = isinstance(reasons, list) and all(
        isinstance(r, Mapping) and {"filter", "code"} <= r.keys() for r in reasons
    )
    return InstanceRecord(
        **values,
        state=InstanceState.PENDING if state in _WAITING else state,
        reasons=reasons if readable else None,
    )


def _ids(store: MemoryStore) -> Iterable[int]:
    for table in ("clusters", "workers", "gpu_devices", "models", "model_instances", "model_files",
                  "instance_types", "inference_backends"):  # fmt: skip
        yield from store.table(table)
