"""A connection that the driver itself gives up is a lost connection, not a mistake of ours."""

from __future__ import annotations

import asyncpg
import pytest

from gpustackd.errors import DatabaseUnavailable
from tests.integration.world import World

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    "error",
    [
        asyncpg.InternalClientError("cannot switch to state 12; another operation (2) is in progress"),
        asyncpg.ProtocolError("unexpected message"),
        asyncpg.InterfaceError("the connection is closed"),
        ConnectionResetError("reset by peer"),
    ],
)
@pytest.mark.parametrize("committing", [False, True])
async def test_what_the_driver_gives_up_counts_as_the_database_lost_and_the_next_use_works(
    world: World, error: Exception, committing: bool
) -> None:
    connections = world.store.connections
    acquire = connections.acquire_for_commit if committing else connections.acquire
    with pytest.raises(DatabaseUnavailable):
        async with acquire():
            raise error
    assert (await world.store.health()).writable
