"""FR-14: 64 heads do not split over three cards, so four are taken; what splits by nothing waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}

WEIGHTS = int(168 * GIB / 1.2)
"""A claim of 170 GiB: two cards of 80 GiB offer 144 at 0.9 of each, three 216."""
SHARE = int(80 * GIB * 0.9)


async def model_of(
    site: Site, folder: Path, heads: int, vocabulary: int, kv_heads: int | None = 8, **columns: object
) -> int:
    config = {**shapes.QWEN_72B, "num_attention_heads": heads, "vocab_size": vocabulary}
    config |= {"num_key_value_heads": kv_heads or heads, "hidden_size": heads * 128}
    name = f"{heads}-{vocabulary}-{kv_heads}-{len(columns)}"
    path = shapes.written(folder / name, shapes.repository(config, WEIGHTS))
    return await site.model(source="local_path", local_path=str(path), **columns)


async def test_four_cards_where_three_would_hold_the_bytes(
    site: Site, record: Record, tmp_path: Path
) -> None:
    cases = [(64, 152_064, 8), (40, 152_064, 8), (64, 152_064, 2), (64, 152_064, None)]
    await site.fleet(*[W(f"w{n}", 512, "4x80", "2/1") for n in range(len(cases))])
    ids: list[int] = []
    for heads, vocabulary, kv in cases:
        ids += await site.instances(await model_of(site, tmp_path, heads, vocabulary, kv))
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        for row in await site.placed(ids, timeout=within(5)):
            assert sorted(row["gpu_indexes"]) == [0, 1, 2, 3]
            assert row["computed_resource_claim"]["vram"] == {str(n): SHARE for n in range(4)}
    assert await record.broken() == []


async def test_what_no_number_of_cards_can_split_waits_and_says_what_it_is(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 512, "4x80", "2/1"))
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        for heads, vocabulary, named in (
            (64, 151_674, "151674 vocabulary entries"),
            (25, 152_064, "25 heads"),
        ):
            for flags in ([], ["--tensor-parallel-size=4"]):
                model = await model_of(site, tmp_path, heads, vocabulary, backend_parameters=flags)
                (row,) = await site.refused(await site.instances(model), timeout=within(5))
                assert f"{named} cannot be split evenly over 4 GPUs" in row["state_message"]
                if flags:
                    assert "--tensor-parallel-size 4" in row["state_message"]
                await site.delete("models", model)
        # the same vocabulary splits over two: enough where the share of each is larger
        model = await model_of(site, tmp_path, 64, 151_674, env={"GPUSTACK_MODEL_VRAM_CLAIM": str(140 * GIB)})
        (row,) = await site.placed(await site.instances(model), timeout=within(5))
        assert len(row["gpu_indexes"]) == 2
    assert await record.broken() == []
