"""The store in memory: the same port and the same rules as over PostgreSQL, for tests, plans and replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import md5
from typing import Any
from uuid import UUID

from gpustackd.domain.backends import Backends
from gpustackd.domain.bookings import Booking, bookings, worker_bookings
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.outcome import Check, Part, Placement
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
from gpustackd.store.memory.rows import Rows
from gpustackd.store.memory.tables import GpuRecord, InstanceRecord, ModelRecordRow, WorkerRecord, mark
from gpustackd.store.postgres import ledger
from gpustackd.store.postgres.backends import backends_of
from gpustackd.store.postgres.files import known_files
from gpustackd.store.postgres.foreign import HOLDING
from gpustackd.store.postgres.pools import pools_of


@dataclass(frozen=True, slots=True)
class Decision:
    """A row of `scheduling_decisions`."""

    instance_id: int
    placement_epoch: int
    attempt: int
    replica: str
    outcome: str


class MemoryStore(Rows):
    """`ports.Store`; users act through `insert`, `update`, `delete` and `evict` of `Rows`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self.decisions: list[Decision] = []

    # -- reading ----------------------------------------------------------------------------------------

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        seen = -1 if since is None else int(since)
        return FleetChanges(
            mark=str(self.last_change),
            workers=[_worker(w) for w in self.workers.values() if w.changed > seen],
            gpus=[_gpu(g) for g in self.gpu_devices.values() if g.changed > seen],
            complete=since is None,
        )

    async def fleet_sums(self) -> tuple[int, int, int, int]:
        workers, gpus = self.workers.values(), self.gpu_devices.values()
        return len(workers), sum(w.version for w in workers), len(gpus), sum(g.version for g in gpus)

    async def bookings(self, worker_ids: Sequence[int] | None) -> Sequence[Booking]:
        wanted = None if worker_ids is None else set(worker_ids)
        return [b for held in self.ledger.values() for b in held if wanted is None or b.worker_id in wanted]

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[WaitingInstance]:
        wanted = None if ids is None else set(ids)
        rows = [
            i
            for i in self.model_instances.values()
            if i.state == InstanceState.PENDING and (wanted is None or i.id in wanted)
        ]
        rows.sort(key=lambda i: (-self._priority(i), i.created_at, i.id))
        return [self._waiting(i) for i in rows[:limit]]

    async def pending_ids(self) -> Sequence[int]:
        return [i.id for i in self.model_instances.values() if i.state == InstanceState.PENDING]

    async def models(self, ids: Sequence[int]) -> Sequence[ModelRecord]:
        return [_model(self.models_by_id[i]) for i in ids if i in self.models_by_id]

    async def ready_files(self) -> Mapping[str, Mapping[int, int]]:
        return known_files(self.model_files.values())

    async def pools(self) -> Pools:
        blank = {"cluster_id": None, "detail": None}
        types = [blank | row for _, row in sorted(self.instance_types.items())]
        return pools_of(types, [{"devices": None} | row for row in self.clusters.values()])

    async def backends(self) -> Backends:
        blank = {"owner": None, "versions": None}
        return backends_of(blank | row for _, row in sorted(self.inference_backends.items()))

    async def foreign_memory(self, fresh: float) -> Mapping[int, int]:
        since = self.clock() - fresh
        own = [b for i, held in self.ledger.items() if self.model_instances[i].state in HOLDING for b in held]
        found: dict[int, int] = {}
        for gpu in self.gpu_devices.values():
            host, at = gpu.host, gpu.vram_used_at
            if gpu.vram_used is None or at is None or at.timestamp() <= since:
                continue
            booked = sum(b.vram for b in own if b.gpu_id == gpu.id)
            booked += sum(b.ram for b in own if host.unified_memory and b.worker_id == host.id)
            beyond = max(gpu.vram_used - booked, 0) - host.vram_reserved
            if beyond > 0:
                found[gpu.id] = beyond
        return found

    async def health(self) -> DatabaseHealth:
        return DatabaseHealth(writable=True, revision=None, server_version="memory")

    # -- the protocol -----------------------------------------------------------------------------------

    async def claim(self, owner: UUID, wanted: Sequence[tuple[int, int]], lease: float) -> Sequence[Claim]:
        claims = []
        for id_, epoch in sorted(wanted):
            row = self.model_instances.get(id_)
            if row is None or row.state != InstanceState.PENDING or row.placement_epoch != epoch:
                continue
            row.state = InstanceState.ANALYZING
            row.lease_owner, row.lease_until = owner, self.clock() + lease
            row.placement_epoch += 1
            row.attempts += 1
            waited = self.clock() - row.created_at
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
            self.model_instances[i].lease_until = self.clock() + lease
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
        model = self.models_by_id.get(claim.model_id)
        if model is None or model.version != proposal.model_version:
            return CommitResult(claim.id, CommitCode.MODEL_CHANGED)
        if clash := self._book(placement):
            return CommitResult(claim.id, CommitCode.CONFLICT, *clash)
        main = placement.parts[0]
        row.state, row.lease_owner, row.lease_until = InstanceState.SCHEDULED, None, None
        row.state_message = "; ".join(w.text for w in placement.warnings) or None
        row.reasons, row.next_attempt_at, row.scheduled_at = None, None, self.clock()
        row.worker_id, row.worker_name, row.worker_ip = main.worker_id, main.worker_name, main.worker_ip
        row.worker_advertise_address, row.worker_ifname = main.worker_advertise_address, main.worker_ifname
        row.gpu_type, row.gpu_indexes = main.gpu_type, list(main.gpu_indexes) or None
        row.gpu_addresses = list(main.gpu_addresses) or None
        row.computed_resource_claim = ledger.claim_json(main, placement)
        row.distributed_servers = ledger.distributed_json(placement)
        self.ledger[row.id] = bookings(placement, row.id, row.model_id)
        self.decisions.append(Decision(row.id, claim.epoch, claim.attempts, replica, "PLACED"))
        return CommitResult(claim.id)

    def _book(self, placement: Placement) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Take what a placement needs from every row, or from none: then (GPU ids, worker ids) that clash."""
        undo: list[tuple[WorkerRecord | GpuRecord, int, int, bool]] = []
        gpus: list[int] = []
        workers: list[int] = []
        for part, need in worker_bookings(placement):
            if not self._book_worker(part, need, placement, undo):
                workers.append(part.worker_id)
                break
        for part in () if workers else placement.parts:
            for n, gpu_id in enumerate(part.gpu_ids):
                if not self._book_gpu(part, n, placement, undo):
                    gpus.append(gpu_id)
        if not workers and not gpus:
            return None
        for row, allocated, version, marked in reversed(undo):
            if isinstance(row, WorkerRecord):
                row.ram_allocated = allocated
            else:
                row.vram_allocated = allocated
            row.version, row.over_committed = version, marked
        return tuple(gpus), tuple(workers)

    def _book_worker(
        self,
        part: Part,
        need: int,
        placement: Placement,
        undo: list[tuple[WorkerRecord | GpuRecord, int, int, bool]],
    ) -> bool:
        row = self.workers.get(part.worker_id)
        ok = (
            row is not None
            and row.state == "READY"
            and row.unified_memory == part.unified
            and (need == 0 or _fits(row, row.ram_allocated + need, placement))
            and (placement.check is Check.FITS or row.version == part.worker_version)
        )
        if row is None or not ok:
            return False
        undo.append((row, row.ram_allocated, row.version, row.over_committed))
        row.ram_allocated += need
        self._booked(row, row.ram_allocated, need)
        return True

    def _book_gpu(
        self,
        part: Part,
        n: int,
        placement: Placement,
        undo: list[tuple[WorkerRecord | GpuRecord, int, int, bool]],
    ) -> bool:
        row, need = self.gpu_devices.get(part.gpu_ids[n]), part.vram[n]
        ok = (
            row is not None
            and row.open
            and row.host.unified_memory == part.unified
            and _fits(row, row.vram_allocated + need, placement)
            and (placement.check is Check.FITS or row.version == part.gpu_versions[n])
        )
        if row is None or not ok:
            return False
        undo.append((row, row.vram_allocated, row.version, row.over_committed))
        row.vram_allocated += need
        self._booked(row, row.vram_allocated, need)
        return True

    def _booked(self, row: WorkerRecord | GpuRecord, allocated: int, need: int) -> None:
        mark(row, allocated, shrank=need > 0)  # whoever may over-commit was let through above
        row.version += 1
        self._stamp(row)

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
            row.next_attempt_at = None if retry is None else self.clock() + retry
            self.decisions.append(Decision(row.id, claim.epoch, claim.attempts, replica, refusal.record))
            written.add(row.id)
        return written

    async def hand_back(self, owner: UUID) -> Sequence[int]:
        return self._let_go([i for i in self.model_instances.values() if i.lease_owner == owner])

    async def expire_leases(self) -> Sequence[int]:
        now = self.clock()
        return self._let_go([i for i in self.model_instances.values() if (i.lease_until or now + 1) <= now])

    async def autofill(self, model_id: int, version: int, patch: Mapping[str, Any]) -> bool:
        model = self.models_by_id.get(model_id)
        if model is None or model.version != version:
            return False
        model.columns |= {k: v for k, v in patch.items() if v is not None}
        return True

    def _let_go(self, rows: Sequence[InstanceRecord]) -> list[int]:
        for row in rows:
            row.state, row.lease_owner, row.lease_until = InstanceState.PENDING, None, None
        return [row.id for row in rows]

    def _held(self, owner: UUID, id_: int, epoch: int | None = None) -> InstanceRecord | None:
        """The row, where the right to work on it is this owner's and still runs."""
        row = self.model_instances.get(id_)
        if row is None or row.lease_owner != owner or (row.lease_until or 0) <= self.clock():
            return None
        return row if epoch is None or row.placement_epoch == epoch else None

    def _priority(self, row: InstanceRecord) -> int:
        return self.models_by_id[row.model_id].priority if row.priority is None else row.priority

    def _waiting(self, row: InstanceRecord) -> WaitingInstance:
        told = None
        if row.reasons is not None:
            codes = ";".join(f"{r['filter']}:{r['code']}" for r in row.reasons)
            told = f"{codes}#{md5((row.state_message or '').encode(), usedforsecurity=False).hexdigest()}"
        return WaitingInstance(
            id=row.id,
            name=row.name,
            model_id=row.model_id,
            epoch=row.placement_epoch,
            attempts=row.attempts,
            priority=self._priority(row),
            created_at=datetime.fromtimestamp(row.created_at, UTC),
            due_in=0.0 if row.next_attempt_at is None else row.next_attempt_at - self.clock(),
            signature=told,
        )


