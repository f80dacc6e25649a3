"""What tests of the schema and the commit protocol start from."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.world import World, world_of


@pytest.fixture
async def world(database: str) -> AsyncIterator[World]:
    """A fresh database with the schema, a user's connection and a replica's store."""
    async with world_of(database) as opened:
        yield opened
