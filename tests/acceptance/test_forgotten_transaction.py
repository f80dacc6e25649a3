"""A transaction that somebody forgot to end holds up those who need what it has locked, and nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import Site, W, site_on
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio


async def test_a_strategy_that_ranks_strictly_goes_on_to_the_next_place(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w0", 256, "4x24"))
    model = await site.model(need=14, placement_strategy="first_fit")
    async with (
        site_on(site.url, tmp_path) as forgetful,
        crew(site.url, tmp_path / "logs", lease=30, rescan_interval=600) as daemons,
        watching(site.url),
    ):
        await daemons.start()
        async with forgetful.sql.transaction():
            card = await forgetful.sql.fetchval("SELECT min(id) FROM gpu_devices")
            await forgetful.sql.execute("UPDATE gpu_devices SET name = 'mine' WHERE id = $1", card)
            (row,) = await site.placed(await site.instances(model), timeout=within(10))
            assert row["gpu_indexes"] == [1]
        (row,) = await site.placed(await site.instances(model), timeout=within(5))
        assert row["gpu_indexes"] == [0]
    assert await record.broken() == []


async def test_all_cards_but_the_locked_one_are_filled_and_that_one_when_it_is_let_go(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(*[W(f"w{n}", 256, "8x24") for n in range(3)])
    model = await site.model(need=14)
    settings = {"lease": 30, "rescan_interval": 600}
    async with (
        site_on(site.url, tmp_path) as forgetful,
        crew(site.url, tmp_path / "logs", **settings) as daemons,
        watching(site.url),
    ):
        await daemons.start(2)
        async with forgetful.sql.transaction():
            card = await forgetful.sql.fetchval("SELECT min(id) FROM gpu_devices")
            await forgetful.sql.execute("UPDATE gpu_devices SET name = 'mine' WHERE id = $1", card)
            ids = await site.instances(model, 24)
            await site.until(
                "SELECT count(*) = 23 FROM model_instances WHERE worker_id IS NOT NULL", timeout=within(10)
            )
            assert (await site.row("gpu_devices", card))["vram_allocated"] == 0
        await site.placed(ids, timeout=within(5))
    assert await record.broken() == []
    assert await record.count("ERROR") == 0