def _fits(row: WorkerRecord | GpuRecord, wanted: int, placement: Placement) -> bool:
    """Whether `wanted` bytes in all may be booked on a row; a marked one takes nothing unless asked to."""
    return placement.over_commit or (
        not row.over_committed and row.capacity is not None and wanted <= row.capacity
    )


def _worker(row: WorkerRecord) -> WorkerRow:
    return WorkerRow(
        id=row.id,
        name=row.name,
        cluster_id=row.cluster_id,
        state=row.state,
        version=row.version,
        labels=dict(row.labels or {}),
        ram_capacity=row.capacity,
        ram_allocated=row.ram_allocated,
        unified_memory=row.unified_memory,
        over_committed=row.over_committed,
        vram_reserved=row.vram_reserved,
        cpu_arch=row.cpu_arch,
        ip=row.ip,
        advertise_address=row.advertise_address,
        ifname=row.ifname,
        port=row.port,
    )


def _gpu(row: GpuRecord) -> GpuRow:
    same = ("id", "index", "type", "version", "vram_total", "capacity", "vram_allocated", "open",
            "schedulable", "over_committed", "vendor", "name", "uuid", "arch_family", "compute_capability",
            "runtime_version", "vram_used", "links", "network")  # fmt: skip
    return GpuRow(worker_id=row.host.id, **{name: getattr(row, name) for name in same})


def _model(row: ModelRecordRow) -> ModelRecord:
    try:
        spec = model_spec({"id": row.id, "version": row.version, "name": row.name, **row.columns})
    except BadRow as error:
        return ModelRecord(row.id, row.version, row.name, None, str(error))
    return ModelRecord(row.id, row.version, row.name, spec)
