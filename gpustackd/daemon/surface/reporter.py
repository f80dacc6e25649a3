"""What happened, told once: each outcome as a log event and as a metric, in the words of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

from gpustackd.daemon.queue.instance_queue import InstanceQueue, WakeOrigin
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.work_state import Work, WorkState
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.outcome import Reason
from gpustackd.observe.logging import Log
from gpustackd.observe.metrics import Metrics
from gpustackd.ports import CommitResult, Proposal, Refusal, ReplicaSnapshot, WaitingInstance
from gpustackd.replicas.sync_plan import SyncPlan

_QUIET = 30.0
"""Seconds between two lines on the same failing stage."""


class Reporter:
    """One per process; the session under way attaches what gauges look at."""

    def __init__(self, log: Log, metrics: Metrics) -> None:
        self.log = log
        self.metrics = metrics
        self._names: dict[int, str] = {}
        self._quiet_until: dict[str, float] = {}

    def attach(self, queue: InstanceQueue, view: FleetFeed, desk: WorkState) -> None:
        """From now on gauges show this session."""
        self.metrics.watch(
            queue=lambda: {str(lane): n for lane, n in queue.counts().items()},
            fleet=lambda: _fleet_size(view),
            held=lambda: len(desk.held),
            dropped=lambda: queue.dropped,
        )

    # -- the way of one instance ----------------------------------------------------------------------

    def enqueued(self, row: WaitingInstance, origin: WakeOrigin) -> None:
        self.log.info(
            "instance.enqueued", instance=row.name, instance_id=row.id, model=row.model_id, origin=str(origin)
        )

    def analyzing(self, work: Work) -> None:
        assert work.claim is not None
        self.log.info(
            "instance.analyzing",
            instance=work.name,
            instance_id=work.id,
            model=work.model_id,
            attempt=work.attempts,
        )

    def scheduled(self, work: Work, proposal: Proposal) -> None:
        placement = proposal.decision.placement
        main = placement.parts[0]
        waited = proposal.claim.waited_seconds
        self.metrics.attempt("placed", rescan_only=work.from_rescan, waited=waited)
        self.metrics.decision(proposal.duration_ms / 1000)
        self.log.info(
            "instance.scheduled",
            instance=work.name,
            instance_id=work.id,
            model=work.model_id,
            attempt=work.attempts,
            worker=main.worker_name,
            gpus=[f"{p.worker_name}:{p.gpu_type}:{i}" for p in placement.parts for i in p.gpu_indexes],
            duration_ms=round(proposal.duration_ms, 3),
        )

    def unschedulable(self, work: Work, refusal: Refusal) -> None:
        outcome = "error" if refusal.to_error else refusal.record.lower()
        self.metrics.attempt(outcome)
        self.metrics.decision(refusal.duration_ms / 1000)
        self.log.info(
            "instance.unschedulable",
            instance=work.name,
            instance_id=work.id,
            model=work.model_id,
            attempt=work.attempts,
            reason=refusal.outcome.message,
            duration_ms=round(refusal.duration_ms, 3),
        )

    def conflict(self, work: Work, proposal: Proposal, result: CommitResult) -> None:
        self.metrics.conflict()
        self.log.info(
            "placement.conflict",
            instance=work.name,
            instance_id=work.id,
            model=work.model_id,
            attempt=work.attempts,
            worker=proposal.decision.placement.parts[0].worker_name,
            gpu_ids=list(result.gpu_ids),
            worker_ids=list(result.worker_ids),
            clashes=work.clashes + 1,
        )

    def overtaken(self, works: Sequence[Work]) -> None:
        self.metrics.overtaken(len(works))
        self.log.info("placement.overtaken", count=len(works), instance_ids=[w.id for w in works[:20]])

    def search_cut(self, model: str, instance_id: int, milliseconds: float) -> None:
        """A search ended for its budget."""
        self.metrics.search_cut()
        self.log.warning(
            "search.cut", model=model, instance_id=instance_id, duration_ms=round(milliseconds, 3)
        )

    def left_out(self, fault: Reason, model: str) -> None:
        """A decision was made without a filter or scorer that failed. Counted each time, logged now and
        then: a filter that fails once fails in every decision."""
        stage, now = str(fault.params.get("stage")), monotonic()
        self.metrics.stage_failed(stage)
        if now >= self._quiet_until.get(stage, 0.0):
            self._quiet_until[stage] = now + _QUIET
            self.log.error("decision.stage_failed", stage=stage, model=model, reason=fault.text)

    def lost(self, work: Work) -> None:
        self.metrics.attempt("lost")
        self.log.info("instance.lost", instance=work.name, instance_id=work.id, attempt=work.attempts)

    # -- replicas -------------------------------------------------------------------------------------

    def replicas_tried(self, outcome: str) -> None:
        self.metrics.replica_sync(outcome)

    def replicas_synced(self, seen: ReplicaSnapshot, wanted: int, done: SyncPlan) -> None:
        """A model was brought to its number."""
        changes = {
            "added": sum(seat.number for seat in done.add),
            "deleted": len(done.delete),
            "draining": len(done.drain),
            "taken_back": len(done.undrain),
        }
        for change, number in changes.items():
            self.metrics.replicas_changed(change, number)
        self.log.info(
            "replicas.synced",
            model=seen.name,
            model_id=seen.model_id,
            replicas=wanted,
            before=len(seen.instances),
            instance_ids=[*done.delete, *done.drain, *done.undrain][:20],
            **{change: number for change, number in changes.items() if number},
        )

    # -- the daemon itself ----------------------------------------------------------------------------

    def phase(self, name: str, seconds: float) -> None:
        self.metrics.phase(name, seconds)

    def committed(self, size: int, seconds: float) -> None:
        self.metrics.phase("commit", seconds)
        self.metrics.batch(size)

    def rescanned(self, waiting: int, gone: int, corrected: bool, seconds: float) -> None:
        self.metrics.rescan(corrected=corrected, seconds=seconds)
        self.log.info(
            "rescan.done",
            waiting=waiting,
            forgotten=gone,
            corrected=corrected,
            duration_ms=round(seconds * 1000, 1),
        )

    def worker_state(self, worker: WorkerRow, before: str | None) -> None:
        self.log.info(
            "worker.state_changed",
            worker=worker.name,
            before=before,
            state=worker.state,
            reason=worker.state_message,
        )

    def leases_expired(self, ids: Sequence[int]) -> None:
        self.metrics.leases_expired(len(ids))
        self.log.warning("lease.expired", count=len(ids), instance_ids=list(ids[:20]))

    def contended(self, what: str) -> None:
        self.metrics.database_error("contended")
        self.log.warning("database.error", reason=f"the database made {what} yield; it is tried again")

    def unexpected(self, what: str, error: BaseException, **fields: Any) -> None:
        """A mistake of ours: told with its traceback, and the work goes on without what caused it."""
        self.metrics.unexpected(what)
        self.log.error("daemon.error", reason=f"{what}: {error!r}"[:2000], exc_info=error, **fields)

    def event(self, level: str, name: str, **fields: Any) -> None:
        getattr(self.log, level)(name, **fields)


def _fleet_size(view: FleetFeed) -> tuple[int, int]:
    return len(view.fleet.position), len(view.fleet.slot)
