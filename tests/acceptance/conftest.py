"""What black-box tests start from: a database with the schema, users' SQL, a record of all that happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.acceptance.machines import Site, site_on
from tests.acceptance.record import Record


@pytest.fixture
async def site(database: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A fresh database and a folder for models."""
    async with site_on(database, tmp_path / "models") as opened:
        yield opened


@pytest.fixture
async def record(site: Site) -> Record:
    """Every change of state on that database from now on."""
    return await Record.install(site.sql)
