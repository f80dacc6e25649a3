"""Scaling schedules: the number of replicas at an instant, and schedules that are refused."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from gpustackd.errors import BadRow
from gpustackd.replicas.schedule import scaling_schedule, scheduled_replicas, usable_schedule


def replicas_at(schedule: Any, now: datetime, zone: str) -> int | None:
    """What the daemon brings a model to; None where the schedule says nothing."""
    planned, _ = usable_schedule(schedule)
    return scheduled_replicas(planned, now, ZoneInfo(zone)).replicas if planned.is_active else None


def accepted(schedule: Any) -> bool:
    """Whether a document with this schedule is applied."""
    try:
        scaling_schedule(schedule)
    except BadRow:
        return False
    return True


def numbers(schedule: Any) -> tuple[bool, int, int]:
    """(whether the schedule is looked at, its baseline, the most that it ever asks for)."""
    planned, _ = usable_schedule(schedule)
    return planned.is_active, planned.baseline, planned.peak
