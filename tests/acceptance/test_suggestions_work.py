"""What `explain` suggests works: made in the database, the waiting instance is SCHEDULED."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gpustackd.cli.explain import explain_instance
from gpustackd.settings import load
from gpustackd.store.documents.apply import apply_documents
from gpustackd.store.documents.reading import read_documents
from tests.acceptance.daemons import crew
from tests.acceptance.machines import Site, emptied
from tests.acceptance.random_sites import Situation, at_rest, text

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}
"""Only what wakes a waiting instance within a second can explain success."""
FEW = 15
MANY = 500


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def test_suggestions_place_the_instance(
    site: Site, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    await run(site, tmp_path, range(FEW), tell)


@pytest.mark.chaos
async def test_suggestions_place_the_instance_on_many_fleets(
    site: Site, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    await run(site, tmp_path, range(5000, 5000 + MANY), tell)


async def run(site: Site, tmp_path: Path, seeds: Iterable[int], tell: Callable[[str], None]) -> None:
    kinds: Counter[str] = Counter()
    fleets = helpless = 0
    settings = load(None, {"database_url": site.url})
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons:
        await daemons.start()
        for seed in seeds:
            now = Situation(seed, tmp_path)
            await applied(site, [*now.workers, *now.models, *now.instances(now.chance.randint(2, 8))])
            await at_rest(site)
            waiting = await site.sql.fetch("SELECT id, name FROM model_instances WHERE state = 'PENDING'")
            fleets += 1
            if waiting:
                row = now.chance.choice(waiting)
                told = (await explain_instance(settings, site.url, row["name"]))["waiting"]
                assert told["fits_now"] is None, f"seed {seed}: {row['name']} fits, but nobody placed it"
                if told["suggestions"]:
                    chosen = now.chance.choice(told["suggestions"])
                    await made(site, row["id"], chosen, f"seed {seed}, {row['name']}")
                    kinds[chosen["change"]["kind"]] += 1
                else:
                    helpless += 1
            await emptied(site)
    assert sum(kinds.values()) > helpless
    assert len(kinds) >= 3
    tell(f"{fleets} fleets, {sum(kinds.values())} suggestions made and all of them worked ({dict(kinds)});"
         f" {helpless} instances that no single change helps")  # fmt: skip


async def made(site: Site, instance: int, suggestion: dict[str, Any], about: str) -> None:
    async with site.sql.transaction():
        for statement in suggestion["sql"]:
            await site.sql.execute(statement)
    try:
        await site.until("SELECT state = 'SCHEDULED' FROM model_instances WHERE id = $1", instance)
    except AssertionError as error:
        raise AssertionError(f"{about}: {suggestion['text']} did not help\n{error}") from error


async def applied(site: Site, raw: list[dict[str, Any]]) -> None:
    await apply_documents(site.sql, read_documents(text(raw), "site.json"))
