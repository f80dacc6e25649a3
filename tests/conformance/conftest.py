"""Every test of this folder runs over both stores."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.conformance.scenes import Replica, Scene, scene_of


@pytest.fixture(params=["memory", "postgresql"])
def place(request: pytest.FixtureRequest) -> str | None:
    """The URL of a fresh database, or None for memory."""
    return None if request.param == "memory" else request.getfixturevalue("database")


@pytest.fixture
async def scene(place: str | None) -> AsyncIterator[Scene]:
    async with scene_of(place) as opened:
        yield opened


@pytest.fixture
def replica(scene: Scene) -> Replica:
    return Replica(scene.store)
