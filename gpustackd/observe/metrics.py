"""Metrics of one replica, in a registry of its own: Prometheus names in base units (seconds, bytes)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

PHASES: Final = ("claim", "facts", "decide", "commit")
OUTCOMES: Final = ("placed", "no_fit", "conflict", "error", "lost")
STAGES: Final = tuple(
    [f"filter.{name}" for name in ("cluster", "gpu_selector", "labels", "status", "backend", "local_path")]
    + [f"scorer.{name}" for name in ("placement", "locality", "preferred")]
)
_DECISION = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 1.28e-2, 2.56e-2, 0.1, 1.0)
_PHASE = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 0.128, 0.5, 2.0, 15.0)
_WAIT = (5e-3, 1e-2, 2e-2, 4e-2, 0.1, 0.25, 1.0, 5.0, 30.0, 180.0, 600.0, 3600.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """All metrics. One object per process, passed to the parts that count.

    Events are counted by a call; states (queue, fleet) are read when a scrape comes, see `watch`.
    """

    def __init__(self, version: str, replica: str) -> None:
        self.registry = on = CollectorRegistry()
        counter, gauge = partial(Counter, registry=on), partial(Gauge, registry=on)
        histogram = partial(Histogram, registry=on)
        self._attempts = counter("gpustackd_attempts", "Attempts by outcome", ["outcome"])
        self._conflicts = counter("gpustackd_commit_conflicts", "Placements rejected by the commit")
        self._overtaken = counter(
            "gpustackd_decisions_overtaken", "Placements made anew for changes of the fleet"
        )
        self._unreadable = counter("gpustackd_model_read_failures", "Failed reads of models")
        self._queue_dropped = counter("gpustackd_queue_dropped", "Instances the full queue dropped")
        self._cut = counter("gpustackd_searches_cut", "Searches ended at their limit")
        stage_failures = "Decisions made without a filter or scorer that failed"
        self._stage_failures = counter("gpustackd_stage_failures", stage_failures, ["stage"])
        only_by_rescan = "Placements of instances that no notification had announced"
        self._only_by_rescan = counter("gpustackd_placed_only_by_rescan", only_by_rescan)
        waits = "Seconds from the creation of a row to its placement"
        self._waits = histogram("gpustackd_wait_seconds", waits, buckets=_WAIT)
        self._phases = histogram(
            "gpustackd_phase_seconds", "One batch in one phase", ["phase"], buckets=_PHASE
        )
        self._decisions = histogram("gpustackd_decision_seconds", "One decision", buckets=_DECISION)
        self._batches = histogram("gpustackd_batch_size", "Outcomes in one commit", buckets=_BATCH)
        self._listening = gauge("gpustackd_listening", "1 while notifications arrive")
        self._rescans = counter("gpustackd_rescans", "Full scans")
        corrections = "Full scans that corrected the view of the fleet"
        self._corrections = counter("gpustackd_rescan_corrections", corrections)
        self._rescan_seconds = histogram("gpustackd_rescan_seconds", "One full scan", buckets=_PHASE)
        self._expired = counter("gpustackd_leases_expired", "Claims taken back from replicas that are gone")
        syncs = "Attempts to bring a model to its number of replicas"
        self._replica_syncs = counter("gpustackd_replica_syncs", syncs, ["outcome"])
        self._replicas_changed = counter("gpustackd_replicas_changed", "Instances by change", ["change"])
        self._database_up = gauge("gpustackd_database_up", "1 while the database answers")
        self._database_errors = counter("gpustackd_database_errors", "Failed statements by kind", ["kind"])
        self._unexpected = counter(
            "gpustackd_unexpected_errors", "Contained errors of gpustackd itself", ["where"]
        )
        build = gauge("gpustackd_build_info", "1, with labels", ["version", "replica"])
        build.labels(version, replica).set(1)
        ProcessCollector(registry=on)
        for phase in PHASES:
            self._phases.labels(phase)
        for outcome in OUTCOMES:
            self._attempts.labels(outcome)
        self._database_errors.labels("lost")
        for stage in STAGES:
            self._stage_failures.labels(stage)
        self.recovery = RecoveryMetrics(on)

        self._reconnects: Callable[[], int] = lambda: 0
        self._probe_failures: Callable[[], int] = lambda: 0
        self._queue: Callable[[], Mapping[str, int]] = dict
        self._fleet: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._held: Callable[[], int] = lambda: 0
        on.register(_OnScrape(self._session))
        on.register(_OnScrape(self._listener))

    # -- events ---------------------------------------------------------------------------------------

    def attempt(self, outcome: str, *, rescan_only: bool = False, waited: float | None = None) -> None:
        """An attempt ended (`placed`, `no_fit`, `error`, `lost`, …). `waited`: seconds since the row's
        creation; `rescan_only`: no notification had announced the instance."""
        self._attempts.labels(outcome).inc()
        if rescan_only:
            self._only_by_rescan.inc()
        if waited is not None:
            self._waits.observe(waited)

    def decision(self, seconds: float) -> None:
        """One decision took so many seconds."""
        self._decisions.observe(seconds)

    def conflict(self) -> None:
        """A placement was rejected by the commit: the rows did not offer what was decided on."""
        self._conflicts.inc()

    def search_cut(self) -> None:
        """A search ended at its limit."""
        self._cut.inc()

    def model_unreadable(self) -> None:
        """The files of a model could not be read."""
        self._unreadable.inc()

    def queue_dropped(self, count: int) -> None:
        """The queue had no room for so many instances."""
        self._queue_dropped.inc(count)

    def stage_failed(self, stage: str) -> None:
        """A decision went on without this filter or scorer (`filter.labels`, `scorer.locality`, …)."""
        self._stage_failures.labels(stage).inc()

    def overtaken(self, count: int) -> None:
        """So many placements did not fit any more when their commit came up."""
        self._overtaken.inc(count)

    def phase(self, name: str, seconds: float) -> None:
        """A batch went through `claim`, `facts`, `decide` or `commit` in so many seconds."""
        self._phases.labels(name).observe(seconds)

    def batch(self, size: int) -> None:
        """So many outcomes were written by one call."""
        self._batches.observe(size)

    def rescan(self, *, corrected: bool, seconds: float | None = None) -> None:
        """A full scan was made; `corrected`: it found the view of the fleet wrong."""
        self._rescans.inc()
        if corrected:
            self._corrections.inc()
        if seconds is not None:
            self._rescan_seconds.observe(seconds)

    def leases_expired(self, count: int) -> None:
        """So many claims were taken back from replicas that are gone."""
        self._expired.inc(count)

    def replica_sync(self, outcome: str) -> None:
        """An attempt to bring a model to its number of replicas ended (`done`, `busy`, `changed`, …)."""
        self._replica_syncs.labels(outcome).inc()

    def replicas_changed(self, change: str, number: int) -> None:
        """So many instances were `added`, `deleted`, sent to `draining` or `taken_back`."""
        if number:
            self._replicas_changed.labels(change).inc(number)

    def database_up(self, up: bool) -> None:
        """Whether the database answers; losing it counts as one error."""
        self._database_up.set(up)
        if not up:
            self.database_error("lost")

    def database_error(self, kind: str) -> None:
        """A statement failed."""
        self._database_errors.labels(kind).inc()

    def unexpected(self, where: str) -> None:
        """An error of gpustackd itself, which was contained."""
        self._unexpected.labels(where).inc()

    def listening(self, arriving: bool) -> None:
        """Whether notifications arrive."""
        self._listening.set(arriving)

    # -- states ---------------------------------------------------------------------------------------

    def watch(
        self,
        *,
        queue: Callable[[], Mapping[str, int]],
        fleet: Callable[[], tuple[int, int]],
        held: Callable[[], int],
    ) -> None:
        """From now on scrapes read these: ids per lane, (workers, GPUs) known, and claims held."""
        self._queue, self._fleet, self._held = queue, fleet, held

    def watch_listener(self, reconnects: Callable[[], int], probe_failures: Callable[[], int]) -> None:
        """From now on scrapes read these totals since the start of the process."""
        self._reconnects, self._probe_failures = reconnects, probe_failures

    def watch_gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Have scrapes read one more value, such as the age of the loop's last beat in seconds."""
        self.registry.register(
            _OnScrape(lambda: [GaugeMetricFamily(name, text, value=value())], name, "gauge")
        )

    def watch_total(self, name: str, text: str, value: Callable[[], float]) -> None:
        """The same for a total that only rises; `_total` is added to its name."""
        self.registry.register(
            _OnScrape(lambda: [CounterMetricFamily(name, text, value=value())], name, "counter")
        )

    def _session(self) -> Iterable[Metric]:
        lanes = GaugeMetricFamily("gpustackd_queue_items", "Instances by lane", labels=["lane"])
        for lane, count in self._queue().items():
            lanes.add_metric([str(lane)], count)
        yield lanes
        workers, gpus = self._fleet()
        yield GaugeMetricFamily("gpustackd_fleet_workers", "Workers known", value=workers)
        yield GaugeMetricFamily("gpustackd_fleet_gpus", "GPUs known", value=gpus)
        yield GaugeMetricFamily("gpustackd_claims_held", "Instances under our lease", value=self._held())

    def _listener(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "gpustackd_listen_reconnects", "New connections for LISTEN", value=self._reconnects()
        )
        yield CounterMetricFamily(
            "gpustackd_listen_probe_failures",
            "Test notifications that never arrived",
            value=self._probe_failures(),
        )


