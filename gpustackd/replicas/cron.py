"""Fires of a cron line: the last one before an instant, the next one after it.

A line is read on the wall clock of its time zone, and the fires are converted to instants. A fire within the
hour that is skipped in spring comes later by the amount the clock was put forward; one within the hour that
is repeated in autumn belongs to the first pass. `cronsim` walks the calendar in both directions; the triggers
of APScheduler only look ahead, count weekdays from Monday = 0, and require both day fields to match.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

from cronsim import CronSim, CronSimError

_SHIFT = timedelta(hours=3)
"""More than any clock is put forward or back."""
_FIRST, _LAST = datetime(1970, 1, 1), datetime(2200, 1, 1)  # noqa: DTZ001 - wall clocks have no zone


def check(line: str) -> None:
    """Raise ValueError where `line` is not a cron line of five fields, or never fires."""
    if len(line.split()) != 5:
        raise ValueError(f"{line!r} is not a cron line: minute, hour, day, month and weekday")
    try:
        next(CronSim(line, datetime(2000, 1, 1)))  # noqa: DTZ001
    except CronSimError as error:
        raise ValueError(f"{line!r} is not a cron line: {error}") from None
    except StopIteration:
        raise ValueError(f"{line!r} never fires") from None


def last_before(line: str, now: datetime, zone: tzinfo) -> datetime | None:
    """The latest fire strictly before `now`, in UTC; None = none since 1970."""
    wall = now.astimezone(zone).replace(tzinfo=None)
    best: datetime | None = None
    for fire in _walk(line, wall + _SHIFT, back=True):
        if best is not None and fire < wall - 2 * _SHIFT:
            break
        instant = fire.replace(tzinfo=zone).astimezone(UTC)
        if instant < now and (best is None or instant > best):
            best = instant
            if fire < wall - _SHIFT:
                break
    return best


def next_from(line: str, now: datetime, zone: tzinfo) -> datetime | None:
    """The earliest fire at `now` or after it, in UTC; None = none until 2200."""
    wall = now.astimezone(zone).replace(tzinfo=None)
    best: datetime | None = None
    for fire in _walk(line, wall - _SHIFT, back=False):
        if best is not None and fire > wall + 2 * _SHIFT:
            break
        instant = fire.replace(tzinfo=zone).astimezone(UTC)
        if instant >= now and (best is None or instant < best):
            best = instant
            if fire > wall + _SHIFT:
                break
    return best


def _walk(line: str, start: datetime, *, back: bool) -> Iterator[datetime]:
    for fire in CronSim(line, start, reverse=back):
        if not _FIRST < fire < _LAST:
            return
        yield fire
