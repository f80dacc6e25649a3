"""What black-box tests start from: a database with the schema, users' SQL, a record of all that happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.daemons import crew
from tests.acceptance.machines import Site, emptied, site_on
from tests.acceptance.record import Record
from tests.acceptance.shop import NAMES, Shop
from tests.conftest import Server, fresh_database


@pytest.fixture
async def site(database: str, tmp_path: Path) -> AsyncIterator[Site]:
    """A fresh database and a folder for models."""
    async with site_on(database, tmp_path / "models") as opened:
        yield opened


@pytest.fixture
async def record(site: Site) -> Record:
    """Every change of state on that database from now on."""
    return await Record.install(site.sql)


@pytest.fixture(scope="module")
def stage(postgres_server: Server) -> Iterator[str]:
    """A database with the schema, for all tests of a file."""
    with fresh_database(postgres_server, postgres_server.migrated_template()) as url:
        yield url


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """Settings of `house`; a file that needs others has a fixture of this name."""
    return {"lease": 60, "rescan_interval": 600}


@pytest.fixture(scope="module")
async def house(
    stage: str, settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Site, Record]]:
    """One daemon on one database, for all tests of a file."""
    folder = tmp_path_factory.mktemp("house")
    async with site_on(stage, folder) as site:
        record = await Record.install(site.sql)
        async with crew(stage, folder / "logs", **settings) as daemons:
            await daemons.start()
            yield site, record


@pytest.fixture
async def served(house: tuple[Site, Record], tmp_path: Path) -> AsyncIterator[Site]:
    """That database with nothing in it, for one test after another."""
    site, record = house
    yield Site(site.url, tmp_path / "models", site.sql)
    await site.clean()
    assert await record.broken() == []
    await emptied(site)


@pytest.fixture
async def shop(house: tuple[Site, Record], tmp_path: Path) -> Shop:
    """A cluster of one's own on it."""
    site, record = house
    cluster = await site.insert("clusters", name=f"c{next(NAMES)}")
    return Shop(site, record, cluster, tmp_path)
