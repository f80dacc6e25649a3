"""Placement strategies and queue orders, through a daemon: textbook fleets, largest first, whole workers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import CONFIG, GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.hub import Hub

pytestmark = pytest.mark.anyio

QUIET = {"rescan_interval": 600, "lease": 60}


async def demands(site: Site, **columns: Any) -> dict[int, int]:
    """Models that take exactly so many cards: number of cards -> id."""
    found = {}
    for n in (1, 2, 3):
        flags = [f"--pipeline-parallel-size={n}"] if n > 1 else []
        found[n] = await site.model(18 * n, backend_parameters=flags, **columns)
    return found


async def burst(site: Site, models: dict[int, int], sizes: list[int]) -> list[int]:
    """Instances of so many cards each, in this order, in one transaction; their ids."""
    async with site.sql.transaction():
        return [i for n in sizes for i in await site.instances(models[n])]


async def where(site: Site, ids: list[int]) -> list[str | None]:
    """Workers of these once all are placed or refused."""
    await site.settled(within(5))
    return [row["worker_name"] for row in await site.rows(ids)]


async def test_first_fit_on_the_textbook_fleet(site: Site, record: Record, tmp_path: Path) -> None:
    await site.fleet(W("a", 256, "4x24"), W("b", 256, "2x24"))
    models = await demands(site, placement_strategy="first_fit")
    assert models[1] < models[2] < models[3]
    async with crew(site.url, tmp_path / "logs", **QUIET) as daemons, watching(site.url):
        await daemons.start()
        for n in (3, 2, 1):  # read once, so that the order of the burst is that of the queue
            await site.delete(
                "model_instances", *[r["id"] for r in await site.placed(await site.instances(models[n]))]
            )
        assert await where(site, await burst(site, models, [3, 2, 2, 1])) == ["a", "b", None, "a"]
    assert await record.broken() == []


async def test_best_fit_decreasing_places_all_of_a_burst(site: Site, record: Record, tmp_path: Path) -> None:
    """Inserted with the small ones first, of models that nobody has read yet."""
    await site.fleet(W("a", 256, "4x24"), W("b", 256, "3x24"))
    models = await demands(site)
    setting = {"placement_strategy": "best_fit", "queue_order": "decreasing", **QUIET}
    async with crew(site.url, tmp_path / "logs", **setting) as daemons, watching(site.url):
        await daemons.start()
        assert await where(site, await burst(site, models, [2, 3, 2])) == ["a", "b", "a"]
    assert await record.broken() == []


async def test_a_freed_worker_goes_to_the_largest_that_waits(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("a", 256, "3x24"))
    models = await demands(site)
    async with crew(site.url, tmp_path / "logs", queue_order="decreasing", **QUIET) as daemons:
        await daemons.start()
        (holder,) = await site.placed(await site.instances(models[3]))
        (small,) = await site.instances(models[1])
        await site.refused([small])
        (large,) = await site.instances(models[3])
        await site.refused([large])
        await site.delete("model_instances", holder["id"])
        (row,) = await site.placed([large], timeout=within(1))
        assert row["worker_name"] == "a"
        await site.settled()
        (row,) = await site.rows([small])
        assert row["state"] == "PENDING"

        # priority goes before size
        await site.delete("model_instances", small, large)
        async with site.sql.transaction():
            (large,) = await site.instances(models[3])
            (small,) = await site.instances(models[1], priority=5)
        assert await where(site, [large, small]) == [None, "a"]
    assert await record.broken() == []


async def test_fragmentation_keeps_whole_workers_for_what_waits(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """Small ones go where nothing is lost to the large one, which then has its four cards."""
    await site.fleet(W("a", 256, "4x24"), W("b", 256, "4x24"), W("c", 256, "4x24"))
    small = await site.model(4, share=0.25, placement_strategy="fragmentation")
    large = await site.model(70, backend_parameters=["--pipeline-parallel-size=4"])
    async with crew(site.url, tmp_path / "logs", **QUIET) as daemons, watching(site.url):
        await daemons.start()
        hold = [r["id"] for r in await site.placed(await site.instances(large, 3))]
        (waits,) = await site.instances(large)
        await site.refused([waits])
        await site.delete("model_instances", *hold)
        await site.placed([waits])
        rows = [r for n in range(8) for r in await site.placed(await site.instances(small))]
        assert len({r["worker_name"] for r in rows}) == 1
        (last,) = await site.instances(large)
        await site.placed([last], timeout=within(1))
    assert await record.broken() == []


async def test_decision_records_tell_pool_candidates_and_parts(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """Placed or refused: workers left after each filter, the best five with what their scores are made of."""
    labels = {"zone": "a"}
    for n in range(7):
        await site.worker(W(f"a{n}", 256, "2x24"), labels=labels)
    await site.worker(W("b", 256, "2x24"))
    await site.worker(W("off", 256, "2x24"), labels=labels, state="MAINTENANCE")
    selector = {"match": labels, "preferred": [{"key": "zone", "operator": "Exists", "weight": 2}]}
    model = await site.model(18, worker_selector=selector)
    huge = await site.model(900, worker_selector=selector)
    path = (await site.row("models", model))["local_path"]
    await site.insert(
        "model_files", worker_id=3, source_index=sha256(path.encode()).hexdigest(), size=9, state="READY"
    )
    async with crew(site.url, tmp_path / "logs", **QUIET) as daemons, watching(site.url):
        await daemons.start()
        placed, *_ = await site.placed(await site.instances(model))
        refused, *_ = await site.refused(await site.instances(huge))
    records = {
        r["instance_id"]: r for r in await site.sql.fetch("SELECT * FROM scheduling_decisions ORDER BY id")
    }
    good, bad = records[placed["id"]], records[refused["id"]]
    left = [("labels", 8), ("status", 7), ("backend", 7), ("local_path", 7)]
    for row in (good, bad):
        assert [(s["filter"], s["kept"]) for s in row["pool"]] == left
        assert {s["total"] for s in row["pool"]} == {9}
        assert row["duration_ms"] > 0
    assert placed["worker_name"] == "a2"
    best, *others = good["candidates"]
    assert best["worker"] == "a2"
    assert best["parts"] == {"placement": 100, "locality": 5, "preferred": 2}
    assert best["score"] == 107
    assert len(others) == 4
    assert {c["score"] for c in others} == {102}
    assert "fit" in {r["filter"] for r in bad["reasons"]}
    assert await record.broken() == []


async def test_under_decreasing_a_model_that_is_slow_to_read_holds_nobody_up(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """Its size is not known in time, so it comes last; it comes all the same."""
    await site.fleet(W("a", 256, "4x24"))
    hub = Hub({"lab/slow": shapes.repository(CONFIG, GIB)})
    async with hub:
        settings = {"queue_order": "decreasing", "HF_ENDPOINT": hub.url, **QUIET}
        models = await demands(site)
        slow = await site.model(source="huggingface", huggingface_repo_id="lab/slow")
        async with crew(site.url, tmp_path / "logs", **settings) as daemons, watching(site.url):
            await daemons.start()
            answer = hub.hold("/")
            async with site.sql.transaction():
                (waits,) = await site.instances(slow)
                placed = [i for n in (1, 2) for i in await site.instances(models[n])]
            await site.placed(placed, timeout=within(2))
            assert (await site.rows([waits]))[0]["worker_id"] is None
            answer.set()
            await site.placed([waits])
    assert await record.broken() == []
