"""What frees or brings a place wakes those that wait for it; what changes nothing rewrites nothing.

Rescans and leases are ten minutes here: only a notification can explain a placement.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.acceptance.daemon import Daemon
from tests.acceptance.daemons import Crew, crew, within
from tests.acceptance.machines import GIB, Site, W, model_directory
from tests.acceptance.record import Record

pytestmark = pytest.mark.anyio

SLOW = {"lease": 600, "rescan_interval": 600}


@pytest.fixture
async def two(site: Site, record: Record, tmp_path: Path) -> AsyncIterator[Crew]:
    """Two daemons on the database of `site`."""
    async with crew(site.url, tmp_path / "logs", **SLOW) as daemons:
        await daemons.start(2)
        yield daemons
        assert await record.broken() == []
        await site.clean()


async def test_every_kind_of_cure_wakes_the_instance_that_waits_for_it(
    site: Site, record: Record, two: Crew
) -> None:
    """One after the other, on one fleet: each leaves the instance of the next one waiting."""
    await site.worker(W("w1", 64, "1x24"))
    model = await site.model(need=14)
    first, second = await site.instances(model, 2)
    await site.settled()
    (holder,) = [r for r in await site.rows([first, second]) if r["worker_id"]]
    (waiting,) = {first, second} - {holder["id"]}

    await site.delete("model_instances", holder["id"])  # capacity given back
    await site.placed([waiting], timeout=within(1))

    (waiting,) = await site.instances(model)
    await site.refused([waiting])
    await site.worker(W("w2", 64, "1x24"), state="NOT_READY")
    other = await site.sql.fetchval("SELECT id FROM workers WHERE name = 'w2'")
    await site.update("workers", other, state="READY")  # a worker becomes READY
    (row,) = await site.placed([waiting], timeout=within(1))
    assert row["worker_name"] == "w2"

    (waiting,) = await site.instances(model)
    await site.refused([waiting])
    await site.insert("gpu_devices", worker_id=other, index=1, type="cuda", vram_total=24 * GIB)  # a GPU more
    (row,) = await site.placed([waiting], timeout=within(1))
    assert row["gpu_indexes"] == [1]

    (waiting,) = await site.instances(model)
    await site.refused([waiting])
    await site.insert("gpu_devices", worker_id=other, index=2, type="cuda", schedulable=False, vram_total=GIB)
    card = await site.sql.fetchval("SELECT max(id) FROM gpu_devices")
    await site.update("gpu_devices", card, vram_total=24 * GIB)
    await site.update("gpu_devices", card, schedulable=True)  # a GPU is opened
    (row,) = await site.placed([waiting], timeout=within(1))
    assert row["gpu_indexes"] == [2]

    picky = await site.model(need=14, worker_selector={"zone": "a"})
    (waiting,) = await site.instances(picky)
    await site.refused([waiting])
    third = await site.worker(W("w3", 64, "1x24"))
    await site.settled()
    await site.update("workers", third, labels={"zone": "a"})  # labels that fit
    await site.placed([waiting], timeout=within(1))

    large = await site.model(need=60)
    (waiting,) = await site.instances(large)
    await site.refused([waiting])
    await site.worker(W("w4", 64, "1x24"))
    await site.settled()
    await site.update(
        "models", large, env={"GPUSTACK_MODEL_VRAM_CLAIM": str(14 * GIB)}
    )  # the model is edited
    (row,) = await site.placed([waiting], timeout=within(1))
    assert row["worker_name"] == "w4"
    assert await record.count("ERROR") == 0


async def test_a_file_that_becomes_ready_wakes_the_instance_that_misses_it(
    site: Site, two: Crew, tmp_path: Path
) -> None:
    host = await site.worker(W("w1", 64, "1x24"))
    path = tmp_path / "later"
    model = await site.model(source="local_path", local_path=str(path))
    (waiting,) = await site.instances(model)
    # far enough into its delays that the next try by time is a long way off
    await site.until("SELECT attempts >= 4 FROM model_instances WHERE id = $1 AND state = 'PENDING'", waiting)
    model_directory(path, need=14)
    await site.insert(
        "model_files",
        worker_id=host,
        source_index="later",
        resolved_path=str(path),
        size=1,
        state="DOWNLOADING",
    )
    await site.sql.execute("UPDATE model_files SET state = 'READY'")
    await site.placed([waiting], timeout=within(1))


async def test_capacity_is_taken_up_though_the_daemon_that_parked_the_instance_was_killed(
    site: Site, two: Crew
) -> None:
    await site.worker(W("w1", 64, "1x24"))
    model = await site.model(need=14)
    (holder,) = await site.placed(await site.instances(model))
    waiting = await site.instances(model, 3)
    await site.refused(waiting)
    parked = await site.sql.fetchval(
        "SELECT replica FROM scheduling_decisions WHERE instance_id = $1 AND outcome = 'NO_FIT'"
        " ORDER BY id DESC LIMIT 1",
        waiting[0],
    )
    victim = next(d for d in two if d.name == parked)
    await victim.kill()
    await site.delete("model_instances", holder["id"])
    await site.until(
        "SELECT count(*) = 1 FROM model_instances WHERE worker_id IS NOT NULL", timeout=within(1)
    )
    await site.refused([r["id"] for r in await site.rows(waiting) if r["worker_id"] is None])


async def _rescanned(daemons: Sequence[Daemon], times: int) -> None:
    """Wait until each daemon has scanned all rows so many times more."""
    for daemon in daemons:
        scans = await daemon.metric_now("gpustackd_rescans_total")
        await daemon.metric("gpustackd_rescans_total", lambda n, before=scans: n >= before + times)


async def test_rescans_and_events_that_help_nobody_rewrite_no_waiting_row(
    site: Site, record: Record, tmp_path: Path
) -> None:
    written = "SELECT id, xmin::text, ctid::text, updated_at, attempts FROM model_instances ORDER BY id"
    await site.fleet(W("w1", 64, "1x24"), W("w2", 64, "1x24"))
    model = await site.model(need=14)
    async with crew(site.url, tmp_path / "logs", lease=600, rescan_interval=1) as daemons:
        both = await daemons.start(2)
        await site.instances(model, 300)
        await site.instances(await site.model(need=60), 100)
        await site.settled()
        await _rescanned(both, 2)  # figures in refusals are brought up to date by full scans alone
        before = await site.sql.fetch(written)
        moves = await site.sql.fetchval("SELECT count(*) FROM recorder.moves")
        # nothing that a waiting row could use: a heartbeat, a sample, a card too small, a worker left out
        await site.sql.execute("UPDATE workers SET heartbeat_at = now(), state_message = 'still here'")
        await site.sql.execute("UPDATE gpu_devices SET vram_used = 1, vram_used_at = now()")
        await _rescanned(both, 3)
        assert await site.sql.fetch(written) == before
        assert await site.sql.fetchval("SELECT count(*) FROM recorder.moves") == moves
    assert await record.broken() == []


async def test_rows_worded_by_an_older_daemon_are_rewritten_once(
    site: Site, record: Record, tmp_path: Path
) -> None:
    written = "SELECT id, xmin::text, ctid::text FROM model_instances ORDER BY id"
    await site.fleet(W("w1", 64, "1x24"))
    async with crew(site.url, tmp_path / "older", lease=600, rescan_interval=1) as daemons:
        await daemons.start()
        ids = await site.instances(await site.model(need=60), 20)
        text = (await site.refused(ids))[0]["state_message"]
    await site.sql.execute("UPDATE model_instances SET state_message = 'No place: as once worded'")
    async with crew(site.url, tmp_path / "newer", lease=600, rescan_interval=1) as daemons:
        [daemon] = await daemons.start(1)
        await site.until("SELECT bool_and(state_message = $1) FROM model_instances", text, timeout=within(5))
        before = await site.sql.fetch(written)
        scans = await daemon.metric_now("gpustackd_rescans_total")
        await daemon.metric("gpustackd_rescans_total", lambda n: n >= scans + 3)
        assert await site.sql.fetch(written) == before
    assert await record.broken() == []


async def test_a_card_too_small_for_those_that_wait_moves_none_of_them(
    site: Site, record: Record, two: Crew
) -> None:
    await site.worker(W("w1", 64, "1x24"))
    large = await site.instances(await site.model(need=60), 50)
    await site.refused(large)
    moves = await site.sql.fetchval("SELECT count(*) FROM recorder.moves WHERE instance_id = ANY ($1)", large)
    small = await site.model(need=8, share=0.45)
    for _ in range(
        5
    ):  # capacity comes and goes; each placement proves that the notice before it was attended to
        rows = await site.placed(await site.instances(small, 2))
        await site.delete("model_instances", *(r["id"] for r in rows))
    await site.placed(await site.instances(small, 2))
    assert (
        await site.sql.fetchval("SELECT count(*) FROM recorder.moves WHERE instance_id = ANY ($1)", large)
        == moves
    )
    assert await record.broken() == []
