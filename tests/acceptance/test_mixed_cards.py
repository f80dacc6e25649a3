"""FR-28: a search over mixed cards for a huge model is quick, bounded, repeatable, and holds up nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.gguf_models import R1_BF16, llama

pytestmark = pytest.mark.anyio

FLEET = (
    "1x24", "2x16", "4x16", "1x24", "8x24", "8x24", "8x24", "8x16", "8x16", "8x24", "4x24+4x16", "2x24",
    "8x12", "4x24+4x12", "1x16",
)  # fmt: skip
"""Cards of the workers as reported; besides two with unified memory and three with none."""
SMALL = llama(16, 2048, 32, 8, 8192)
QUIET = {"lease": 60, "rescan_interval": 600}


async def mixed(site: Site, ram: float) -> None:
    """The reported fleet, each worker with so much RAM."""
    for n, cards in enumerate(FLEET):
        await site.worker(W(f"gpu{n:02}", ram, cards))
    for n, size in enumerate((24, 21)):
        worker = await site.worker(W(f"unified{n}", size, "", "2/0"), unified_memory=True)
        await site.insert("gpu_devices", worker_id=worker, index=0, type="mps", vram_total=size * GIB)
    for n in range(3):
        await site.worker(W(f"cpu{n}", ram, ""))


async def models(site: Site, tmp_path: Path) -> tuple[int, int]:
    """The huge one, for which every way is open, and a small one."""
    huge = R1_BF16.write(tmp_path / "r1-bf16.gguf")
    small = SMALL.write(tmp_path / "small.gguf")
    assert huge.stat().st_size > 1250 * GIB
    common = {"source": "local_path", "backend": "Custom"}
    first = await site.model(
        name="r1",
        local_path=str(huge),
        cpu_offloading=True,
        distributed_inference_across_workers=True,
        **common,
    )
    return first, await site.model(name="small", local_path=str(small), **common)


async def test_a_huge_model_without_a_place_gets_its_reasons_and_twenty_small_ones_their_places(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await mixed(site, 256)
    huge, small = await models(site, tmp_path)
    async with crew(site.url, tmp_path / "logs", **QUIET) as daemons, watching(site.url):
        (daemon,) = await daemons.start()
        async with site.sql.transaction():
            (waits,) = await site.instances(huge)
            placed = await site.instances(small, 20)
        await site.placed(placed, timeout=within(5))
        (row,) = await site.refused([waits], timeout=within(10))
        message = row["state_message"]
        for step in (
            "one GPU",
            "several GPUs on one worker",
            "several workers",
            "some layers on GPUs",
            "without a GPU",
        ):
            assert step in message
        codes = [r["code"] for r in row["reasons"]]
        assert len(codes) == len(set(codes))
        told = await daemon.logged("instance.unschedulable", instance_id=waits)
        assert told["duration_ms"] < 10_000
        await daemon.metric("gpustackd_searches_cut_total", 0)
        assert await daemon.stop() == 0
        assert daemon.whole("search.cut") == []
    assert await record.broken() == []
    await site.clean()


def plan_of(row: dict[str, Any]) -> Any:
    """What was decided, without times."""
    claim = row["computed_resource_claim"]
    return (
        row["worker_name"],
        row["gpu_indexes"],
        claim,
        json.dumps(row["distributed_servers"], sort_keys=True),
    )


async def test_with_ram_for_the_rest_it_lies_over_workers_the_same_way_every_time(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await mixed(site, 64)
    await site.worker(W("large", 1536, "4x24+4x12"))
    huge, _ = await models(site, tmp_path)
    seen = []
    async with crew(site.url, tmp_path / "logs", **QUIET) as daemons, watching(site.url):
        for _ in range(2):  # by another process each time
            (daemon,) = await daemons.start()
            (id_,) = await site.instances(huge, priority=1)
            (row,) = await site.placed([id_], timeout=within(10))
            seen.append(plan_of(row))
            claim = row["computed_resource_claim"]
            parts = row["distributed_servers"]["subordinate_workers"]
            assert row["worker_name"] == "large"
            assert claim["total_layers"] == 62
            assert 0 < claim["offload_layers"] < 62
            assert sum(claim["tensor_split"]) == claim["offload_layers"]
            assert len(claim["tensor_split"]) == len(row["gpu_indexes"]) + len(parts) <= 15
            assert all(p["computed_resource_claim"]["ram"] == 2**29 for p in parts)
            told = await daemon.logged("instance.scheduled", instance_id=id_)
            assert told["duration_ms"] < 10_000
            await site.clean()
            await site.delete("model_instances", id_)
            assert await daemon.stop() == 0
    assert seen[0] == seen[1]
    assert await record.broken() == []
