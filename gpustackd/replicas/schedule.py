"""Time-based scaling: how many replicas a model has at an instant, and when that changes next.

A window opens when its cron line fires and stays open for its length, which is counted in elapsed time, so
that it is as long on the day of a clock change. At the instant of the fire it still reads closed, at the
instant of its end it is closed. Of several open windows the one that started last counts, of those that
started together the largest; where none is open, the baseline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import Any

from gpustackd.errors import BadRow
from gpustackd.replicas import cron

LONGEST = 366 * 86400
"""Seconds that a window may last."""
_MOST = 100_000
_MANY = 500
_TICK = timedelta(microseconds=1)
COLUMN = "scaling_schedule"


@dataclass(frozen=True, slots=True)
class Rule:
    """From each fire of `start_cron` on, for `duration` seconds, so many replicas."""

    start_cron: str
    duration: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A checked `models.scaling_schedule`. Only one that is enabled and not paused says a number."""

    enabled: bool = False
    paused: bool = False
    baseline: int = 0
    rules: tuple[Rule, ...] = ()

    @property
    def says(self) -> bool:
        return self.enabled and not self.paused

    @property
    def peak(self) -> int:
        """The most replicas that it ever asks for."""
        return max([self.baseline, *(r.replicas for r in self.rules)])


@dataclass(frozen=True, slots=True)
class Number:
    """What a schedule wants at an instant, and until when that stands (None = for ever)."""

    replicas: int
    until: datetime | None


def schedule(value: Any) -> Schedule:
    """Check the column. A schedule that is not enabled may be half done. Raise BadRow naming the part."""
    if value is None:
        return Schedule()
    if not isinstance(value, Mapping):
        raise BadRow(COLUMN, "must be an object with enabled, baseline_replicas and rules")
    enabled, paused = _switch(value, "enabled"), _switch(value, "paused")
    rules = value.get("rules")
    if rules is None:
        rules = []
    if not isinstance(rules, list) or len(rules) > _MANY:
        raise BadRow(f"{COLUMN}.rules", f"must be a list of at most {_MANY} rules")
    if not enabled:
        return Schedule(False, paused)
    if not rules:
        raise BadRow(f"{COLUMN}.rules", "is empty; an enabled schedule has at least one rule")
    if value.get("baseline_replicas") is None:
        raise BadRow(f"{COLUMN}.baseline_replicas", "is missing; it is the number outside all windows")
    baseline = _whole(value, "baseline_replicas", COLUMN, 0, _MOST)
    return Schedule(
        True, paused, baseline, tuple(rule(r, f"{COLUMN}.rules[{n}]") for n, r in enumerate(rules))
    )


def rule(value: Any, where: str = f"{COLUMN}.rules[]") -> Rule:
    """Check one rule. Raise BadRow naming the part."""
    if not isinstance(value, Mapping):
        raise BadRow(where, "must be an object with start_cron, duration_seconds and replicas")
    line = value.get("start_cron")
    if not isinstance(line, str):
        raise BadRow(f"{where}.start_cron", "must be a cron line such as '0 8 * * 1-5'")
    try:
        cron.check(line)
    except ValueError as error:
        raise BadRow(f"{where}.start_cron", str(error)) from None
    return Rule(
        line,
        _whole(value, "duration_seconds", where, 1, LONGEST),
        _whole(value, "replicas", where, 0, _MOST),
    )


def wanted(planned: Schedule, now: datetime, zone: tzinfo) -> Number:
    """The number at `now` (which has a zone) by a schedule whose lines are read in `zone`."""
    best: tuple[datetime, int] | None = None
    changes: list[datetime] = []
    for r in planned.rules:
        length = timedelta(seconds=r.duration)
        fired = cron.last_before(r.start_cron, now, zone)
        if fired is not None and now < fired + length:
            changes.append(fired + length)
            best = max(best or (fired, r.replicas), (fired, r.replicas))
        coming = cron.next_from(r.start_cron, now, zone)
        if coming is not None:
            changes.append(coming + _TICK)  # at the fire itself it is still closed
    return Number(best[1] if best else planned.baseline, min(changes, default=None))


def _switch(value: Mapping[str, Any], name: str) -> bool:
    found = value.get(name)
    if found is not None and not isinstance(found, bool):
        raise BadRow(f"{COLUMN}.{name}", "must be true or false")
    return bool(found)


def _whole(value: Mapping[str, Any], name: str, where: str, least: int, most: int) -> int:
    found = value.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
        raise BadRow(f"{where}.{name}", f"must be a whole number from {least} to {most} (it is {found!r})")
    return found
