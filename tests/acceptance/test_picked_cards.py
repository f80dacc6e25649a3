"""FR-16: replicas of one model share the hand-picked cards out among themselves, and take no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

PICKED = [f"w1:cuda:{n}" for n in range(6)]


async def three_replicas_on_six_cards(site: Site, record: Record, folder: Path, rounds: int) -> None:
    await site.fleet(W("w1", 512, "8x48", "2/1"))
    async with crew(site.url, folder, lease=60, rescan_interval=600) as daemons, watching(site.url):
        await daemons.start(2)
        for _ in range(rounds):
            async with site.sql.transaction():
                model = await site.model(
                    need=60,
                    share=0.9,
                    replicas=3,
                    gpu_selector={"gpu_ids": PICKED, "gpus_per_replica": 2},
                )
                ids = await site.instances(model, 3)
            rows = await site.placed(ids, timeout=within(5))
            taken = sorted(tuple(sorted(r["gpu_indexes"])) for r in rows)
            assert taken == [(0, 1), (2, 3), (4, 5)]
            async with site.sql.transaction():
                await site.update("models", model, replicas=4)
                (fourth,) = await site.instances(model)
            (row,) = await site.refused([fourth], timeout=within(5))
            assert "the selected GPUs are in use" in row["state_message"]
            # and the first to go makes room for it, on its own two cards
            async with site.sql.transaction():
                await site.update("models", model, replicas=3)
                await site.delete("model_instances", ids[1])
            (row,) = await site.placed([fourth], timeout=within(1))
            assert row["gpu_indexes"] == rows[1]["gpu_indexes"]
            await site.delete("models", model)
        assert await record.broken() == []
        assert await record.count("ERROR") == 0


async def test_three_replicas_take_two_cards_each_of_the_six_that_were_picked(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await three_replicas_on_six_cards(site, record, tmp_path / "logs", rounds=8)


@pytest.mark.chaos
async def test_the_same_fifty_times(site: Site, record: Record, tmp_path: Path) -> None:
    await three_replicas_on_six_cards(site, record, tmp_path / "logs", rounds=50)


async def test_fewer_picked_cards_than_replicas_are_refused_with_both_numbers(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 512, "8x48", "2/1"))
    async with crew(site.url, tmp_path / "logs", lease=60, rescan_interval=600) as daemons:
        await daemons.start()
        picked = {"gpu_ids": PICKED[:3]}
        async with site.sql.transaction():
            model = await site.model(need=20, replicas=4, gpu_selector=picked)
            ids = await site.instances(model, 4)
        for row in await site.refused(ids, timeout=within(5)):
            assert "3 GPUs are selected for 4 replicas" in row["state_message"]
        async with site.sql.transaction():
            await site.update("models", model, replicas=3)
            await site.delete("model_instances", ids.pop())
        rows = await site.placed(ids, timeout=within(5))
        assert sorted(r["gpu_indexes"] for r in rows) == [[0], [1], [2]]
        await site.until("SELECT gpu_selector ->> 'gpus_per_replica' = '1' FROM models WHERE id = $1", model)
    assert await record.broken() == []
