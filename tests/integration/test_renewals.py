"""Leases are kept while rows are locked, and are not kept beyond their end."""

from __future__ import annotations

import pytest

from tests.integration.world import LEASE, World, connected

pytestmark = pytest.mark.anyio


async def test_a_row_that_somebody_has_locked_is_still_ours_and_renewed_the_next_time(world: World) -> None:
    locked, free = await world.instance(), await world.instance()
    await world.claims(locked, free, lease=LEASE)
    before = {i: (await world.row("model_instances", i))["lease_until"] for i in (locked, free)}
    other = await connected(world.url)
    try:
        async with other.transaction():
            await other.execute("SELECT 1 FROM model_instances WHERE id = $1 FOR UPDATE", locked)
            assert await world.store.renew(world.owner, [locked, free], 2 * LEASE) == {locked, free}
            assert (await world.row("model_instances", locked))["lease_until"] == before[locked]
            assert (await world.row("model_instances", free))["lease_until"] > before[free]
    finally:
        await other.close()
    assert await world.store.renew(world.owner, [locked], 2 * LEASE) == {locked}
    assert (await world.row("model_instances", locked))["lease_until"] > before[locked]


async def test_a_locked_row_whose_lease_is_over_is_no_longer_ours(world: World) -> None:
    id_ = await world.instance()
    await world.claim(id_)
    await world.expire(id_)
    other = await connected(world.url)
    try:
        async with other.transaction():
            await other.execute("SELECT 1 FROM model_instances WHERE id = $1 FOR UPDATE", id_)
            assert await world.store.renew(world.owner, [id_], LEASE) == set()
    finally:
        await other.close()
    assert await world.store.renew(world.owner, [id_], LEASE) == set()
