"""Daemons whose clocks are ten minutes fast, right and ten minutes slow do the same at the same time.

Their clock is put forward or back in the process itself: everything that Python reads of it. What they decide
goes by the database's clock; the log is the only place where theirs shows.
"""

from __future__ import annotations

import signal
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.acceptance.daemons import Crew, Daemon, crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record
from tests.acceptance.test_scaling_windows import closing, planned

pytestmark = pytest.mark.anyio

MINUTES = (10, 0, -10)
SKEW = """
import datetime, os, time

seconds = 60 * int(os.environ["SKEW_MINUTES"])
true_time, true_ns, true = time.time, time.time_ns, datetime.datetime
time.time = lambda: true_time() + seconds
time.time_ns = lambda: true_ns() + seconds * 10**9


class Any(type(true)):
    def __instancecheck__(cls, value):
        return isinstance(value, true)


class Skewed(true, metaclass=Any):
    __slots__ = ()

    @classmethod
    def now(cls, tz=None):
        return true.now(tz) + datetime.timedelta(seconds=seconds)

    @classmethod
    def utcnow(cls):
        return true.utcnow() + datetime.timedelta(seconds=seconds)


datetime.datetime = Skewed
"""


async def skewed(daemons: Crew, folder: Path, minutes: int) -> Daemon:
    """A daemon whose clock is so many minutes fast."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(SKEW)
    return await daemons.launch(PYTHONPATH=folder, SKEW_MINUTES=minutes)


async def offset(daemon: Daemon, moment: datetime) -> float:
    """Minutes by which the clock of a daemon was fast when it started, near `moment`."""
    said = datetime.fromisoformat((await daemon.logged("daemon.started"))["timestamp"])
    return (said - moment) / timedelta(minutes=1)


async def test_clocks_ten_minutes_apart_change_nothing(site: Site, record: Record, tmp_path: Path) -> None:
    workers = await site.fleet(*[W(f"w{n}", 64, "4x24", "2/1") for n in range(3)])
    await site.sql.execute("UPDATE workers SET heartbeat_at = now()")
    settings = {
        "lease": 60, "rescan_interval": 600, "drain_window": 3600,
        "GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD": 400,
    }  # fmt: skip
    async with crew(site.url, tmp_path / "logs", **settings) as daemons:
        now = await site.sql.fetchval("SELECT clock_timestamp()")
        made = [await skewed(daemons, tmp_path / "skew", minutes) for minutes in MINUTES]
        for daemon, minutes in zip(made, MINUTES, strict=True):
            await daemon.ready()
            assert await offset(daemon, now) == pytest.approx(minutes, abs=5)
        model = await site.model(need=14, replicas=3)
        await site.until("SELECT count(worker_id) = 3 FROM model_instances", timeout=within(2))
        await site.sql.execute("UPDATE model_instances SET state = 'RUNNING'")
        windows = await site.model(
            need=14, scaling_schedule=planned(await closing(site, 240, 2, "UTC"), baseline=0)
        )
        await site.until(
            "SELECT count(worker_id) = 2 FROM model_instances WHERE model_id = $1",
            windows,
            timeout=within(2),
        )
        await site.update("models", model, replicas=2)
        await site.until("SELECT count(*) = 1 FROM model_instances WHERE draining_since IS NOT NULL")
        # each of them alone, the other two asleep, with a full look of its own: nothing is due, nobody is
        # silent, no window is over, no lease has ended
        for daemon in made:
            others = [d for d in made if d is not daemon]
            for other in others:
                other.signal(signal.SIGSTOP)
            scans = await daemon.metric_now("gpustackd_rescans_total")
            await site.sql.execute("SELECT gpustackd_notify('overflow')")
            await daemon.metric("gpustackd_rescans_total", lambda n, before=scans: n > before)
            # a number that it has to bring about after that look: it has seen to the others by then
            probe = await site.model(need=14, replicas=1)
            await site.until(
                "SELECT count(worker_id) = 1 FROM model_instances WHERE model_id = $1",
                probe,
                timeout=within(5),
            )
            await site.delete("models", probe)
            for other in others:
                other.signal(signal.SIGCONT)
            found = await site.sql.fetch(
                "SELECT model_id, draining_since IS NOT NULL AS leaving, worker_id IS NOT NULL AS placed"
                " FROM model_instances ORDER BY 1, 2"
            )
            assert [tuple(r) for r in found] == [
                (model, False, True), (model, False, True), (model, True, True),
                (windows, False, True), (windows, False, True),
            ]  # fmt: skip
            states = await site.sql.fetch("SELECT state FROM workers WHERE id = ANY ($1)", workers)
            assert {r["state"] for r in states} == {"READY"}
    assert await record.broken() == []
