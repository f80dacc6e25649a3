"""How long workers were watched: what nobody watched is nobody's silence."""

from __future__ import annotations

from gpustackd.domain.timeouts import ObservationPeriod, Timeouts


def watched(watch: ObservationPeriod, ours: float, theirs: float | None = None) -> float:
    found = watch.begin(ours, ours + 5000 if theirs is None else theirs)
    watch.complete()
    return found


def test_a_watch_grows_while_looks_follow_each_other() -> None:
    watch = ObservationPeriod(45)
    assert [watched(watch, t) for t in (100, 115, 130, 175)] == [0, 15, 30, 75]


def test_a_gap_by_either_clock_begins_it_anew() -> None:
    watch = ObservationPeriod(45)
    watched(watch, 100)
    assert watched(watch, 160) == 0  # the daemon was stopped
    assert watched(watch, 175) == 15
    assert watched(watch, 190, theirs=9000) == 0  # its host slept: its own clock did not move
    assert watched(watch, 205, theirs=9015) == 15
    assert watched(watch, 220, theirs=100) == 30  # the database's clock was put back


def test_looks_that_fail_are_none() -> None:
    watch = ObservationPeriod(45)
    watched(watch, 0)
    watched(watch, 15)
    for t in (30, 45, 60):
        assert watch.begin(t, t + 5000) > 0
    assert watch.begin(75, 5075) == 0
    assert watched(watch, 90) == 0
    assert watched(watch, 105) == 15


def test_the_defaults_and_the_lengths_follow_from_them() -> None:
    spans = Timeouts()
    assert (spans.heartbeat_interval, spans.grace, spans.reschedule, spans.pickup) == (30, 150, 300, 60)
    assert (spans.sweep_interval, spans.recovery_interval, spans.min_watched, spans.max_gap) == (
        15,
        5,
        45,
        45,
    )
    short = Timeouts(heartbeat_interval=0.5, grace=3, reschedule=6, pickup=2)
    assert (short.sweep_interval, short.recovery_interval, short.min_watched, short.max_gap) == (
        0.3,
        0.2,
        0.75,
        2,
    )
