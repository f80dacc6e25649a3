"""FR-24: the heartbeats of 200 workers are no work for the scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site
from tests.acceptance.record import Record, watching
from tests.integration.world import connected
from tests.waiting import elapse, until

pytestmark = pytest.mark.anyio

WORKERS, CARDS = 200, 8
PERIOD = 5.0
"""Seconds between two heartbeats of one worker."""
STATUS = "s" * 30 * 1024
MIB = 2**20

FLEET = f"""
WITH w AS (
    INSERT INTO workers (name, state, ram_total, ram_reserved, vram_reserved, heartbeat_at)
    SELECT 'w' || n, 'READY', {256 * GIB}, {2 * GIB}, {GIB}, clock_timestamp()
      FROM generate_series(1, {WORKERS}) n RETURNING id)
INSERT INTO gpu_devices (worker_id, "index", type, vram_total)
SELECT w.id, i, 'cuda', {24 * GIB} FROM w, generate_series(0, {CARDS - 1}) i"""

HEARTBEAT = """
UPDATE workers SET heartbeat_at = clock_timestamp(), state_message = $2 || random()::text WHERE id = $1"""
SAMPLE = """
UPDATE gpu_devices SET vram_used = (random() * 1e9)::bigint, vram_used_at = clock_timestamp()
 WHERE worker_id = $1"""


@dataclass
class Beating:
    """Heartbeats written so far."""

    count: int = 0


async def beat(url: str, beating: Beating) -> None:
    """Write heartbeats and usage samples of all workers in random order, for ever, in the report's rhythm."""
    chance = random.Random(24)
    connection: Any = await connected(url, application_name="workers")
    try:
        ids = [r["id"] for r in await connection.fetch("SELECT id FROM workers")]
        started = anyio.current_time()
        while True:
            worker = chance.choice(ids)
            async with connection.transaction():
                await connection.execute(HEARTBEAT, worker, STATUS)
                await connection.execute(SAMPLE, worker)
            beating.count += 1
            due = started + beating.count * PERIOD / WORKERS
            await elapse(max(0.0, due - anyio.current_time()), "the rhythm of the workers")
    finally:
        connection.terminate()


@dataclass
class Found:
    """What the daemon did meanwhile."""

    heartbeats: int
    growth: int
    """Bytes of memory, from the first beats to the last."""
    cpu: float
    """Share of a processor."""
    rescans: float
    placed: float


async def under_heartbeats(site: Site, record: Record, folder: Path, beats: int, bursts: int) -> Found:
    """Insert bursts of 20 instances while workers beat; one worker becomes UNREACHABLE in between."""
    await site.sql.execute(FLEET)
    small = await site.model(need=10, share=0.45)
    running = await site.instances(small, 8)
    async with crew(site.url, folder, lease=30, rescan_interval=600) as daemons, watching(site.url):
        (daemon,) = await daemons.start()
        await site.placed(running)
        await site.sql.execute("UPDATE model_instances SET state = 'RUNNING'")
        versions = "SELECT sum(version) FROM workers WHERE id <> $1"
        lost = await site.sql.fetchval(
            "SELECT id FROM workers WHERE id NOT IN (SELECT worker_id FROM instance_claims) LIMIT 1"
        )
        beating = Beating()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(beat, site.url, beating)
            await beaten(beating, beats // 10)
            memory, used, since = daemon.rss(), daemon.cpu_seconds(), anyio.current_time()
            before = await site.sql.fetchval(versions, lost)
            await site.update("workers", lost, state="UNREACHABLE")
            for n in range(1, bursts + 1):
                ids = await site.instances(small, 20)
                rows = await site.placed(ids, timeout=within(5))
                assert lost not in {r["worker_id"] for r in rows}
                for id_ in ids:
                    assert await record.states(id_) == ["PENDING", "ANALYZING", "SCHEDULED"]
                await beaten(beating, beats // 10 + n * beats * 9 // (10 * bursts))
                await site.delete("model_instances", *ids)
            growth = daemon.rss() - memory
            share = (daemon.cpu_seconds() - used) / (anyio.current_time() - since)
            # only what was booked on a worker's own row would count here, and heartbeats are no such thing
            assert await site.sql.fetchval(versions, lost) == before
            tasks.cancel_scope.cancel()
        assert await record.broken() == []
        assert await site.sql.fetchval("SELECT count(*) FROM model_instances WHERE state = 'RUNNING'") == 8
        await daemon.metric("gpustackd_queue_dropped_total", 0)
        await daemon.metric("gpustackd_fleet_workers", WORKERS)
        await daemon.metric("gpustackd_fleet_gpus", WORKERS * CARDS)
        placed = await daemon.metric(
            'gpustackd_attempts_total{outcome="placed"}', lambda n: n >= 8 + 20 * bursts
        )
        return Found(beating.count, growth, share, await daemon.metric_now("gpustackd_rescans_total"), placed)


async def beaten(beating: Beating, count: int) -> None:
    await until(
        lambda: beating.count >= count, f"{count} heartbeats", timeout=60 + 2 * count * PERIOD / WORKERS
    )


async def test_heartbeats_cause_no_scan_no_wake_up_and_no_further_change_of_state(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """10 s of the report's 10 min, at its rate."""
    found = await under_heartbeats(site, record, tmp_path, beats=400, bursts=2)
    assert found.rescans <= 2  # the start's, and the one of the first LISTEN
    assert found.placed == 8 + 2 * 20
    assert found.growth < 16 * MIB


@pytest.mark.chaos
@pytest.mark.timeout(1500)
async def test_ten_minutes_of_heartbeats_leave_memory_flat(
    site: Site, record: Record, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    found = await under_heartbeats(site, record, tmp_path, beats=24_000, bursts=40)
    tell(
        f"FR-24: {found.heartbeats} heartbeats, 800 instances placed in 3 states each; memory"
        f" {found.growth / MIB:+.1f} MiB, {found.cpu:.1%} of a processor"
    )
    assert found.growth < 16 * MIB
