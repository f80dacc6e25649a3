"""FR-19: a pinned model stays where it was pinned, and waits with the name and the state of its worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}
MEMORY = ("memory", "GiB", "not enough")


async def test_a_model_pinned_to_a_worker_that_is_not_ready_waits_for_it_and_goes_nowhere_else(
    site: Site, record: Record, tmp_path: Path
) -> None:
    w1, _ = await site.fleet(W("w1", 64, "1x24", "2/1"), W("w2", 64, "1x24", "2/1"))
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        for state in ("NOT_READY", "UNREACHABLE", "MAINTENANCE"):
            await site.update("workers", w1, state=state)
            model = await site.model(need=8, cpu_offloading=True, gpu_selector={"gpu_ids": ["w1:cuda:0"]})
            (waiting,) = await site.instances(model)
            (row,) = await site.refused([waiting], timeout=within(5))
            assert f"worker w1 is {state}" in row["state_message"]
            assert not any(word in row["state_message"] for word in MEMORY)
            assert {"worker": "w1", "state": state}.items() <= row["reasons"][0]["params"].items()
            await site.update("workers", w1, state="READY")
            (row,) = await site.placed([waiting], timeout=within(5))
            assert (row["worker_name"], row["gpu_indexes"]) == ("w1", [0])
            await site.delete("models", model)
        # a worker that nobody knows is named as well
        model = await site.model(need=8, gpu_selector={"gpu_ids": ["w9:cuda:0"]})
        (row,) = await site.refused(await site.instances(model), timeout=within(5))
        assert "w9:cuda:0" in row["state_message"]
        assert not any(word in row["state_message"] for word in MEMORY)
    assert await record.broken() == []
    workers = await site.sql.fetch("SELECT DISTINCT worker_id FROM recorder.bookings")
    assert [r["worker_id"] for r in workers] == [w1]


async def test_cards_picked_on_two_workers_wait_for_the_one_that_is_not_ready(
    site: Site, record: Record, tmp_path: Path
) -> None:
    w1, _, w3 = await site.fleet(*[W(f"w{n}", 64, "1x24", "2/1") for n in (1, 2, 3)])
    await site.update("workers", w3, state="NOT_READY")
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        picked = {"gpu_ids": ["w1:cuda:0", "w3:cuda:0"]}
        model = await site.model(need=30, distributed_inference_across_workers=True, gpu_selector=picked)
        (waiting,) = await site.instances(model)
        (row,) = await site.refused([waiting], timeout=within(5))
        assert "worker w3 is NOT_READY" in row["state_message"]
        assert not any(word in row["state_message"] for word in MEMORY)
        assert await site.sql.fetchval("SELECT count(*) FROM instance_claims") == 0
        await site.update("workers", w3, state="READY")
        (row,) = await site.placed([waiting], timeout=within(5))
        (sub,) = row["distributed_servers"]["subordinate_workers"]
        assert {row["worker_id"], sub["worker_id"]} == {w1, w3}
        assert row["gpu_indexes"] == sub["gpu_indexes"] == [0]
        booked = await site.sql.fetch(
            "SELECT worker_id, part, vram FROM instance_claims WHERE instance_id = $1 AND vram > 0", waiting
        )
        assert {(r["worker_id"], r["part"]) for r in booked} == {
            (row["worker_id"], "main"),
            (sub["worker_id"], "subordinate"),
        }
        assert {r["vram"] for r in booked} == {int(24 * GIB * 0.9)}
    assert await record.broken() == []
