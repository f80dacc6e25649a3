"""Decision records: kept for a while, twenty an instance; the newest are never those that go."""

from __future__ import annotations

import pytest

from tests.integration.world import World

pytestmark = pytest.mark.anyio


async def record(world: World, instance: int, number: int, age_days: float = 0) -> None:
    await world.sql.execute(
        "INSERT INTO scheduling_decisions (instance_id, placement_epoch, outcome, created_at)"
        " SELECT $1, n, 'NO_FIT', clock_timestamp() - make_interval(secs => $3 * 86400)"
        " FROM generate_series(1, $2) n",
        instance,
        number,
        float(age_days),
    )


async def pruned(world: World) -> int:
    """Prune until nothing is left to prune; how many went."""
    total = 0
    while went := await world.store.prune_decisions():
        total += went
    return total


async def kept(world: World, instance: int) -> list[int]:
    rows = await world.sql.fetch(
        "SELECT placement_epoch FROM scheduling_decisions WHERE instance_id = $1 ORDER BY id", instance
    )
    return [r["placement_epoch"] for r in rows]


async def test_the_newest_twenty_of_an_instance_are_kept(world: World) -> None:
    await record(world, 1, 50)
    await record(world, 2, 20)
    await record(world, 3, 3)
    assert await pruned(world) == 30
    assert await kept(world, 1) == list(range(31, 51))
    assert await kept(world, 2) == list(range(1, 21))
    assert await kept(world, 3) == [1, 2, 3]


async def test_records_of_a_month_ago_go_however_few_they_are(world: World) -> None:
    await record(world, 1, 2, age_days=31)
    await record(world, 1, 2, age_days=29)
    assert await pruned(world) == 2
    assert await kept(world, 1) == [1, 2]


async def test_pruning_goes_in_bites(world: World) -> None:
    await record(world, 1, 6000)
    assert await world.store.prune_decisions() == 5000
    assert await pruned(world) == 980
    assert await kept(world, 1) == list(range(5981, 6001))
