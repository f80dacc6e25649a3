"""`UPDATE models SET replicas = n` is all that a user does: instances appear, and go in the right order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
        timeout=within(seconds),
    )
    rows = await site.sql.fetch("SELECT name FROM model_instances WHERE model_id = $1 ORDER BY id", model)
    return [r["name"] for r in rows]


async def runs(site: Site, model: int, *names: str) -> None:
    """Play the worker: instances of a model (None named = all) become RUNNING."""
    await site.sql.execute(
        "UPDATE model_instances SET state = 'RUNNING'"
        " WHERE model_id = $1 AND state = 'SCHEDULED' AND (cardinality($2::text[]) = 0 OR name = ANY ($2))",
        model,
        list(names),
    )


async def draining(site: Site, model: int, number: int) -> list[str]:
    """Wait until so many instances of a model drain; their names."""
    await site.until(
        "SELECT count(*) = $2 FROM model_instances WHERE model_id = $1 AND draining_since IS NOT NULL",
        model,
        number,
        timeout=within(2),
    )
    rows = await site.sql.fetch(
        "SELECT name FROM model_instances WHERE model_id = $1 AND draining_since IS NOT NULL ORDER BY id",
        model,
    )
    return [r["name"] for r in rows]


async def test_a_number_is_all_that_a_user_writes(site: Site, record: Record, tmp_path: Path) -> None:
    await site.fleet(*[W(f"w{n}", 64, "4x24", "2/1") for n in range(4)])
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start(2)
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
        await site.delete("models", model, other)
        await the_broken_one_goes_first_then_the_one_without_a_place(site)
        await daemons.stop()
    synced = daemons.whole("replicas.synced")
    assert {line["model"] for line in synced} == {"llama", "qwen", "m"}
    assert sum(line.get("added", 0) for line in synced if line["model"] != "m") == 7
    assert await record.broken() == []


async def the_broken_one_goes_first_then_the_one_without_a_place(site: Site) -> None:
    model = await site.model(need=8, name="m", replicas=3)
    await has(site, model, 3)
    await runs(site, model)
    await site.sql.execute("UPDATE model_instances SET state = 'ERROR' WHERE name = 'm-1'")
    await site.update("models", model, replicas=2)
    assert await has(site, model, 2) == ["m-2", "m-3"]
    # and of those without a place every one before any that runs
    await site.sql.execute("UPDATE workers SET state = 'MAINTENANCE'")
    await site.update("models", model, replicas=4)
    await site.until("SELECT count(*) = 2 FROM model_instances WHERE reasons IS NOT NULL")
    await site.update("models", model, replicas=2)
    assert await has(site, model, 2) == ["m-2", "m-3"]


async def test_a_surplus_drains_is_taken_back_first_and_goes_when_it_is_due(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """A model without roles by its setting, members of a role by the knob of groups."""
    await site.fleet(*[W(f"w{n}", 64, "3x24", "2/1") for n in range(4)])
    roles: Any = [{"name": "prefill", "replicas": 3}, {"name": "decode", "replicas": 1}]
    fewer: Any = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 1}]
    window = "GPUSTACK_SCHEDULER_DRAIN_WINDOW_SECONDS"
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons:
        slow = await daemons.start(2, drain_window=3600, **{window: 3600})
        async with site.sql.transaction():
            model = await site.model(need=14, name="m", replicas=3)
            group = await site.model(need=14, name="g", replicas=1, roles=roles)
            await site.instances(group, 3, role="prefill", group_id="g1")
            await site.instances(group, 1, role="decode", group_id="g1")
        await has(site, model, 3, 5)
        members = await has(site, group, 4, 5)
        await runs(site, model)
        await runs(site, group)
        ids = {
            r["id"] for r in await site.sql.fetch("SELECT id FROM model_instances WHERE model_id = $1", model)
        }
        await site.update("models", model, replicas=1)
        first = await draining(site, model, 2)
        rows = await site.rows(ids)
        assert {r["state"] for r in rows} == {"RUNNING"}
        assert sum(r["worker_id"] is not None for r in rows) == 3  # and they keep what they hold
        # up again by one: one of the two stays, nothing new is started
        await site.update("models", model, replicas=2)
        (left,) = await draining(site, model, 1)
        assert left in first
        await site.update("models", model, replicas=4)
        assert await draining(site, model, 0) == []
        assert len(await has(site, model, 4)) == 4
        assert {r["id"] for r in await site.rows(ids)} == ids
        # one that does not serve is not waited for: the fourth never ran
        await site.update("models", model, replicas=3)
        assert sorted(await has(site, model, 3)) == ["m-1", "m-2", "m-3"]
        # a role from three to two and back keeps all three
        await site.update("models", group, roles=fewer)
        (member,) = await draining(site, group, 1)
        assert member in members[:3]
        await site.update("models", group, roles=roles)
        assert await draining(site, group, 0) == []
        assert await has(site, group, 4) == members
        await site.update("models", group, roles=fewer)
        (member,) = await draining(site, group, 1)
        await site.update("models", model, replicas=2)
        (left,) = await draining(site, model, 1)
        for daemon in slow:
            await daemon.stop()
        # the time is the row's and the database's: whoever comes next knows when it is over
        await daemons.start(drain_window=2, **{window: 2})
        assert left not in await has(site, model, 2, 4)
        assert member not in await has(site, group, 3, 4)
        await site.update("models", group, roles=roles)
        assert "g-prefill-1" in await has(site, group, 4)
    assert await record.broken() == []
