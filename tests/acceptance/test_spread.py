"""FR-21: spread puts replicas on both of two equal workers, and small models evenly on the cards of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpustackd.domain.model_spec import model_spec
from tests.acceptance import shapes
from tests.acceptance.daemons import crew
from tests.acceptance.machines import Site, W

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}
BOTH = (W("w1", 512, "8x64", "2/1"), W("w2", 512, "8x64", "2/1"))


async def ready_everywhere(site: Site, model: int, workers: Sequence[int]) -> None:
    """The model's files lie on these workers."""
    index = model_spec(await site.row("models", model)).source_index
    for worker in workers:
        await site.insert("model_files", worker_id=worker, source_index=index, size=40 * 2**30, state="READY")


async def workers_of(site: Site, ids: Sequence[int]) -> list[int]:
    """How many are on each worker, most first."""
    return sorted(Counter(r["worker_name"] for r in await site.placed(ids)).values(), reverse=True)


@pytest.mark.parametrize("daemons", [1, 3])
async def test_three_instances_lie_two_and_one_on_two_equal_workers(
    daemons: int, site: Site, tmp_path: Path
) -> None:
    workers = await site.fleet(*BOTH)
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as crewed:
        await crewed.start(daemons)

        model = await site.model(50)
        await ready_everywhere(site, model, workers)
        together = await site.instances(model, 3)
        assert await workers_of(site, together) == [2, 1]

        model = await site.model(50)
        await ready_everywhere(site, model, workers)
        apart = [(await site.instances(model))[0] for _ in range(3)]
        assert await workers_of(site, apart) == [2, 1]

        model = await site.model(50)
        await ready_everywhere(site, model, workers)
        first = await site.instances(model)
        await site.placed(first)
        assert await workers_of(site, [*first, *await site.instances(model, 2)]) == [2, 1]
        await site.clean()


@pytest.mark.parametrize("daemons", [1, 3])
async def test_small_models_lie_evenly_on_cards_after_some_of_them_went(
    daemons: int, site: Site, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 256, "4x23", "2/1"))
    folder = shapes.written(tmp_path / "m", shapes.repository(shapes.BERT, 400_000_000))

    async def one(name: str) -> int:
        model = await site.model(
            name=name, source="local_path", local_path=str(folder), categories=["embedding"],
            backend_parameters=None,
        )  # fmt: skip
        (instance,) = await site.instances(model)
        await site.placed([instance])
        return instance

    async def on_cards(ids: Sequence[int]) -> Counter[int]:
        return Counter(r["gpu_indexes"][0] for r in await site.placed(ids))

    async with crew(site.url, tmp_path / "logs", **SETTINGS) as crewed:
        await crewed.start(daemons)
        ids = [await one(f"small-{n}") for n in range(8)]
        assert await on_cards(ids) == Counter({0: 2, 1: 2, 2: 2, 3: 2})
        gone = [r["id"] for r in await site.rows(ids) if r["gpu_indexes"] == [0]]
        await site.delete("model_instances", *gone)
        left = [i for i in ids if i not in gone]
        more = [await one(f"more-{n}") for n in range(5)]
        counts = await on_cards([*left, *more])
        assert sum(counts.values()) == 11
        assert max(counts.values()) - min(counts.values()) <= 1
        await site.clean()
