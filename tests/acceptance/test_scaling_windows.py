"""Scaling windows with real daemons: the calendar, the number that is written, pauses, bad rows."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}
ZONE = "Asia/Kathmandu"
"""Five hours and three quarters ahead: no whole hour, and nobody's own."""
MUTE = "CREATE OR REPLACE FUNCTION gpustackd_notify(payload text) RETURNS void LANGUAGE sql AS 'SELECT 1'"
ALWAYS = {"start_cron": "* * * * *", "duration_seconds": 86400, "replicas": 2}


def planned(*rules: dict[str, Any], baseline: int = 1, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "baseline_replicas": baseline, "rules": list(rules), **more}


async def closing(site: Site, seconds: float, replicas: int, zone: str = ZONE) -> dict[str, Any]:
    """A rule whose window, by the clock of the database, opened with the last minute but one and closes in so
    many seconds. Its line is read in `zone`."""
    now = await site.sql.fetchval("SELECT clock_timestamp()")
    opened = (now - timedelta(minutes=1)).astimezone(ZoneInfo(zone)).replace(second=0, microsecond=0)
    length = int((now - opened).total_seconds() + seconds)
    line = f"{opened.minute} {opened.hour} {opened.day} {opened.month} *"
    return {"start_cron": line, "duration_seconds": length, "replicas": replicas}


async def number(site: Site, model: int, wanted: int, seconds: float = 2) -> None:
    """Wait until a model asks for so many replicas and has them placed."""
    await site.until(
        "SELECT m.replicas = $2 AND (SELECT count(worker_id) FROM model_instances WHERE model_id = m.id) = $2"
        " AND (SELECT count(*) FROM model_instances WHERE model_id = m.id) = $2 FROM models m WHERE id = $1",
        model,
        wanted,
        timeout=within(seconds),
    )


async def test_windows_open_and_close_by_the_calendar_and_hold_against_other_hands(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 64, "8x24", "2/1"))
    async with crew(site.url, tmp_path / "logs", timezone=ZONE, **SETTINGS) as daemons:
        await daemons.start(2)
        model = await site.model(need=14, replicas=5, scaling_schedule=planned(ALWAYS))
        await number(site, model, 2)
        await site.update("models", model, replicas=4)  # a number by hand does not hold
        await number(site, model, 2)
        # a window that closes by itself: nobody says anything at that moment
        await site.update("models", model, scaling_schedule=planned(await closing(site, 600, 3)))
        await number(site, model, 3)
        await site.update("models", model, scaling_schedule=planned(await closing(site, 4, 3)))
        await number(site, model, 1, 12)
        # paused it stops, and a number by hand holds
        await site.update("models", model, scaling_schedule=planned(ALWAYS, paused=True))
        await number(site, model, 0)
        await site.update("models", model, replicas=1)
        await number(site, model, 1)
        # a rule that cannot be kept is said and left out; the rest of the schedule holds
        await site.update("models", model, scaling_schedule=planned({**ALWAYS, "start_cron": "0 0 30 2 *"}))
        for daemon in daemons:
            said = await daemon.logged("row.bad")
            assert "scaling_schedule.rules[0].start_cron" in said["reason"]
        await site.update("models", model, replicas=3)
        await number(site, model, 1)
        await site.update("models", model, scaling_schedule={"enabled": False}, replicas=3)
        await number(site, model, 3)
    assert await record.broken() == []


async def test_the_database_says_what_time_zone_it_is_where_no_setting_does(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """And where no notification is heard, a rescan sees to it."""
    await site.fleet(W("w1", 64, "8x24", "2/1"))
    statement = await site.sql.fetchval(
        "SELECT format('ALTER DATABASE %I SET timezone = %L', current_database(), $1::text)", ZONE
    )
    await site.sql.execute(statement)
    async with crew(site.url, tmp_path / "logs", lease=60, rescan_interval=3) as daemons:
        await daemons.start()
        model = await site.model(need=14, scaling_schedule=planned(await closing(site, 600, 3)))
        await number(site, model, 3)
        elsewhere = await site.model(need=14, scaling_schedule=planned(await closing(site, 600, 3, "UTC")))
        await number(site, elsewhere, 1)
        await site.sql.execute(MUTE)
        await site.update("models", elsewhere, scaling_schedule=None, replicas=3)
        await number(site, elsewhere, 3, 5)
    assert await record.broken() == []
