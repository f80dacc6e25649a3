"""FR-29: an observer that stalls does not believe that all workers died; one that did is left, once."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.agents import Agents, agents
from tests.acceptance.daemons import Crew, crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record, watching
from tests.integration.world import connected
from tests.waiting import elapse

pytestmark = pytest.mark.anyio

WORKERS, REPLICAS = 10, 20
INTERVAL, GRACE, RESCHEDULE = 30.0, 150.0, 300.0
SKEWED = """
import datetime, time
_real, _by = time.time, {by}
time.time = lambda: _real() + _by
_now = datetime.datetime.now
class Shifted(datetime.datetime):
    __slots__ = ()
    @classmethod
    def now(cls, tz=None):
        return _now(tz) + datetime.timedelta(seconds=_by)
datetime.datetime = Shifted
"""
PLACES = "SELECT id, worker_id, placement_epoch, state FROM model_instances ORDER BY id"


def spans(factor: float) -> dict[str, Any]:
    """Settings with the windows of the report, scaled."""
    return {
        "GPUSTACK_WORKER_HEARTBEAT_INTERVAL": INTERVAL * factor,
        "GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD": GRACE * factor,
        "GPUSTACK_MODEL_INSTANCE_RESCHEDULE_GRACE_PERIOD": RESCHEDULE * factor,
        "lease": 30,
        "rescan_interval": 600,
    }


def skewed(folder: Path, seconds: int) -> dict[str, str]:
    """The environment of a daemon whose clock is wrong."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SKEWED.format(by=seconds))
    return {"PYTHONPATH": str(folder)}


class Scene:
    """Ten workers, twenty running replicas, two daemons whose clocks are ten minutes off, either way."""

    def __init__(self, site: Site, daemons: Crew, workers: Agents, factor: float) -> None:
        self.site = site
        self.daemons = daemons
        self.workers = workers
        self.factor = factor
        self.evicted = 0

    async def places(self) -> list[tuple[Any, ...]]:
        return [tuple(r) for r in await self.site.sql.fetch(PLACES)]

    async def believed(self) -> None:
        """Wait until the daemons have watched for so long that they would evict."""
        for daemon in self.daemons:
            await daemon.metric(
                'gpustackd_evictions_halted{reason="own_outage"}', 0, within(60 + RESCHEDULE * self.factor)
            )

    async def for_longer_than(self, seconds: float) -> None:
        await elapse(1.4 * seconds * self.factor, "longer than the span")


async def all_at_once(scene: Scene) -> None:
    """(a) All heartbeats are ten minutes old in one UPDATE, and none follows."""
    before, up = await scene.places(), set(scene.workers.up)
    scene.workers.up.clear()
    await scene.site.sql.execute("UPDATE workers SET heartbeat_at = clock_timestamp() - interval '10 min'")
    for daemon in scene.daemons:
        await daemon.logged(
            "eviction.halted",
            reason=re.compile("are down at once"),
            timeout=within(60 + GRACE * scene.factor),
        )
    await scene.for_longer_than(RESCHEDULE)
    assert await scene.places() == before
    scene.workers.up |= up
    await scene.site.until(
        "SELECT bool_and(state = 'READY') FROM workers", timeout=within(30 + INTERVAL * scene.factor)
    )
    assert await scene.places() == before


async def stopped(scene: Scene) -> None:
    """(b) The daemons stand still for longer than the reschedule grace; while they do, so do the workers."""
    before, up = await scene.places(), sorted(scene.workers.up)
    for daemon in scene.daemons:
        daemon.signal(signal.SIGSTOP)
    scene.workers.up -= set(up[:2])  # too few to be a mass loss
    await scene.for_longer_than(RESCHEDULE)
    for daemon in scene.daemons:
        daemon.signal(signal.SIGCONT)
    # awake for a part of the grace, with the silence of far more than the grace before their eyes
    await elapse(0.2 * RESCHEDULE * scene.factor, "sweeps that could evict at once")
    scene.workers.up |= set(up)
    await scene.believed()
    assert {(i, w, e) for i, w, e, _ in await scene.places()} == {(i, w, e) for i, w, e, _ in before}


async def locked(scene: Scene) -> None:
    """(c) Somebody holds a lock on `workers` for most of the reschedule grace."""
    before = await scene.places()
    sql = await connected(scene.site.url, application_name="a user")
    try:
        async with sql.transaction():
            await sql.execute("LOCK TABLE workers IN ACCESS EXCLUSIVE MODE")
            await elapse(0.8 * RESCHEDULE * scene.factor, "most of the reschedule grace")
    finally:
        sql.terminate()
    await scene.believed()
    assert {(i, w, e) for i, w, e, _ in await scene.places()} == {(i, w, e) for i, w, e, _ in before}


async def one_is_lost(scene: Scene) -> None:
    """(d) One worker is silent: what it had is placed elsewhere after the grace, once; then it returns."""
    site = scene.site
    before = {i: (w, e) for i, w, e, _ in await scene.places()}
    lost = await site.sql.fetchval("SELECT worker_id FROM model_instances ORDER BY id LIMIT 1")
    gone = {i for i, (w, _) in before.items() if w == lost}
    scene.workers.up.discard(lost)
    timeout = within(30 + RESCHEDULE * scene.factor)
    await site.until("SELECT state = 'NOT_READY' FROM workers WHERE id = $1", lost, timeout=timeout)
    await site.until(
        "SELECT bool_and(state = 'RUNNING' AND worker_id <> $2) FROM model_instances"
        " WHERE id = ANY ($1::bigint[])",
        sorted(gone),
        lost,
        timeout=timeout,
    )
    after = {i: (w, e) for i, w, e, _ in await scene.places()}
    assert {i for i in before if after[i] != before[i]} == gone
    # out of its place (one epoch), into the next (another)
    assert {after[i][1] - before[i][1] for i in gone} == {2}
    scene.evicted += len(gone)
    scene.workers.up.add(lost)
    await site.until(
        "SELECT state = 'READY' FROM workers WHERE id = $1",
        lost,
        timeout=within(30 + INTERVAL * scene.factor),
    )
    assert {i: (w, e) for i, w, e, _ in await scene.places()} == after


async def the_report(site: Site, record: Record, folder: Path, factor: float) -> None:
    workers = await site.fleet(*[W(f"w{n}", 256, "4x24") for n in range(WORKERS)])
    model = await site.model(need=10)
    async with (
        agents(site.url, workers, every=INTERVAL * factor / 2) as fleet,
        crew(site.url, folder / "logs", **spans(factor)) as daemons,
        watching(site.url),
    ):
        await daemons.start(1, **skewed(folder / "fast", 600))
        await daemons.start(1, **skewed(folder / "slow", -600))
        await site.instances(model, REPLICAS)
        await site.until(f"SELECT count(*) = {REPLICAS} FROM model_instances WHERE state = 'RUNNING'")
        scene = Scene(site, daemons, fleet, factor)
        await scene.believed()
        for part in (all_at_once, stopped, locked, one_is_lost):
            await part(scene)
        await daemons.stop()
    assert daemons.tally()["instance.evicted"] == scene.evicted
    assert await record.broken() == []


async def test_the_report_at_a_seventieth_of_its_times_with_clocks_ten_minutes_off(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await the_report(site, record, tmp_path, 1 / 70)


@pytest.mark.chaos
@pytest.mark.timeout(6000)
async def test_the_report_as_written(
    site: Site, record: Record, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    await the_report(site, record, tmp_path, 1.0)
    tell("FR-29: 10 workers, 20 replicas, all four parts at full length")
