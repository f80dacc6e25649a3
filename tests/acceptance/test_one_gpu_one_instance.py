"""FR-01: replicas that plan at the same moment never take the same machine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record, watching
from tests.waiting import elapse

pytestmark = pytest.mark.anyio

FLEET = [W(f"w{n}", 64, "1x24", "2/1") for n in range(1, 5)]
SETTINGS = {"lease": 30, "rescan_interval": 600}
"""Nothing but notifications and immediate retries can make these tests pass in time."""


async def four_at_once(site: Site, model: int, chance: random.Random, together: bool) -> list[int]:
    if together:
        return await site.instances(model, 4)
    ids = []
    for _ in range(4):
        ids += await site.instances(model)
        await elapse(chance.uniform(0, 0.05), "between two users")
    return ids


async def each_on_a_gpu_of_its_own(site: Site, record: Record, folder: Path, rounds: int) -> int:
    """Returns the number of conflicts that the replicas had."""
    chance = random.Random(1)
    await site.fleet(*FLEET)
    model = await site.model(need=14)
    async with crew(site.url, folder, **SETTINGS) as daemons, watching(site.url):
        await daemons.start(3)
        for n in range(rounds):
            ids = await four_at_once(site, model, chance, together=n % 2 == 0)
            rows = await site.placed(ids, timeout=within(5))
            assert {r["worker_name"] for r in rows} == {w.name for w in FLEET}
            assert all(r["gpu_indexes"] == [0] for r in rows)
            await site.delete("model_instances", *ids)
        assert await record.broken() == []
        assert await record.count("ERROR") == 0
    return daemons.tally()["placement.conflict"]


async def test_four_instances_inserted_at_once_take_four_gpus_round_after_round(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await each_on_a_gpu_of_its_own(site, record, tmp_path / "logs", rounds=30)


@pytest.mark.chaos
async def test_the_same_two_hundred_times(
    site: Site, record: Record, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    conflicts = await each_on_a_gpu_of_its_own(site, record, tmp_path / "logs", rounds=200)
    tell(f"FR-01: 200 rounds of 4 instances on 4 GPUs with 3 daemons, {conflicts} conflicts, 0 doubles")


async def test_a_fifth_replica_waits_with_the_shortfall_and_takes_the_first_gpu_that_is_freed(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(*FLEET)
    model = await site.model(need=14)
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start(3)
        ids = await site.instances(model, 5)
        await site.until(
            "SELECT count(*) = 4 FROM model_instances WHERE state = 'SCHEDULED'", timeout=within(5)
        )
        (left,) = {r["id"] for r in await site.rows(ids) if r["worker_id"] is None}
        (row,) = await site.refused([left], timeout=within(5))
        assert "GPU memory" in row["state_message"]
        assert any(r["code"] == "fit.one_gpu" for r in row["reasons"])
        freed = next(r for r in await site.rows(ids) if r["worker_id"] is not None)
        await site.delete("model_instances", freed["id"])
        (row,) = await site.placed([left], timeout=within(1))
        assert row["worker_name"] == freed["worker_name"]
    assert await record.broken() == []
    assert await record.count("ERROR") == 0


async def test_an_instance_that_lost_its_worker_and_a_rival_never_share_the_gpu_that_is_left(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(*FLEET)
    model = await site.model(need=14)
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start(3)
        ids = await site.instances(model, 3)
        rows = await site.placed(ids, timeout=within(5))
        for n in range(8):
            lost = rows[n % 3]
            async with site.sql.transaction():  # one free GPU, two that want it in the same tick
                await site.delete("workers", lost["worker_id"])
                (rival,) = await site.instances(model)
            await site.until(
                "SELECT count(*) FILTER (WHERE state = 'SCHEDULED') = 1"
                " AND count(*) FILTER (WHERE state = 'PENDING' AND reasons IS NOT NULL) = 1"
                " FROM model_instances WHERE id IN ($1, $2)",
                lost["id"],
                rival,
                timeout=within(5),
            )
            loser = next(r for r in await site.rows([lost["id"], rival]) if r["state"] == "PENDING")
            await site.delete("model_instances", loser["id"])
            await site.worker(W(lost["worker_name"], 64, "1x24", "2/1"))
            kept = [r["id"] for r in rows if r["id"] != lost["id"]] + [
                lost["id"] if loser["id"] == rival else rival
            ]
            rows = await site.placed(kept, timeout=within(5))
            assert len({r["worker_id"] for r in rows}) == 3
    assert await record.broken() == []