CAUSES: Final = ("worker_lost", "not_taken", "not_reported", "drained", "failed", "out_of_memory")
"""Why an instance was sent back to be placed anew."""


class RecoveryMetrics:
    """What is counted of workers and of instances that have a place."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        evicted = "Instances that this replica sent back to be placed anew"
        self._evicted = counter("gpustackd_instances_evicted", evicted, ["cause"])
        unreachable = "Instances that this replica marked UNREACHABLE"
        self._unreachable = counter("gpustackd_instances_unreachable", unreachable)
        self._restarted = counter("gpustackd_instances_restarted", "Restarts in place")
        self._silent = counter("gpustackd_workers_silent", "Workers that fell silent")
        down = "Workers that are down and have not been given up"
        self._down = gauge("gpustackd_workers_down", down)
        halted = "1 while nothing is evicted: too many workers down at once, or watched for too short a time"
        self._halted = gauge("gpustackd_evictions_halted", halted, ["reason"])
        for cause in CAUSES:
            self._evicted.labels(cause)
        for reason in ("mass_loss", "own_outage"):
            self._halted.labels(reason)

    def census(self, *, silent: int, down: int, mass_loss: bool, own_outage: bool) -> None:
        """A sweep found so many workers newly silent and so many down; why nothing is evicted, if so."""
        self._silent.inc(silent)
        self._down.set(down)
        self._halted.labels("mass_loss").set(mass_loss)
        self._halted.labels("own_outage").set(own_outage)

    def evicted(self, cause: str) -> None:
        """An instance was sent back (one of `CAUSES`)."""
        self._evicted.labels(cause).inc()

    def unreachable(self) -> None:
        """An instance was marked UNREACHABLE."""
        self._unreachable.inc()

    def restarted(self) -> None:
        """An instance in ERROR was given to its worker again."""
        self._restarted.inc()


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """All metrics in the format that the scraper accepts (its Accept header), and the content type."""
    encode, content_type = choose_encoder(accept)
    return encode(_WithoutBirths(registry)), content_type


class _WithoutBirths(Collector):
    """Leaves out the `_created` series, which double every counter and which nobody uses."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _OnScrape(Collector):
    """Reads values when a scrape comes. What cannot be read is left out, without losing the other metrics."""

    def __init__(self, read: Callable[[], Iterable[Metric]], name: str = "", kind: str = "") -> None:
        self._read = read
        self._claimed = [Metric(name, "", kind)] if name else []

    def describe(self) -> Iterable[Metric]:
        """Names to check for duplicates."""
        return self._claimed

    def collect(self) -> Iterable[Metric]:
        metrics: list[Metric] = []
        with suppress(Exception):
            metrics.extend(self._read())
        return metrics
