"""`ports.Store` in memory, with the same rules as over PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import md5
from typing import Any
from uuid import UUID

from gpustackd.domain.backends import Backends
from gpustackd.domain.bookings import Booking, bookings, worker_bookings
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.outcome import Check, Placement
from gpustackd.domain.pools import Pools
from gpustackd.errors import BadRow
from gpustackd.ports import (
    Claim,
    CommitCode,
    CommitResult,
    DatabaseHealth,
    FleetChanges,
    ModelRecord,
    Proposal,
    Refusal,
    WaitingInstance,
)
from gpustackd.store.memory.database import DecisionRecord, MemoryDatabase
from gpustackd.store.memory.records import (
    GpuRecord,
    InstanceRecord,
    ModelRow,
    WorkerRecord,
    mark_over_commit,
)
from gpustackd.store.placement_columns import claim_json, distributed_json
from gpustackd.store.postgres.lookups import HOLDING, read_backends, read_files, read_pools


class MemoryStore:
    """`ports.Store` over a `MemoryDatabase`, on which users act."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.database = MemoryDatabase(clock)

    # -- reading ----------------------------------------------------------------------------------------

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        seen = -1 if since is None else int(since)
        return FleetChanges(
            mark=str(self.database.last_change),
            workers=[_worker(w) for w in self.database.workers.values() if w.changed > seen],
            gpus=[_gpu(g) for g in self.database.gpu_devices.values() if g.changed > seen],
            complete=since is None,
        )

    async def fleet_sums(self) -> tuple[int, int, int, int]:
        workers, gpus = self.database.workers.values(), self.database.gpu_devices.values()
        return len(workers), sum(w.version for w in workers), len(gpus), sum(g.version for g in gpus)

    async def bookings(self, worker_ids: Sequence[int] | None) -> Sequence[Booking]:
        wanted = None if worker_ids is None else set(worker_ids)
        rows = (b for held in self.database.ledger.values() for b in held)
        return [b for b in rows if wanted is None or b.worker_id in wanted]

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[WaitingInstance]:
        wanted = None if ids is None else set(ids)
        rows = [
            i
            for i in self.database.model_instances.values()
            if i.state == InstanceState.PENDING and (wanted is None or i.id in wanted)
        ]
        rows.sort(key=lambda i: (-self._priority(i), i.created_at, i.id))
        return [self._waiting(i) for i in rows[:limit]]

    async def pending_ids(self) -> Sequence[int]:
        return [i.id for i in self.database.model_instances.values() if i.state == InstanceState.PENDING]

    async def models(self, ids: Sequence[int]) -> Sequence[ModelRecord]:
        return [_model(self.database.models[i]) for i in ids if i in self.database.models]

    async def ready_files(self) -> Mapping[str, Mapping[int, int]]:
        return read_files(self.database.model_files.values())

    async def pools(self) -> Pools:
        blank = {"cluster_id": None, "detail": None}
        types = [blank | row for _, row in sorted(self.database.instance_types.items())]
        return read_pools(types, [{"devices": None} | row for row in self.database.clusters.values()])

    async def backends(self) -> Backends:
        blank = {"owner": None, "versions": None}
        return read_backends(blank | row for _, row in sorted(self.database.inference_backends.items()))

    async def foreign_memory(self, fresh: float) -> Mapping[int, int]:
        since = self.database.clock() - fresh
        instances = self.database.model_instances
        own = [b for i, held in self.database.ledger.items() if instances[i].state in HOLDING for b in held]
        foreign: dict[int, int] = {}
        for gpu in self.database.gpu_devices.values():
            host, at = gpu.host, gpu.vram_used_at
            if gpu.vram_used is None or at is None or at.timestamp() <= since:
                continue
            booked = sum(b.vram for b in own if b.gpu_id == gpu.id)
            booked += sum(b.ram for b in own if host.unified_memory and b.worker_id == host.id)
            beyond = max(gpu.vram_used - booked, 0) - host.vram_reserved
            if beyond > 0:
                foreign[gpu.id] = beyond
        return foreign

    async def health(self) -> DatabaseHealth:
        return DatabaseHealth(writable=True, revision=None, server_version="memory")

    # -- the protocol -----------------------------------------------------------------------------------

    async def claim(self, owner: UUID, wanted: Sequence[tuple[int, int]], lease: float) -> Sequence[Claim]:
        claims = []
        for id_, epoch in sorted(wanted):
            row = self.database.model_instances.get(id_)
            if row is None or row.state != InstanceState.PENDING or row.placement_epoch != epoch:
                continue
            row.state = InstanceState.ANALYZING
            row.lease_owner, row.lease_until = owner, self.database.clock() + lease
            row.placement_epoch += 1
            row.attempts += 1
            waited = self.database.clock() - row.created_at
            claims.append(
                Claim(
                    id_,
                    row.name,
                    row.model_id,
                    row.placement_epoch,
                    row.attempts,
                    self._priority(row),
                    waited,
                )
            )
        return claims

    async def renew(self, owner: UUID, ids: Sequence[int], lease: float) -> set[int]:
        held = {i for i in ids if self._held(owner, i)}
        for i in held:
            self.database.model_instances[i].lease_until = self.database.clock() + lease
        return held

    async def commit(self, owner: UUID, replica: str, batch: Sequence[Proposal]) -> Sequence[CommitResult]:
        if len({p.claim.id for p in batch}) < len(batch):
            raise ValueError("a batch holds one proposal per instance")
        ordered = sorted(batch, key=lambda p: p.claim.id)
        return [self._commit(owner, replica, proposal) for proposal in ordered]

    def _commit(self, owner: UUID, replica: str, proposal: Proposal) -> CommitResult:
        claim, placement = proposal.claim, proposal.decision.placement
        row = self._held(owner, claim.id, claim.epoch)
        if row is None:
            return CommitResult(claim.id, CommitCode.LOST)
        model = self.database.models.get(claim.model_id)
        if model is None or model.version != proposal.model_version:
            return CommitResult(claim.id, CommitCode.MODEL_CHANGED)
        if clash := self._book(placement):
            return CommitResult(claim.id, CommitCode.CONFLICT, *clash)
        main = placement.parts[0]
        row.state, row.lease_owner, row.lease_until = InstanceState.SCHEDULED, None, None
        row.state_message = "; ".join(w.text for w in placement.warnings) or None
        row.reasons, row.next_attempt_at, row.scheduled_at = None, None, self.database.clock()
        row.worker_id, row.worker_name, row.worker_ip = main.worker_id, main.worker_name, main.worker_ip
        row.worker_advertise_address, row.worker_ifname = main.worker_advertise_address, main.worker_ifname
        row.gpu_type, row.gpu_indexes = main.gpu_type, list(main.gpu_indexes) or None
        row.gpu_addresses = list(main.gpu_addresses) or None
        row.computed_resource_claim = claim_json(main, placement)
        row.distributed_servers = distributed_json(placement)
        self.database.ledger[row.id] = bookings(placement, row.id, row.model_id)
        self.database.decisions.append(DecisionRecord(row.id, claim.epoch, claim.attempts, replica, "PLACED"))
        return CommitResult(claim.id)

    def _book(self, placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Book what a placement needs on every row, or on none: then (GPU ids, worker ids) that conflict."""
        undo: list[tuple[WorkerRecord | GpuRecord, int, int, bool]] = []
        gpus: list[int] = []
        workers: list[int] = []
        unchanged = placement.check is Check.UNCHANGED
        for part, need in worker_bookings(placement):
            worker = self.database.workers.get(part.worker_id)
            if (
                worker is None
                or worker.state != "READY"
                or worker.unified_memory != part.unified
                or (need > 0 and not _fits(worker, need, placement))
                or (unchanged and worker.version != part.worker_version)
            ):
                workers.append(part.worker_id)
                break
            undo.append((worker, worker.allocated, worker.version, worker.over_committed))
            self._book_row(worker, need)
        for part in () if workers else placement.parts:
            for gpu_id, need, version in zip(part.gpu_ids, part.vram, part.gpu_versions, strict=True):
                gpu = self.database.gpu_devices.get(gpu_id)
                if (
                    gpu is None
                    or not gpu.open
                    or gpu.host.unified_memory != part.unified
                    or not _fits(gpu, need, placement)
                    or (unchanged and gpu.version != version)
                ):
                    gpus.append(gpu_id)
                    continue
                undo.append((gpu, gpu.allocated, gpu.version, gpu.over_committed))
                self._book_row(gpu, need)
        if not workers and not gpus:
            return None
        for row, allocated, version, marked in reversed(undo):
            row.allocated, row.version, row.over_committed = allocated, version, marked
        return tuple(gpus), tuple(workers)

    def _book_row(self, row: WorkerRecord | GpuRecord, need: int) -> None:
        row.allocated += need
        mark_over_commit(row, shrank=need > 0)  # what must not over-commit was rejected above
        row.version += 1
        self.database.stamp(row)

    async def refuse(self, owner: UUID, replica: str, batch: Sequence[Refusal]) -> set[int]:
        written = set()
        for refusal in batch:
            claim = refusal.claim
            row = self._held(owner, claim.id, claim.epoch)
            if row is None:
                continue
            row.state = InstanceState.ERROR if refusal.to_error else InstanceState.PENDING
            row.state_message = refusal.outcome.message
            row.reasons = [r.as_json() for r in refusal.outcome.reasons]
            row.lease_owner = row.lease_until = None
            retry = refusal.retry_in
            row.next_attempt_at = None if retry is None else self.database.clock() + retry
            self.database.decisions.append(
                DecisionRecord(row.id, claim.epoch, claim.attempts, replica, refusal.record)
            )
            written.add(row.id)
        return written

    async def hand_back(self, owner: UUID) -> Sequence[int]:
        return self._release([i for i in self.database.model_instances.values() if i.lease_owner == owner])

    async def expire_leases(self) -> Sequence[int]:
        now = self.database.clock()
        return self._release(
            [i for i in self.database.model_instances.values() if (i.lease_until or now + 1) <= now]
        )

    async def autofill(self, model_id: int, version: int, patch: Mapping[str, Any]) -> bool:
        model = self.database.models.get(model_id)
        if model is None or model.version != version:
            return False
        model.columns |= {k: v for k, v in patch.items() if v is not None}
        return True

    def _release(self, rows: Sequence[InstanceRecord]) -> list[int]:
        for row in rows:
            row.state, row.lease_owner, row.lease_until = InstanceState.PENDING, None, None
        return [row.id for row in rows]

    def _held(self, owner: UUID, id_: int, epoch: int | None = None) -> InstanceRecord | None:
        """The row, where this owner has a lease on it that has not expired."""
        row = self.database.model_instances.get(id_)
        if row is None or row.lease_owner != owner or (row.lease_until or 0) <= self.database.clock():
            return None
        return row if epoch is None or row.placement_epoch == epoch else None

    def _priority(self, row: InstanceRecord) -> int:
        return self.database.models[row.model_id].priority if row.priority is None else row.priority

    def _waiting(self, row: InstanceRecord) -> WaitingInstance:
        signature = None
        if row.reasons is not None:
            codes = ";".join(f"{r['filter']}:{r['code']}" for r in row.reasons)
            signature = (
                f"{codes}#{md5((row.state_message or '').encode(), usedforsecurity=False).hexdigest()}"
            )
        return WaitingInstance(
            id=row.id,
            name=row.name,
            model_id=row.model_id,
            epoch=row.placement_epoch,
            attempts=row.attempts,
            priority=self._priority(row),
            created_at=datetime.fromtimestamp(row.created_at, UTC),
            due_in=0.0 if row.next_attempt_at is None else row.next_attempt_at - self.database.clock(),
            signature=signature,
        )


def _fits(row: WorkerRecord | GpuRecord, need: int, placement: Placement) -> bool:
    """Whether a row may take `need` more bytes. A marked row takes none unless over-commit was asked for."""
    return placement.over_commit or (
        not row.over_committed and row.capacity is not None and row.allocated + need <= row.capacity
    )


_WORKER = ("id", "name", "cluster_id", "state", "version", "ram_allocated", "unified_memory",
           "over_committed", "vram_reserved", "cpu_arch", "ip", "advertise_address", "ifname",
           "port")  # fmt: skip
_GPU = ("id", "index", "type", "version", "vram_total", "capacity", "vram_allocated", "open", "schedulable",
        "over_committed", "vendor", "name", "uuid", "arch_family", "compute_capability", "runtime_version",
        "vram_used", "links", "network")  # fmt: skip
"""Fields that a record and its row have in common."""


def _worker(row: WorkerRecord) -> WorkerRow:
    same = {name: getattr(row, name) for name in _WORKER}
    return WorkerRow(**same, labels=dict(row.labels or {}), ram_capacity=row.capacity)


def _gpu(row: GpuRecord) -> GpuRow:
    return GpuRow(worker_id=row.host.id, **{name: getattr(row, name) for name in _GPU})


def _model(row: ModelRow) -> ModelRecord:
    try:
        spec = model_spec({"id": row.id, "version": row.version, "name": row.name, **row.columns})
    except BadRow as error:
        return ModelRecord(row.id, row.version, row.name, None, str(error))
    return ModelRecord(row.id, row.version, row.name, spec)
