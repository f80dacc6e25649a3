"""What happened to workers and placed instances, told once: as log events and as metrics."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from prometheus_client import Counter, Gauge

from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.timeouts import Timeouts
from gpustackd.store.postgres.health import Census, Moved
from gpustackd.store.postgres.lifecycle import FailedRow, LeavingRow

CAUSES: Final = ("worker_lost", "not_taken", "not_reported", "drained", "failed", "out_of_memory")
_CAUSE = {"evicted": "worker_lost", "untaken": "not_taken", "adrift": "not_reported"}
_REMEMBERED = 10_000


class RecoveryReporter:
    """One per process: it registers its metrics."""

    def __init__(self, reports: Reporter, windows: Timeouts) -> None:
        self._reports = reports
        self._windows = windows
        on = reports.metrics.registry
        self._evicted = Counter(
            "gpustackd_instances_evicted",
            "Placed instances sent back to be placed anew by this replica",
            ["cause"],
            registry=on,
        )
        self._unreachable = Counter(
            "gpustackd_instances_unreachable", "Instances marked UNREACHABLE by this replica", registry=on
        )
        self._restarted = Counter("gpustackd_instances_restarted", "Restarts in place", registry=on)
        self._silent = Counter("gpustackd_workers_silent", "Workers that fell silent", registry=on)
        self._down = Gauge(
            "gpustackd_workers_down", "Workers that are not there and have not been given up", registry=on
        )
        self._halted = Gauge(
            "gpustackd_evictions_halted",
            "1 while nothing is evicted: too many workers down at once, or too short a watch",
            ["reason"],
            registry=on,
        )
        for cause in CAUSES:
            self._evicted.labels(cause)
        for reason in ("mass_loss", "own_outage"):
            self._halted.labels(reason)
        self._doubted: frozenset[str] = frozenset()
        self._young = False
        self._told: set[tuple[int, str]] = set()

    def census(self, found: Census, watched: float) -> None:
        """What a sweep found, after so many seconds of watching without a gap."""
        self._silent.inc(len(found.silent))
        self._down.set(found.down)
        self._halted.labels("mass_loss").set(bool(found.doubts))
        young = watched < self._windows.reschedule
        self._halted.labels("own_outage").set(young)
        if young and found.down and not self._young:
            self._reports.event(
                "warning",
                "eviction.halted",
                reason=f"workers have been watched for only {watched:.0f} s without a gap; before"
                f" {self._windows.reschedule:.0f} s nothing is evicted for their silence",
                workers_down=found.down,
            )
        self._young = young and found.down > 0
        doubted = frozenset(d.cluster or "" for d in found.doubts)
        for doubt in found.doubts:
            if (doubt.cluster or "") not in self._doubted:
                self._reports.event(
                    "error",
                    "eviction.halted",
                    reason=f"{doubt.down} of {doubt.of} workers of"
                    f" {'cluster ' + doubt.cluster if doubt.cluster else 'no cluster'} are down at once: the"
                    " observer is doubted first, nothing is evicted there",
                    workers_down=doubt.down,
                )
        for cluster in self._doubted - doubted:
            self._reports.event("info", "eviction.resumed", cluster=cluster or None)
        self._doubted = doubted

    def moved(self, moved: Collection[Moved]) -> None:
        """Instances that a sweep moved."""
        for m in moved:
            if m.kind == "unreachable":
                self._unreachable.inc()
                self._reports.event("warning", "instance.unreachable", **_who(m), reason=m.why)
            else:
                self._evicted.labels(_CAUSE[m.kind]).inc()
                self._reports.event(
                    "warning", "instance.evicted", **_who(m), cause=_CAUSE[m.kind], reason=m.why
                )

    def drained(self, row: LeavingRow) -> None:
        self._evicted.labels("drained").inc()
        self._reports.event(
            "info", "instance.evicted", instance=row.name, instance_id=row.id, model=row.model,
            worker=row.worker, cause="drained", reason=f"worker {row.worker} is being drained",
        )  # fmt: skip

    def held(self, row: LeavingRow, why: str) -> None:
        """A replica does not leave its worker yet; told once for each reason."""
        if self._first(row.id, why):
            self._reports.event(
                "info", "drain.held", instance=row.name, instance_id=row.id, model=row.model,
                worker=row.worker, reason=why,
            )  # fmt: skip

    def restarted(self, row: FailedRow) -> None:
        self._restarted.inc()
        self._reports.event(
            "warning", "instance.restarted", instance=row.name, instance_id=row.id, model=row.model,
            worker=row.worker, restart=row.restart_count + 1, reason=row.message,
        )  # fmt: skip

    def replaced(self, row: FailedRow, cause: str, why: str) -> None:
        self._evicted.labels(cause).inc()
        self._reports.event(
            "warning", "instance.evicted", instance=row.name, instance_id=row.id, model=row.model,
            worker=row.worker, cause=cause, reason=why,
        )  # fmt: skip

    def hopeless(self, row: FailedRow) -> None:
        """It is not restarted any more; told once."""
        if self._first(row.id, f"hopeless {row.failures}"):
            self._reports.event(
                "error", "instance.failed", instance=row.name, instance_id=row.id, model=row.model,
                worker=row.worker, failures=row.failures, reason=row.message,
            )  # fmt: skip

    def contended(self, what: str) -> None:
        self._reports.contended(what)

    def unexpected(self, what: str, error: BaseException) -> None:
        self._reports.unexpected(what, error)

    def _first(self, instance_id: int, what: str) -> bool:
        if (instance_id, what) in self._told:
            return False
        if len(self._told) >= _REMEMBERED:
            self._told.clear()
        self._told.add((instance_id, what))
        return True


def _who(m: Moved) -> dict[str, object]:
    return {"instance": m.name, "instance_id": m.id, "model": m.model_id, "worker": m.worker}
