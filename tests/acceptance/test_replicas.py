"""`UPDATE models SET replicas = n` is all that a user does: instances appear, and go in the right order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}


async def has(site: Site, model: int, number: int, seconds: float = 1) -> list[str]:
    """Wait until a model has so many instances, all of them placed; their names."""
    await site.until(
        "SELECT count(*) = $2 AND count(worker_id) = $2 FROM model_instances WHERE model_id = $1",
        model,
        number,
        patience=within(seconds),
    )
    rows = await site.sql.fetch("SELECT name FROM model_instances WHERE model_id = $1 ORDER BY id", model)
    return [r["name"] for r in rows]


async def test_a_number_is_all_that_a_user_writes(site: Site, record: Record, tmp_path: Path) -> None:
    await site.fleet(*[W(f"w{n}", 64, "4x24", "2/1") for n in range(4)])
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start(3)
        model = await site.model(need=8, name="llama", replicas=3)
        assert await has(site, model, 3) == ["llama-1", "llama-2", "llama-3"]
        await site.update("models", model, replicas=5)
        assert (await has(site, model, 5))[3:] == ["llama-4", "llama-5"]
        # one that a user deletes comes back, under the lowest name that is free
        await site.sql.execute("DELETE FROM model_instances WHERE name = 'llama-2'")
        assert (await has(site, model, 5))[4] == "llama-2"
        await site.update("models", model, replicas=1)
        await has(site, model, 1)
        await site.update("models", model, replicas=0)
        await has(site, model, 0)
        # without a number nothing is added or taken away
        await site.update("models", model, replicas=None)
        await site.instances(model, 2)
        await has(site, model, 2)
        other = await site.model(need=8, name="qwen", replicas=1)
        await has(site, other, 1)
        await has(site, model, 2)
        # from the moment that there is a number, rows written by hand count
        await site.update("models", model, replicas=1)
        await has(site, model, 1)
        await site.instances(model, 2)
        await has(site, model, 1)
        said = [line for d in daemons for line in d.told("replicas.synced")]
        assert {"llama", "qwen"} == {line["model"] for line in said}
        assert sum(line.get("added", 0) for line in said) == 7
    assert await record.broken() == []
