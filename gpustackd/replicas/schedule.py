"""Time-based scaling: how many replicas a model has at an instant, and when that number changes next.

A window opens when its cron line fires and stays open for its duration. The duration is elapsed time, so a
window is as long as ever on the day of a clock change. The window is closed at the very instant of the fire
and at the very instant of its end. Of several open windows the one that opened last counts; of those that
opened together, the one with most replicas. Where none is open, the baseline counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

from gpustackd.errors import BadRow
from gpustackd.replicas import cron
from gpustackd.replicas.sync_plan import MAX_REPLICAS

_MAX_DURATION = 366 * 86400
"""Seconds."""
_MAX_RULES = 500
_TICK = timedelta(microseconds=1)
_COLUMN = "scaling_schedule"


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """`replicas` for `duration` seconds from each fire of `start_cron`."""

    start_cron: str
    duration: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ScalingSchedule:
    """A checked `models.scaling_schedule`. It sets the number only while enabled and not paused."""

    enabled: bool = False
    paused: bool = False
    baseline: int = 0
    rules: tuple[ScalingRule, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether it sets the number of replicas now."""
        return self.enabled and not self.paused

    @property
    def peak(self) -> int:
        """The largest number of replicas that it ever asks for."""
        return max([self.baseline, *(r.replicas for r in self.rules)])


@dataclass(frozen=True, slots=True)
class ScheduledReplicas:
    """The number of replicas at an instant, and until when it holds (None = for ever)."""

    replicas: int
    until: datetime | None


def scaling_schedule(value: Any) -> ScalingSchedule:
    """Check the column; the rules of a schedule that is not enabled are not read.

    Raises BadRow naming the first part at fault.
    """
    schedule, problems = usable_schedule(value)
    if problems:
        raise problems[0]
    return schedule


def usable_schedule(value: Any) -> tuple[ScalingSchedule, tuple[BadRow, ...]]:
    """What of the column can be used, and what is wrong with the rest.

    A rule at fault is left out and the others count. Where the schedule itself is at fault, it says nothing.
    """
    try:
        enabled, paused, baseline, rows = _checked(value)
    except BadRow as problem:
        return ScalingSchedule(), (problem,)
    rules: list[ScalingRule] = []
    problems: list[BadRow] = []
    for n, row in enumerate(rows):
        try:
            rules.append(_rule(row, f"{_COLUMN}.rules[{n}]"))
        except BadRow as problem:
            problems.append(problem)
    return ScalingSchedule(enabled, paused, baseline, tuple(rules)), tuple(problems)


def _checked(value: Any) -> tuple[bool, bool, int, Sequence[Any]]:
    """Enabled, paused, baseline and the rules as they are written; none where it is not enabled."""
    if value is None:
        return False, False, 0, ()
    if not isinstance(value, Mapping):
        raise BadRow(_COLUMN, "must be an object with enabled, baseline_replicas and rules")
    enabled, paused = _switch(value, "enabled"), _switch(value, "paused")
    rules = value.get("rules")
    if rules is None:
        rules = []
    if not isinstance(rules, list) or len(rules) > _MAX_RULES:
        raise BadRow(f"{_COLUMN}.rules", f"must be a list of at most {_MAX_RULES} rules")
    if not enabled:
        return False, paused, 0, ()
    if not rules:
        raise BadRow(f"{_COLUMN}.rules", "is empty; an enabled schedule has at least one rule")
    if value.get("baseline_replicas") is None:
        raise BadRow(f"{_COLUMN}.baseline_replicas", "is missing; it is the number outside all windows")
    return True, paused, _whole(value, "baseline_replicas", _COLUMN, 0, MAX_REPLICAS), rules


def _rule(value: Any, where: str) -> ScalingRule:
    if not isinstance(value, Mapping):
        raise BadRow(where, "must be an object with start_cron, duration_seconds and replicas")
    line = value.get("start_cron")
    if not isinstance(line, str):
        raise BadRow(f"{where}.start_cron", "must be a cron line such as '0 8 * * 1-5'")
    try:
        cron.check(line)
    except ValueError as error:
        raise BadRow(f"{where}.start_cron", str(error)) from None
    return ScalingRule(
        line,
        _whole(value, "duration_seconds", where, 1, _MAX_DURATION),
        _whole(value, "replicas", where, 0, MAX_REPLICAS),
    )


def scheduled_replicas(schedule: ScalingSchedule, now: datetime, zone: tzinfo) -> ScheduledReplicas:
    """The number at `now` (an aware datetime); cron lines are read in `zone`."""
    best: tuple[datetime, int] | None = None
    changes: list[datetime] = []
    for r in schedule.rules:
        length = timedelta(seconds=r.duration)
        fired = cron.last_before(r.start_cron, now, zone)
        if fired is not None and now < fired + length:
            changes.append(fired + length)
            best = max(best or (fired, r.replicas), (fired, r.replicas))
        coming = cron.next_from(r.start_cron, now, zone)
        if coming is not None:
            changes.append(coming + _TICK)  # at the fire itself it is still closed
    return ScheduledReplicas(best[1] if best else schedule.baseline, min(changes, default=None))


def _switch(value: Mapping[str, Any], name: str) -> bool:
    given = value.get(name)
    if given is not None and not isinstance(given, bool):
        raise BadRow(f"{_COLUMN}.{name}", "must be true or false")
    return bool(given)


def _whole(value: Mapping[str, Any], name: str, where: str, least: int, most: int) -> int:
    given = value.get(name)
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
        raise BadRow(f"{where}.{name}", f"must be a whole number from {least} to {most} (it is {given!r})")
    return given
