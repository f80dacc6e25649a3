"""Scaling windows: their numbers at every instant, the next change, clock changes, and schedules refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.errors import BadRow
from gpustackd.replicas import cron
from gpustackd.replicas.schedule import ScalingSchedule, scaling_schedule, scheduled_replicas, usable_schedule

BERLIN = ZoneInfo("Europe/Berlin")


def rule(line: str, hours: float, replicas: int) -> dict[str, Any]:
    return {"start_cron": line, "duration_seconds": int(hours * 3600), "replicas": replicas}


def planned(*rules: dict[str, Any], baseline: int = 1, **more: Any) -> ScalingSchedule:
    return scaling_schedule({"enabled": True, "baseline_replicas": baseline, "rules": list(rules), **more})


DAY = planned(rule("0 8 * * *", 12, 4), rule("0 12 * * *", 2, 2), rule("0 12 * * *", 1, 6))


def at(hour: int, minute: int = 0, second: int = 0, micro: int = 0) -> datetime:
    return datetime(2026, 7, 15, hour, minute, second, micro, tzinfo=BERLIN)


@pytest.mark.parametrize(
    ("now", "number"),
    [
        (at(7, 59), 1), (at(8), 1), (at(8, 0, 0, 1), 4), (at(8, 0, 1), 4), (at(12, 30), 6), (at(13, 30), 2),
        (at(14, 30), 4), (at(20), 1),
    ],
)  # fmt: skip
def test_the_table_of_the_spec(now: datetime, number: int) -> None:
    assert scheduled_replicas(DAY, now, BERLIN).replicas == number
    # of the instant, not of how it is written
    assert scheduled_replicas(DAY, now.astimezone(UTC), BERLIN).replicas == number


def test_the_next_change_is_told_and_nothing_changes_before_it() -> None:
    now, seen = at(0), []
    while now < at(23):
        number = scheduled_replicas(DAY, now, BERLIN)
        assert number.until is not None
        just_before = number.until - timedelta(microseconds=1)
        assert scheduled_replicas(DAY, just_before, BERLIN).replicas == number.replicas
        seen.append((number.until.astimezone(BERLIN).strftime("%H:%M"), number.replicas))
        now = number.until
    assert seen == [("08:00", 1), ("12:00", 4), ("13:00", 6), ("14:00", 2), ("20:00", 4), ("08:00", 1)]


def test_a_window_is_as_long_on_the_day_of_a_clock_change() -> None:
    night = planned(rule("0 22 * * *", 8, 3))
    for month, day, ends in ((3, 28, 7), (10, 24, 5)):
        start = datetime(2026, month, day, 22, tzinfo=BERLIN)
        end = datetime(2026, month, day + 1, ends, tzinfo=BERLIN).astimezone(UTC)
        assert end - start.astimezone(UTC) == timedelta(hours=8)
        assert scheduled_replicas(night, end - timedelta(microseconds=1), BERLIN).replicas == 3
        assert scheduled_replicas(night, end, BERLIN).replicas == 1


def test_a_fire_in_the_hour_left_out_comes_later_and_one_in_the_hour_twice_comes_once() -> None:
    half_past_two = planned(rule("30 2 * * *", 1, 3))

    def open_from(day: datetime) -> list[datetime]:
        """Instants, by quarters of an hour, at which the window is open."""
        quarters = [day.astimezone(UTC) + timedelta(minutes=15 * n) for n in range(24 * 4)]
        return [q for q in quarters if scheduled_replicas(half_past_two, q, BERLIN).replicas == 3]

    spring = open_from(datetime(2026, 3, 29, tzinfo=BERLIN))
    assert spring[0].astimezone(BERLIN).strftime("%H:%M") == "03:45"
    assert len(spring) == 3
    autumn = open_from(datetime(2026, 10, 25, tzinfo=BERLIN))
    assert [q.strftime("%H:%M") for q in autumn] == ["00:45", "01:00", "01:15"]


LINES = ["* * * * *", "*/7 1-3 * * *", "0 * * * *", "30 2 * * *", "0 0 * * 6", "15 3 29 2 *", "0 2 1,15 * 1"]
ZONES = ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Australia/Lord_Howe", "UTC", "Pacific/Apia"]


@given(
    st.sampled_from(LINES),
    st.sampled_from(ZONES),
    st.integers(0, 2 * 365 * 86400),
)
def test_fires_before_and_after_an_instant_leave_none_between(line: str, zone: str, seconds: int) -> None:
    now, where = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds), ZoneInfo(zone)
    last, coming = cron.last_before(line, now, where), cron.next_from(line, now, where)
    assert last is not None
    assert coming is not None
    assert last < now <= coming
    assert cron.next_from(line, last + timedelta(microseconds=1), where) == coming
    assert cron.last_before(line, coming, where) == last


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("daily", "scaling_schedule"),
        ({"enabled": "yes"}, "scaling_schedule.enabled"),
        ({"enabled": True, "baseline_replicas": 1, "rules": []}, "scaling_schedule.rules"),
        ({"enabled": True, "baseline_replicas": 1, "rules": {}}, "scaling_schedule.rules"),
        ({"enabled": True, "rules": [rule("0 9 * * *", 8, 3)]}, "scaling_schedule.baseline_replicas"),
        ({"enabled": True, "baseline_replicas": -1, "rules": [rule("0 9 * * *", 8, 3)]},
         "scaling_schedule.baseline_replicas"),
        ({"enabled": True, "baseline_replicas": 0, "rules": [rule("0 9 * * *", 8, 3), 7]},
         "scaling_schedule.rules[1]"),
        *[({"enabled": True, "baseline_replicas": 0, "rules": [{**rule("0 9 * * *", 8, 3), field: wrong}]},
           f"scaling_schedule.rules[0].{field}")
          for field, wrong in (
              ("duration_seconds", 0), ("duration_seconds", 366 * 86400 + 1), ("duration_seconds", 1e3),
              ("duration_seconds", None), ("replicas", -1), ("replicas", True), ("start_cron", None),
              ("start_cron", "0 0 30 2 *"), ("start_cron", "0 0 31 4,6 *"), ("start_cron", "61 * * * *"),
              ("start_cron", "* * * *"), ("start_cron", "* * * * * *"), ("start_cron", "@daily"),
              ("start_cron", ""))],
    ],
)  # fmt: skip
def test_a_schedule_that_cannot_be_kept_is_refused_by_the_part_at_fault(value: Any, named: str) -> None:
    with pytest.raises(BadRow) as caught:
        scaling_schedule(value)
    assert caught.value.field == named


def test_a_rule_that_cannot_be_used_is_left_out_and_the_others_count() -> None:
    good, endless = rule("0 8 * * *", 12, 4), {"start_cron": "0 0 * * *", "replicas": 9}
    value = {"enabled": True, "baseline_replicas": 1, "rules": [endless, good, 7]}
    usable, problems = usable_schedule(value)
    assert scheduled_replicas(usable, at(9), BERLIN).replicas == 4
    assert scheduled_replicas(usable, at(21), BERLIN).replicas == 1
    assert usable.peak == 4
    assert [p.field for p in problems] == [
        "scaling_schedule.rules[0].duration_seconds",
        "scaling_schedule.rules[2]",
    ]
    alone, _ = usable_schedule({**value, "rules": [endless]})
    assert scheduled_replicas(alone, at(9), BERLIN).replicas == 1


def test_a_schedule_without_a_baseline_says_nothing() -> None:
    usable, (problem,) = usable_schedule({"enabled": True, "rules": [rule("0 8 * * *", 12, 4)]})
    assert not usable.is_active
    assert problem.field == "scaling_schedule.baseline_replicas"


def test_what_is_not_enabled_may_be_half_done_and_says_nothing() -> None:
    for value in (None, {}, {"enabled": False, "rules": [{}]}, {"rules": None, "baseline_replicas": None}):
        assert not scaling_schedule(value).is_active


def test_a_paused_schedule_says_nothing_and_its_peak_is_its_largest_number() -> None:
    assert scheduled_replicas(DAY, at(9), BERLIN).replicas == 4
    assert scheduled_replicas(DAY, at(21), BERLIN).replicas == 1
    paused = planned(rule("0 8 * * *", 12, 4), paused=True)
    assert not paused.is_active
    assert DAY.peak == 6
    assert planned(rule("0 8 * * *", 1, 0), baseline=3).peak == 3
