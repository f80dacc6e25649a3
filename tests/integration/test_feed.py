"""What a replica sees of the fleet: every change once, whoever writes and however long."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gpustackd.store.postgres.store import PostgresStore
from tests.integration.world import GIB, World, connected

pytestmark = pytest.mark.anyio


async def test_each_change_comes_once(world: World) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB)
    mark = (await world.store.fleet_changes(None)).mark
    seen: list[int] = []
    for _ in range(5):
        await world.placed(await world.part(worker, gpus[:1], GIB))
        changes = await world.store.fleet_changes(mark)
        seen += [g.version for g in changes.gpus]
        assert list(changes.workers) == []
        mark = changes.mark
        again = await world.store.fleet_changes(mark)
        assert list(again.gpus) == []
        mark = again.mark
    assert seen == [1, 2, 3, 4, 5]


async def test_a_change_of_a_long_open_transaction_comes_when_it_commits(world: World) -> None:
    _, (a, b) = await world.worker(80 * GIB, 80 * GIB)
    slow = await connected(world.url)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute("UPDATE gpu_devices SET schedulable = false WHERE id = $1", a)

    mark = (await world.store.fleet_changes(None)).mark
    for total in (70, 60, 50):  # others go on, and their changes are not told twice because of it
        await world.update("gpu_devices", b, vram_total=total * GIB)
        changes = await world.store.fleet_changes(mark)
        assert [(g.id, g.capacity) for g in changes.gpus] == [(b, total * GIB)]
        mark = changes.mark

    await transaction.commit()
    changes = await world.store.fleet_changes(mark)
    assert [(g.id, g.open) for g in changes.gpus] == [(a, False)]
    assert list((await world.store.fleet_changes(changes.mark)).gpus) == []
    await slow.close()


async def test_a_change_that_is_rolled_back_is_never_told(world: World) -> None:
    _, (gpu,) = await world.worker(80 * GIB)
    slow = await connected(world.url)
    transaction = slow.transaction()
    await transaction.start()
    await slow.execute("UPDATE gpu_devices SET schedulable = false WHERE id = $1", gpu)
    mark = (await world.store.fleet_changes(None)).mark
    await transaction.rollback()
    changes = await world.store.fleet_changes(mark)
    assert (list(changes.workers), list(changes.gpus)) == ([], [])
    await slow.close()


async def test_a_change_within_a_savepoint_is_told_with_its_transaction(world: World) -> None:
    _, (gpu,) = await world.worker(80 * GIB)
    mark = (await world.store.fleet_changes(None)).mark
    async with world.sql.transaction(), world.sql.transaction():
        await world.update("gpu_devices", gpu, vram_total=GIB)
    changes = await world.store.fleet_changes(mark)
    assert [g.capacity for g in changes.gpus] == [GIB]


async def test_deleted_rows_are_missing_from_a_whole_look_and_told_by_no_change(world: World) -> None:
    worker, (a, b) = await world.worker(80 * GIB, 80 * GIB)
    mark = (await world.store.fleet_changes(None)).mark
    await world.delete("gpu_devices", a)
    assert list((await world.store.fleet_changes(mark)).gpus) == []
    whole = await world.store.fleet_changes(None)
    assert ([g.id for g in whole.gpus], whole.complete) == ([b], True)
    await world.delete("workers", worker)
    whole = await world.store.fleet_changes(None)
    assert (list(whole.workers), list(whole.gpus)) == ([], [])
    assert whole.mark


async def test_a_worker_that_changes_its_gpus_too_is_told_with_them(world: World) -> None:
    worker, gpus = await world.worker(80 * GIB, 80 * GIB)
    mark = (await world.store.fleet_changes(None)).mark
    await world.update("workers", worker, vram_reserved=GIB)
    changes = await world.store.fleet_changes(mark)
    assert [w.id for w in changes.workers] == [worker]
    assert {g.id: g.capacity for g in changes.gpus} == dict.fromkeys(gpus, 79 * GIB)


async def test_with_many_writers_a_reader_of_changes_ends_with_the_truth(world: World) -> None:
    """Writers of short and long transactions, some rolled back; the reader never looks at everything."""
    for _ in range(4):
        await world.worker(*[80 * GIB] * 4)
    ids = [r["id"] for r in await world.sql.fetch("SELECT id FROM gpu_devices ORDER BY id")]
    over = asyncio.Event()
    reader = await PostgresStore.open(world.url, 2)

    async def writer(seed: int) -> None:
        chance = random.Random(seed)
        sql = await connected(world.url)
        for _ in range(40):
            transaction = sql.transaction()
            await transaction.start()
            for _ in range(chance.choice([1, 1, 5])):
                await sql.execute(
                    "UPDATE gpu_devices SET vram_total = $2 WHERE id = $1",
                    ids[seed * 4 + chance.randrange(4)],
                    chance.randrange(10**9),
                )
            if chance.random() < 0.2:
                await transaction.rollback()
            else:
                await transaction.commit()
        await sql.close()

    async def read() -> tuple[dict[int, Any], int]:
        first = await reader.fleet_changes(None)
        view: dict[int, Any] = {g.id: g for g in first.gpus}
        mark, told = first.mark, 0
        while True:
            last = over.is_set()
            changes = await reader.fleet_changes(mark)
            mark = changes.mark
            told += len(changes.gpus)
            for g in changes.gpus:
                assert g.version >= view[g.id].version
                view[g.id] = g
            if last:
                return view, told

    reading = asyncio.ensure_future(read())
    await asyncio.gather(*[writer(n) for n in range(4)])
    over.set()
    view, told = await reading
    truth = {g.id: g for g in (await reader.fleet_changes(None)).gpus}
    assert view == truth
    assert told > 0
    await reader.close()


async def test_the_feed_reads_changed_rows_by_their_index(world: World) -> None:
    for _ in range(20):
        await world.worker(*[GIB] * 8)
    await world.sql.execute("ANALYZE gpu_devices; ANALYZE workers; SET enable_seqscan = off")
    mark = (await world.store.fleet_changes(None)).mark
    from gpustackd.store.postgres.store import _GPUS, _SINCE

    plan = await world.sql.fetch("EXPLAIN " + _GPUS.format(where=_SINCE.format("g")), mark)
    assert any("gpu_devices_changed_in_idx" in r[0] for r in plan)
