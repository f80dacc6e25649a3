"""The rules of the contract recomputed over a store in memory: what `audit` is over PostgreSQL."""

from __future__ import annotations

from collections import Counter

from gpustackd.domain.lifecycle import PLACED, WAITING, InstanceState
from gpustackd.store.memory.records import InstanceRecord
from gpustackd.store.memory.store import MemoryStore


def breaches(store: MemoryStore) -> list[str]:
    """Every rule that does not hold, in words; nothing where all do."""
    found: list[str] = []
    vram: Counter[int] = Counter()
    pool: Counter[int] = Counter()
    for instance_id, held in store.database.ledger.items():
        if instance_id not in store.database.model_instances:
            found.append(f"ledger of instance {instance_id}, which does not exist")
        for b in held:
            host = store.database.workers.get(b.worker_id)
            if host is None or (b.gpu_id is not None and b.gpu_id not in store.database.gpu_devices):
                found.append(f"ledger of instance {instance_id} on a worker or GPU that does not exist")
                continue
            pool[host.id] += b.ram + (b.vram if host.unified_memory else 0)
            if b.gpu_id is not None:
                vram[b.gpu_id] += b.vram
    for gpu in store.database.gpu_devices.values():
        if gpu.vram_allocated != vram[gpu.id]:
            found.append(f"gpu {gpu.id}: allocated {gpu.vram_allocated}, claims {vram[gpu.id]}")
        if vram[gpu.id] and not gpu.over_committed and (gpu.capacity is None or vram[gpu.id] > gpu.capacity):
            found.append(f"gpu {gpu.id}: {vram[gpu.id]} booked of {gpu.capacity}")
    for worker in store.database.workers.values():
        booked = pool[worker.id]
        if worker.ram_allocated != booked:
            found.append(f"worker {worker.id}: allocated {worker.ram_allocated}, claims {booked}")
        if booked and not worker.over_committed and (worker.capacity is None or booked > worker.capacity):
            found.append(f"worker {worker.id}: {booked} booked of {worker.capacity}")
    for row in store.database.model_instances.values():
        found += _of_instance(store, row)
    once = Counter(
        (d.instance_id, d.placement_epoch) for d in store.database.decisions if d.outcome == "PLACED"
    )
    return found + [f"instance {i} placed {n} times in epoch {e}" for (i, e), n in once.items() if n > 1]


def _of_instance(store: MemoryStore, row: InstanceRecord) -> list[str]:
    held = store.database.ledger.get(row.id, [])
    name = f"instance {row.id} in {row.state}"
    found = []
    if row.state in WAITING and (held or row.worker_id is not None or row.gpu_indexes is not None):
        found.append(f"{name} holds something")
    if row.state in PLACED and (row.worker_id not in store.database.workers or not held):
        found.append(f"{name} holds nothing")
    if row.state == InstanceState.ERROR and (row.worker_id is None) != (not held):
        found.append(f"{name} holds half a placement")
    if (row.state == InstanceState.ANALYZING) != (
        row.lease_owner is not None and row.lease_until is not None
    ):
        found.append(f"{name}: its lease does not go with it")
    indexes = row.gpu_indexes or []
    mine = [
        store.database.gpu_devices[b.gpu_id].index for b in held if b.gpu_id is not None and b.part == "main"
    ]
    if sorted(indexes) != sorted(mine) or len(set(indexes)) != len(indexes):
        found.append(f"{name}: GPUs {indexes}, ledger {mine}")
    return found
