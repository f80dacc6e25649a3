"""What happened, reported once: each outcome as a log event and as a metric."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, Protocol

from gpustackd.daemon.queue.lanes import WakeOrigin
from gpustackd.daemon.scheduling.work_state import WorkItem
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.domain.outcome import Reason
from gpustackd.domain.timeouts import Timeouts
from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.observe.logging import Log
from gpustackd.observe.metrics import Metrics
from gpustackd.ports import CommitResult, Proposal, Refusal, ReplicaSnapshot, WaitingInstance
from gpustackd.replicas.sync_plan import SyncPlan
from gpustackd.store.postgres.instance_recovery import FailedRow, LeavingRow
from gpustackd.store.postgres.listen import ListenerStatus
from gpustackd.store.postgres.worker_health import MovedInstance, WorkerSweep

_QUIET = 30.0
"""Seconds between two lines on the same failing stage, or on a full queue."""
_REMEMBERED = 10_000
_IDS_SHOWN = 20


class DecisionReporter(Protocol):
    """What reading models and deciding report, in a daemon and where only a question is answered."""

    def event(self, level: str, name: str, **fields: Any) -> None:
        """One log line."""

    def unexpected(self, what: str, error: BaseException, **fields: Any) -> None:
        """A mistake in gpustackd; the work goes on without what caused it."""

    def stage_failed(self, fault: Reason, model: str) -> None:
        """A decision was made without a filter or scorer that failed."""

    def search_cut(self, model: str, instance_id: int, milliseconds: float) -> None:
        """A search ended for its budget."""

    def model_unreadable(self, model: str, model_id: int, reason: str, *, repeated: bool) -> None:
        """The files of a model could not be read; `repeated`: as the last time, for the same reason."""


class Reporter:
    """One per process."""

    def __init__(self, log: Log, metrics: Metrics) -> None:
        self.log = log
        self.metrics = metrics
        self._quiet_until: dict[str, float] = {}

    def event(self, level: str, name: str, **fields: Any) -> None:
        """One log line."""
        getattr(self.log, level)(name, **fields)

    # -- the journey of one instance ------------------------------------------------------------------

    def enqueued(self, row: WaitingInstance, origin: WakeOrigin) -> None:
        self.log.info(
            "instance.enqueued", instance=row.name, instance_id=row.id, model=row.model_id, origin=str(origin)
        )

    def queue_overflow(self, dropped: int, size: int) -> None:
        """The queue was full; so many instances are left to a rescan. Logged now and then."""
        self.metrics.queue_dropped(dropped)
        if self._may_log("queue.overflow"):
            self.log.warning("queue.overflow", count=dropped, waiting=size)

    def analyzing(self, item: WorkItem) -> None:
        self.log.info("instance.analyzing", **_fields(item))

    def scheduled(self, item: WorkItem, proposal: Proposal) -> None:
        placement = proposal.decision.placement
        waited = proposal.claim.waited_seconds
        self.metrics.attempt("placed", rescan_only=item.from_rescan, waited=waited)
        self.metrics.decision(proposal.duration_ms / 1000)
        self.log.info(
            "instance.scheduled",
            **_fields(item),
            worker=placement.parts[0].worker_name,
            gpus=[f"{p.worker_name}:{p.gpu_type}:{i}" for p in placement.parts for i in p.gpu_indexes],
            duration_ms=round(proposal.duration_ms, 3),
        )

    def unschedulable(self, item: WorkItem, refusal: Refusal) -> None:
        outcome = "error" if refusal.to_error else refusal.record.lower()
        self.metrics.attempt(outcome)
        self.metrics.decision(refusal.duration_ms / 1000)
        self.log.info(
            "instance.unschedulable",
            **_fields(item),
            reason=refusal.outcome.message,
            duration_ms=round(refusal.duration_ms, 3),
        )

    def conflict(self, item: WorkItem, proposal: Proposal, result: CommitResult) -> None:
        self.metrics.conflict()
        self.log.info(
            "placement.conflict",
            **_fields(item),
            worker=proposal.decision.placement.parts[0].worker_name,
            gpu_ids=list(result.gpu_ids),
            worker_ids=list(result.worker_ids),
            clashes=item.conflicts + 1,
        )

    def stale(self, items: Sequence[WorkItem]) -> None:
        """These placements did not fit any more when their commit came up."""
        self.metrics.overtaken(len(items))
        self.log.info(
            "placement.overtaken", count=len(items), instance_ids=[i.id for i in items[:_IDS_SHOWN]]
        )

    def lost(self, item: WorkItem) -> None:
        self.metrics.attempt("lost")
        self.log.info("instance.lost", instance=item.name, instance_id=item.id, attempt=item.attempts)

    # -- decisions ------------------------------------------------------------------------------------

    def search_cut(self, model: str, instance_id: int, milliseconds: float) -> None:
        """A search ended for its budget."""
        self.metrics.search_cut()
        self.log.warning(
            "search.cut", model=model, instance_id=instance_id, duration_ms=round(milliseconds, 3)
        )

    def stage_failed(self, fault: Reason, model: str) -> None:
        """A decision was made without a filter or scorer that failed. Counted each time, logged now and
        then: a filter that fails once fails in every decision."""
        stage = str(fault.params.get("stage"))
        self.metrics.stage_failed(stage)
        if self._may_log(stage):
            self.log.error("decision.stage_failed", stage=stage, model=model, reason=fault.text)

    def model_unreadable(self, model: str, model_id: int, reason: str, *, repeated: bool) -> None:
        """The files of a model could not be read. Counted each time, logged when the reason is a new one."""
        self.metrics.model_unreadable()
        if not repeated:
            self.log.warning("model.unreadable", model=model, model_id=model_id, reason=reason)

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
            instance_ids=[*done.delete, *done.drain, *done.undrain][:_IDS_SHOWN],
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
        self.log.warning("lease.expired", count=len(ids), instance_ids=list(ids[:_IDS_SHOWN]))

    def listening(self, listener: ListenerStatus) -> None:
        """The connection that hears notifications changed its state."""
        self.metrics.listening(listener.listening)
        level, name = ("info", "listen.started") if listener.listening else ("warning", "listen.lost")
        if listener.deaf:
            name = "listen.deaf"
        self.event(level, name, reconnects=listener.reconnects)

    def page_failed(self, path: str, error: Exception) -> None:
        """A request to the HTTP surface failed inside."""
        self.log.error("http.error", path=path, reason=repr(error))

    def contended(self, what: str) -> None:
        """The database made a statement wait too long; it is safe to retry, and somebody does."""
        self.metrics.database_error("contended")
        self.log.warning("database.error", reason=f"{what}: lock timeout; retrying")

    def unexpected(self, what: str, error: BaseException, **fields: Any) -> None:
        """A mistake in gpustackd: logged with its traceback, and the work goes on without what caused it."""
        self.metrics.unexpected(what)
        self.log.error("daemon.error", reason=f"{what}: {error!r}"[:2000], exc_info=error, **fields)

    def _may_log(self, subject: str) -> bool:
        """Whether the last line on this is long enough ago; the next one is then held back in turn."""
        now = monotonic()
        if now < self._quiet_until.get(subject, 0.0):
            return False
        self._quiet_until[subject] = now + _QUIET
        return True


def _fields(item: WorkItem) -> dict[str, Any]:
    return {
        "instance": item.name, "instance_id": item.id, "model": item.model_id, "attempt": item.attempts
    }  # fmt: skip


_CAUSE = {"evicted": "worker_lost", "untaken": "not_taken", "adrift": "not_reported"}
"""Why the store moved an instance -> `cause` in log and metrics."""


class RecoveryReporter:
    """What happened to workers and to instances that have a place. One per process."""

    def __init__(self, reporter: Reporter, timeouts: Timeouts) -> None:
        self._reporter = reporter
        self._metrics = reporter.metrics.recovery
        self._timeouts = timeouts
        self._halted_clusters: frozenset[str] = frozenset()
        self._halted_by_outage = False
        self._logged: set[tuple[int, str]] = set()

    def census(self, census: WorkerSweep, watched: float) -> None:
        """What a sweep found, after so many seconds of watching without a gap."""
        short_watch = watched < self._timeouts.reschedule
        self._metrics.census(
            silent=len(census.silent),
            down=census.down,
            mass_loss=bool(census.outages),
            own_outage=short_watch,
        )
        self._report_outage(short_watch and census.down > 0, census.down, watched)
        self._report_mass_loss(census)

    def _report_outage(self, halted: bool, down: int, watched: float) -> None:
        if halted and not self._halted_by_outage:
            reason = (
                f"workers have been watched without a gap for only {watched:.0f} s; none is given up"
                f" before {self._timeouts.reschedule:.0f} s"
            )
            self._reporter.event("warning", "eviction.halted", reason=reason, workers_down=down)
        self._halted_by_outage = halted

    def _report_mass_loss(self, census: WorkerSweep) -> None:
        clusters = frozenset(d.cluster or "" for d in census.outages)
        for doubt in census.outages:
            if (doubt.cluster or "") not in self._halted_clusters:
                cluster = f"cluster {doubt.cluster}" if doubt.cluster else "no cluster"
                reason = (
                    f"{doubt.down} of {doubt.of} workers of {cluster} are down at once; more likely the"
                    " view of them is wrong, so nothing is evicted there"
                )
                self._reporter.event("error", "eviction.halted", reason=reason, workers_down=doubt.down)
        for name in self._halted_clusters - clusters:
            self._reporter.event("info", "eviction.resumed", cluster=name or None)
        self._halted_clusters = clusters

    def moved(self, moved: Collection[MovedInstance]) -> None:
        """Instances that a sweep moved."""
        for m in moved:
            fields = {"instance": m.name, "instance_id": m.id, "model": m.model_id, "worker": m.worker}
            if m.kind == "unreachable":
                self._metrics.unreachable()
                self._reporter.event("warning", "instance.unreachable", **fields, reason=m.why)
            else:
                self._evicted("warning", _CAUSE[m.kind], m.why, fields)

    def drained(self, row: LeavingRow) -> None:
        self._evicted("info", "drained", f"worker {row.worker} is being drained", _placed(row))

    def replaced(self, row: FailedRow, cause: str, why: str) -> None:
        self._evicted("warning", cause, why, _placed(row))

    def _evicted(self, level: str, cause: str, why: str, fields: dict[str, Any]) -> None:
        self._metrics.evicted(cause)
        self._reporter.event(level, "instance.evicted", **fields, cause=cause, reason=why)

    def drain_held(self, row: LeavingRow, why: str) -> None:
        """An instance does not leave its worker yet; logged once for each reason."""
        if self._first(row.id, why):
            self._reporter.event("info", "drain.held", **_placed(row), reason=why)

    def restarted(self, row: FailedRow) -> None:
        self._metrics.restarted()
        self._reporter.event(
            "warning", "instance.restarted", **_placed(row), restart=row.restart_count + 1, reason=row.message
        )

    def hopeless(self, row: FailedRow) -> None:
        """It is not restarted any more; logged once."""
        if self._first(row.id, f"hopeless {row.failures}"):
            self._reporter.event(
                "error", "instance.failed", **_placed(row), failures=row.failures, reason=row.message
            )

    @contextmanager
    def contained(self, what: str) -> Iterator[None]:
        """One round of a sweep: a row that trips it must not stop what places the other instances. Lets
        DatabaseUnavailable through."""
        try:
            yield
        except Contended:
            self._reporter.contended(what)
        except DatabaseUnavailable:
            raise
        except Exception as error:
            self._reporter.unexpected(what, error)

    def _first(self, instance_id: int, what: str) -> bool:
        if (instance_id, what) in self._logged:
            return False
        if len(self._logged) >= _REMEMBERED:
            self._logged.clear()
        self._logged.add((instance_id, what))
        return True


def _placed(row: FailedRow | LeavingRow) -> dict[str, Any]:
    return {"instance": row.name, "instance_id": row.id, "model": row.model, "worker": row.worker}
