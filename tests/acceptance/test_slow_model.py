"""One slow model delays no other: what is known of the others is at hand, and nobody waits in line for a hub.

A hub that answers after 14 s is one here that answers when it is told to, long after all others are placed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance import shapes
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import CONFIG, GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.hub import Hub

pytestmark = pytest.mark.anyio

CACHED = 50
READS_AT_ONCE = 16
WEIGHTS = int(2 * GIB / 1.2)
"""A claim of 4 GiB."""


async def hub_model(site: Site, name: str) -> int:
    return await site.model(
        name=name, source="huggingface", huggingface_repo_id=f"lab/{name}", share=0.17
    )  # of 24 GiB: 4.08


async def one_of_each(site: Site, models: list[int]) -> list[int]:
    """An instance of each of the models, inserted in one transaction."""
    async with site.sql.transaction():
        return [(await site.instances(m))[0] for m in models]


async def warm(site: Site) -> list[int]:
    """Models that were read before, each with its own files."""
    models = [await hub_model(site, f"known-{n}") for n in range(CACHED)]
    ids = await one_of_each(site, models)
    await site.placed(ids)
    await site.delete("model_instances", *ids)
    return models


def hub_with(*slow: str) -> Hub:
    repo = shapes.repository(CONFIG, WEIGHTS)
    names = [*slow, *(f"known-{n}" for n in range(CACHED))]
    return Hub({f"lab/{n}": repo for n in names})


async def waits(site: Site, record: Record, ids: list[int]) -> float:
    """Until all are placed; the longest time from insert to place, as the database's clock has it."""
    await site.placed(ids, timeout=within(1))
    for id_ in ids:
        assert await record.states(id_) == ["PENDING", "ANALYZING", "SCHEDULED"]
    longest: float = await site.sql.fetchval(
        "SELECT max(extract(epoch FROM done.at - made.at)) FROM recorder.moves made"
        " JOIN recorder.moves done ON done.instance_id = made.instance_id AND done.became = 'SCHEDULED'"
        " WHERE made.was IS NULL AND made.instance_id = ANY ($1::bigint[])",
        ids,
    )
    return float(longest)


@pytest.mark.parametrize("slow", [1, READS_AT_ONCE + 4], ids=["one", "more than are read at once"])
async def test_fifty_known_models_are_placed_while_the_hub_keeps_others_waiting(
    slow: int, site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(*[W(f"w{n}", 512, "8x24", "2/1") for n in range(2)])
    names = [f"slow-{n}" for n in range(slow)]
    async with hub_with(*names) as hub:
        settings = {"lease": 60, "rescan_interval": 600, "concurrency": 1, "HF_ENDPOINT": hub.url}
        async with crew(site.url, tmp_path / "logs", **settings) as daemons, watching(site.url):
            await daemons.start()
            known = await warm(site)
            usual = await waits(site, record, ids := await one_of_each(site, known))
            await site.delete("model_instances", *ids)

            answer = hub.hold("/")  # whoever asks the hub from now on waits, for whatever
            asked = hub.requests.copy()
            late = await one_of_each(site, [await hub_model(site, n) for n in names])
            await hub.arrivals(min(slow, READS_AT_ONCE))
            beside = await waits(site, record, await one_of_each(site, known))
            print(f"\n{CACHED} known models: {usual:.3f} s, beside {slow} slow ones {beside:.3f} s")

            # all that the hub was asked for are the slow ones, and none of them has an answer yet
            assert not answer.is_set()
            assert not [path for path in hub.requests - asked if "known" in path]
            assert {r["state"] for r in await site.rows(late)} <= {"PENDING", "ANALYZING"}
            answer.set()
            await site.placed(late, timeout=within(5))
    assert await record.broken() == []
    assert await record.count("ERROR") == 0
