"""A store in memory that begins as another store is now: what a plan or a replay starts from."""

from __future__ import annotations

from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.ports import Store
from gpustackd.store.memory.store import MemoryStore
from gpustackd.store.memory.tables import GpuRecord, WorkerRecord


async def copied_fleet(source: Store, store: MemoryStore) -> None:
    """Workers, GPUs and the ledger of `source` into an empty store, with the same ids.

    Raises DatabaseUnavailable.
    """
    changes = await source.fleet_changes(None)
    for worker in changes.workers:
        store.workers[worker.id] = _worker(worker)
    for gpu in changes.gpus:
        if gpu.worker_id in store.workers:
            store.gpu_devices[gpu.id] = _gpu(gpu, store.workers[gpu.worker_id])
    rows: list[WorkerRecord | GpuRecord] = [*store.workers.values(), *store.gpu_devices.values()]
    for n, row in enumerate(rows, 1):
        row.changed = n
    store.last_change = len(rows)
    for booking in await source.bookings(None):
        store.ledger.setdefault(booking.instance_id, []).append(booking)


def _worker(row: WorkerRow) -> WorkerRecord:
    on_top = row.vram_reserved if row.unified_memory else 0
    return WorkerRecord(
        id=row.id,
        name=row.name,
        cluster_id=row.cluster_id,
        state=row.state,
        labels=row.labels,
        ram_total=None if row.ram_capacity is None else row.ram_capacity + on_top,
        vram_reserved=row.vram_reserved,
        unified_memory=row.unified_memory,
        cpu_arch=row.cpu_arch,
        ip=row.ip,
        ifname=row.ifname,
        advertise_address=row.advertise_address,
        port=row.port,
        ram_allocated=row.ram_allocated,
        over_committed=row.over_committed,
        version=row.version,
    )


def _gpu(row: GpuRow, host: WorkerRecord) -> GpuRecord:
    same = ("id", "index", "type", "version", "vram_total", "vram_allocated", "schedulable", "over_committed",
            "vendor", "name", "uuid", "arch_family", "compute_capability", "runtime_version", "vram_used",
            "links", "network")  # fmt: skip
    return GpuRecord(host=host, **{name: getattr(row, name) for name in same})
