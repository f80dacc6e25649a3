"""The fleet of a replica follows the store, whatever happens while it looks."""

from __future__ import annotations

import anyio
import pytest

from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.ports import FleetChanges
from gpustackd.store.memory.store import MemoryStore

pytestmark = pytest.mark.anyio


class Held(MemoryStore):
    """A store whose answer about the fleet is on its way for as long as `answer` is not set."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = anyio.Event()
        self.answer.set()
        self.asked = anyio.Event()

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        found = await super().fleet_changes(since)
        self.asked.set()
        await self.answer.wait()
        return found


async def test_a_deletion_that_is_told_while_a_look_is_under_way_is_seen_by_the_next_one() -> None:
    store = Held()
    first = store.database.insert("workers", name="w1", state="READY")
    store.database.insert("workers", name="w2", state="READY")
    feed = FleetFeed(store)
    await feed.load()
    store.answer, store.asked = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed.refresh)
        await store.asked.wait()
        store.database.delete("workers", first)
        feed.reload_next()
        store.answer.set()
    await feed.refresh()
    assert list(feed.fleet.by_name) == ["w2"]


async def test_workers_take_their_positions_by_id_whatever_the_order_of_rows() -> None:
    store = MemoryStore()
    for n in (3, 1, 2):
        store.database.insert("workers", id=n, name=f"w{n}", state="READY")
    feed = FleetFeed(store)
    await feed.load()
    assert feed.fleet.worker_id[:3].tolist() == [1, 2, 3]
    assert feed.fleet.order is None
    store.database.delete("workers", 1)
    feed.reload_next()
    await feed.refresh()
    store.database.insert("workers", id=9, name="w9", state="READY")
    await feed.refresh()
    fleet = feed.fleet
    ids = fleet.worker_id[: fleet.count][fleet.alive[: fleet.count]]
    assert ids.tolist() == [2, 3, 9]  # the position that was freed is not taken
    assert fleet.order is None
