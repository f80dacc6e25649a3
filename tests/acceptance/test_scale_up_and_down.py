"""FR-16, FR-21 and FR-32 by the number of replicas alone: the daemon adds the rows, and takes them away."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}


async def settled(site: Site, model: int, number: int, placed: int | None = None) -> list[dict[str, Any]]:
    """Wait until a model has so many instances, so many of them placed; their rows."""
    await site.until(
        "SELECT count(*) = $2 AND count(worker_id) = $3"
        " AND count(*) FILTER (WHERE worker_id IS NULL AND (state <> 'PENDING' OR reasons IS NULL)) = 0"
        " FROM model_instances WHERE model_id = $1",
        model,
        number,
        number if placed is None else placed,
        timeout=within(5),
    )
    rows = await site.sql.fetch("SELECT * FROM model_instances WHERE model_id = $1 ORDER BY id", model)
    return [dict(r) for r in rows]


async def test_replicas_share_picked_cards_and_the_fourth_waits(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """FR-16: one number, two daemons."""
    await site.fleet(W("w1", 512, "8x48", "2/1"))
    picked = {"gpu_ids": [f"w1:cuda:{n}" for n in range(6)], "gpus_per_replica": 2}
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start(2)
        for _ in range(2):
            model = await site.model(need=60, share=0.9, replicas=3, gpu_selector=picked)
            rows = await settled(site, model, 3)
            assert sorted(tuple(sorted(r["gpu_indexes"])) for r in rows) == [(0, 1), (2, 3), (4, 5)]
            await site.update("models", model, replicas=4)
            *_, fourth = await settled(site, model, 4, placed=3)
            assert "the selected GPUs are in use" in fourth["state_message"]
            # down again, the one that waits goes, not one that has its cards
            await site.update("models", model, replicas=3)
            assert [r["id"] for r in await settled(site, model, 3)] == [r["id"] for r in rows]
            await site.delete("models", model)
        assert await record.broken() == []


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.chaos)])
async def test_three_replicas_on_two_equal_workers_are_two_and_one_by_every_path(
    site: Site, record: Record, tmp_path: Path, replicas: int
) -> None:
    """FR-21: 0 -> 3, 0 -> 1 -> 3, 1 -> 3, and 5 -> 3, with files ready on both workers."""
    workers = await site.fleet(*[W(f"w{n}", 512, "8x64", "2/1") for n in (1, 2)])
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start(replicas)
        for path in ((0, 3), (0, 1, 3), (1, 3), (5, 3), (4, 3)):
            model = await site.model(need=50, replicas=path[0])
            local = await site.sql.fetchval("SELECT local_path FROM models WHERE id = $1", model)
            for worker in workers:
                await site.insert(
                    "model_files",
                    worker_id=worker,
                    source_index=str(model),
                    resolved_path=local,
                    state="READY",
                )
            await settled(site, model, path[0])
            for number in path[1:]:
                await site.update("models", model, replicas=number)
                await settled(site, model, number)
            rows = await settled(site, model, 3)
            assert sorted(Counter(r["worker_id"] for r in rows).values()) == [1, 2], path
            await site.delete("models", model)
    assert await record.broken() == []


@pytest.mark.parametrize("strategy", ["spread", pytest.param("binpack", marks=pytest.mark.chaos)])
async def test_scale_down_takes_what_has_no_worker_then_what_does_not_tell_and_leaves_the_whole_one(
    site: Site, record: Record, tmp_path: Path, strategy: str
) -> None:
    """FR-32, as far as the schema lets such rows in: past its triggers, not past its CHECKs."""
    w1, _ = await site.fleet(*[W(f"w{n}", 64, "1x24", "2/1") for n in (1, 2)])
    model = await site.model(need=8, name="m", placement_strategy=strategy)
    ids = await site.instances(model, 4)
    whole = {"ram": 0, "vram": {"0": 8 * GIB}, "is_unified_memory": False}
    async with site.sql.transaction():
        await site.sql.execute("SET LOCAL session_replication_role = replica")
        for id_, worker, claim in zip(
            ids, (w1, 987654, None, w1), (whole, whole, None, {"ram": 0}), strict=True
        ):
            placed = {"worker_id": worker, "gpu_type": "cuda", "gpu_indexes": [0]} if worker else {}
            state = "RUNNING" if worker else "ERROR"
            await site.update("model_instances", id_, **placed, computed_resource_claim=claim, state=state)
    # nobody may hear of it one by one: three daemons look at the number at once
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons:
        await daemons.start(3)
        await site.update("models", model, replicas=1)
        (left,) = await settled(site, model, 1)
        assert left["id"] == ids[0]
        await site.update("models", model, replicas=3)
        assert len(await settled(site, model, 3)) == 3
        for number, gone in ((2, 1), (1, 2)):
            await site.update("models", model, replicas=number)
            assert len(await settled(site, model, number)) == 3 - gone
        await daemons.stop()
    synced = daemons.whole("replicas.synced", replicas=1, before=4)
    assert [line["deleted"] for line in synced] == [3]
    moves = await site.sql.fetch(
        "SELECT instance_id FROM recorder.moves WHERE became IS NULL AND instance_id = ANY ($1)", ids
    )
    assert sorted(r["instance_id"] for r in moves) == ids[1:]
