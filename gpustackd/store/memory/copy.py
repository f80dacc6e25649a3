"""The whole database as a store in memory, every row under its own id and name: what a plan starts from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.lifecycle import WAITING, InstanceState
from gpustackd.store.memory.database import TABLES, MemoryDatabase
from gpustackd.store.memory.records import GpuRecord, InstanceRecord, ModelRow, WorkerRecord
from gpustackd.store.memory.store import MemoryStore
from gpustackd.store.postgres.connect import Connection
from gpustackd.store.postgres.store import PostgresStore

_PLAIN = ("clusters", "model_files", "instance_types", "inference_backends")
_WORKERS = "SELECT id, ram_total, ram_reserved, heartbeat_at FROM workers"
"""What `WorkerRow` does not tell."""
_INSTANCES = """
SELECT id, name, model_id, state, state_message, reasons, priority, worker_id, worker_name, gpu_type,
       gpu_indexes, computed_resource_claim, distributed_servers, placement_epoch, attempts,
       extract(epoch FROM created_at)::double precision AS created_at,
       extract(epoch FROM next_attempt_at)::double precision AS next_attempt_at
  FROM model_instances ORDER BY id"""


async def copy_of(source: PostgresStore, connection: Connection) -> MemoryStore:
    """A copy of one moment (`snapshot`). An instance that a daemon is analyzing waits in the copy.

    Raises DatabaseUnavailable.
    """
    store = MemoryStore()
    database = store.database
    await _copy_fleet(source, database)
    for table in _PLAIN:
        rows = await connection.fetch(f"SELECT * FROM {table} ORDER BY id")
        database.table(table).update({r["id"]: dict(r) for r in rows})
    for r in await connection.fetch("SELECT * FROM models ORDER BY id"):
        columns = {k: v for k, v in r.items() if k not in ("id", "name", "version")}
        database.models[r["id"]] = ModelRow(r["id"], r["name"], columns, r["version"])
    for r in await connection.fetch(_WORKERS):
        worker = database.workers[r["id"]]
        worker.ram_total, worker.ram_reserved = r["ram_total"], r["ram_reserved"]
        worker.heartbeat_at = r["heartbeat_at"]
    for r in await connection.fetch(_INSTANCES):
        database.model_instances[r["id"]] = _instance(r)
    database.begin_ids_after(i for table in TABLES for i in database.table(table))
    return store


async def _copy_fleet(source: PostgresStore, database: MemoryDatabase) -> None:
    """Workers, GPUs and the ledger."""
    changes = await source.fleet_changes(None)
    for worker in changes.workers:
        database.workers[worker.id] = _worker(worker)
    for gpu in changes.gpus:
        if gpu.worker_id in database.workers:
            database.gpu_devices[gpu.id] = _gpu(gpu, database.workers[gpu.worker_id])
    rows: list[WorkerRecord | GpuRecord] = [*database.workers.values(), *database.gpu_devices.values()]
    for row in rows:
        database.stamp(row)
    for booking in await source.bookings(None):
        database.ledger.setdefault(booking.instance_id, []).append(booking)


def _worker(row: WorkerRow) -> WorkerRecord:
    same = ("id", "name", "cluster_id", "state", "labels", "vram_reserved", "unified_memory", "cpu_arch",
            "ip", "ifname", "advertise_address", "port", "ram_allocated", "over_committed",
            "version")  # fmt: skip
    return WorkerRecord(**{name: getattr(row, name) for name in same})


def _gpu(row: GpuRow, host: WorkerRecord) -> GpuRecord:
    same = ("id", "index", "type", "version", "vram_total", "vram_allocated", "schedulable", "over_committed",
            "vendor", "name", "uuid", "arch_family", "compute_capability", "runtime_version", "vram_used",
            "links", "network")  # fmt: skip
    return GpuRecord(host=host, **{name: getattr(row, name) for name in same})


def _instance(row: Mapping[str, Any]) -> InstanceRecord:
    values = dict(row)
    state = InstanceState(values.pop("state"))
    reasons = values.pop("reasons")
    readable = isinstance(reasons, list) and all(
        isinstance(r, Mapping) and {"filter", "code"} <= r.keys() for r in reasons
    )
    return InstanceRecord(
        **values,
        state=InstanceState.PENDING if state in WAITING else state,
        reasons=reasons if readable else None,
    )
