"""Metrics: what a scrape reads, and that no two processes share figures."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpustackd.observe.metrics import PHASES, Metrics, exposition


def made() -> Metrics:
    return Metrics(version="1.2.3", replica="r1")


def scraped(metrics: Metrics) -> dict[str, float]:
    """Sample name with labels -> value."""
    text, content_type = exposition(metrics.registry)
    assert content_type.startswith("text/plain")
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_what_the_daemon_must_show_is_there_from_the_start() -> None:
    seen = scraped(made())
    for name in (
        "gpustackd_attempts_total,outcome=placed",
        "gpustackd_commit_conflicts_total",
        "gpustackd_placed_only_by_rescan_total",
        "gpustackd_listening",
        "gpustackd_listen_reconnects_total",
        "gpustackd_listen_probe_failures_total",
        "gpustackd_leases_expired_total",
        "gpustackd_database_errors_total,kind=lost",
        "gpustackd_database_up",
        "gpustackd_decision_seconds_count",
        "gpustackd_batch_size_count",
        "gpustackd_queue_dropped_total",
        "gpustackd_fleet_gpus",
        *(f"gpustackd_phase_seconds_count,phase={phase}" for phase in PHASES),
    ):
        assert seen[name] == 0, name
    assert seen["gpustackd_build_info,replica=r1,version=1.2.3"] == 1
    assert seen["process_resident_memory_bytes"] > 1e6


def test_names_follow_prometheus_in_base_units() -> None:
    for family in text_string_to_metric_families(exposition(made().registry)[0].decode()):
        if family.name.startswith("gpustackd_"):
            assert re.fullmatch(r"[a-z_]+", family.name)
            assert not family.name.endswith(("_ms", "_milliseconds", "_mb", "_gib", "_created"))
            assert family.documentation
            timed = family.type == "histogram" and "batch" not in family.name
            assert not timed or family.name.endswith("_seconds")


def test_what_happened_is_counted() -> None:
    metrics = made()
    metrics.attempt("placed", rescan_only=True, waited=0.5)
    metrics.attempt("no_fit")
    metrics.phase("commit", 0.01)
    metrics.decision(0.0003)
    metrics.batch(64)
    metrics.conflict()
    metrics.rescan(corrected=True, seconds=0.2)
    metrics.rescan(corrected=False)
    metrics.leases_expired(3)
    metrics.database_up(True)
    metrics.database_up(False)
    metrics.database_error("contended")
    metrics.listening(True)
    metrics.queue_dropped(9)
    metrics.model_unreadable()
    seen = scraped(metrics)
    left_out = ("bucket", "_sum", "build_info")
    assert {
        name.removeprefix("gpustackd_"): value
        for name, value in seen.items()
        if value and name.startswith("gpustackd_") and not any(part in name for part in left_out)
    } == {
        "attempts_total,outcome=placed": 1,
        "attempts_total,outcome=no_fit": 1,
        "placed_only_by_rescan_total": 1,
        "wait_seconds_count": 1,
        "phase_seconds_count,phase=commit": 1,
        "decision_seconds_count": 1,
        "batch_size_count": 1,
        "commit_conflicts_total": 1,
        "rescans_total": 2,
        "rescan_corrections_total": 1,
        "rescan_seconds_count": 1,
        "leases_expired_total": 3,
        "database_errors_total,kind=lost": 1,
        "database_errors_total,kind=contended": 1,
        "listening": 1,
        "queue_dropped_total": 9,
        "model_read_failures_total": 1,
    }  # fmt: skip
    assert seen["gpustackd_decision_seconds_bucket,le=0.0002"] == 0
    assert seen["gpustackd_decision_seconds_bucket,le=0.0004"] == 1


def test_the_session_is_asked_at_every_scrape() -> None:
    metrics = made()
    lanes = {"active": 3, "parked": 10_000}
    metrics.watch(queue=lambda: lanes, fleet=lambda: (5, 40), held=lambda: 2)
    metrics.watch_listener(lambda: 2, lambda: 1)
    seen = scraped(metrics)
    assert seen["gpustackd_queue_items,lane=parked"] == 10_000
    assert (seen["gpustackd_fleet_workers"], seen["gpustackd_fleet_gpus"]) == (5, 40)
    assert seen["gpustackd_claims_held"] == 2
    assert seen["gpustackd_listen_reconnects_total"] == 2
    assert seen["gpustackd_listen_probe_failures_total"] == 1
    lanes["active"] = 0
    assert scraped(metrics)["gpustackd_queue_items,lane=active"] == 0


def test_a_figure_that_cannot_be_had_does_not_cost_the_others() -> None:
    metrics = made()
    metrics.watch_gauge("gpustackd_loop_beat_age_seconds", "Age", lambda: 1 / 0)
    metrics.watch_total("gpustackd_log_lines_dropped", "Lines", lambda: 4)
    seen = scraped(metrics)
    assert "gpustackd_loop_beat_age_seconds" not in seen
    assert seen["gpustackd_log_lines_dropped_total"] == 4


def test_two_replicas_in_one_process_count_apart() -> None:
    one, other = made(), made()
    one.conflict()
    assert scraped(other)["gpustackd_commit_conflicts_total"] == 0


def test_a_name_is_watched_once() -> None:
    metrics = made()
    metrics.watch_gauge("gpustackd_x", "x", lambda: 1)
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.watch_gauge("gpustackd_x", "x", lambda: 1)


def test_a_scraper_may_ask_for_openmetrics() -> None:
    text, content_type = exposition(made().registry, "application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")
