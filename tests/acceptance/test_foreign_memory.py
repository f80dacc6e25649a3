"""FR-03: cards that processes of others fill, with GPUSTACKD_FOREIGN_MEMORY=avoid; our own use is not counted
twice, an old sample is not trusted, and the policy is off unless it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.daemons import crew, gpustackd, within
from tests.acceptance.machines import GIB, Site, W, site_on
from tests.acceptance.record import watching

pytestmark = pytest.mark.anyio

AVOID = {"foreign_memory": "avoid", "rescan_interval": 600, "lease": 30}
EIGHT = W("w1", 512, "8x79.25", "2/1")


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return AVOID


@pytest.fixture
def site(served: Site) -> Site:
    """One daemon that avoids foreign memory serves the tests of this file, one after another."""
    return served


async def sample(site: Site, used: dict[int, float], age: float = 0) -> None:
    """What the worker reports: GiB in use by card, so many seconds old."""
    for index, gib in used.items():
        await site.sql.execute(
            "UPDATE gpu_devices SET vram_used = $2,"
            ' vram_used_at = clock_timestamp() - make_interval(secs => $3) WHERE "index" = $1',
            index,
            int(gib * GIB),
            float(age),
        )


def card(row: dict[str, Any]) -> int:
    [index] = row["gpu_indexes"]
    return int(index)


async def test_cards_that_others_fill_are_never_taken(site: Site) -> None:
    await site.fleet(EIGHT)
    model = await site.model(need=60)
    async with watching(site.url):
        taken = []
        for n in range(100):
            if n % 20 == 0:
                await sample(site, {i: 78.9 if i < 4 else 0.8 for i in range(8)})
            ids = await site.instances(model, 4 if n % 10 == 0 else 1)
            rows = await site.placed(ids, timeout=within(5))
            taken += [card(r) for r in rows]
            await site.delete("model_instances", *ids)
    assert len(taken) == 130
    assert min(taken) >= 4


async def adopted(site: Site, folder: Path, model: int, state: str, claim: float, cards: int = 4) -> None:
    """Our instances on the first cards, as rows that `apply` adopts."""
    name = (await site.row("models", model))["name"]
    documents = [
        "\n".join((
            "kind: ModelInstance", f"name: held-{i}", f"model: {name}", f"state: {state}", "worker: w1",
            "gpu_type: cuda", f"gpu_indexes: [{i}]",
            f"computed_resource_claim: {{ram: 0, vram: {{'{i}': {int(claim * GIB)}}}}}",
        ))
        for i in range(cards)
    ]  # fmt: skip
    file = folder / "held.yaml"
    file.write_text("\n---\n".join(documents))
    code, out, err = await gpustackd(site.url, "apply", "-f", str(file))
    assert code == 0, out + err


async def small(site: Site) -> int:
    """A model that needs 5 GiB, and takes no share of a card."""
    await site.insert("inference_backends", name="mine", versions={"1": {"custom_framework": "cuda"}})
    return await site.model(need=5, backend="mine", name="small")


async def test_our_own_use_is_not_counted_twice(site: Site, tmp_path: Path) -> None:
    await site.fleet(W("w1", 512, "4x80", "2/1"))
    await adopted(site, tmp_path, await site.model(need=60), "RUNNING", 72)
    await sample(site, dict.fromkeys(range(4), 71.0))
    ids = await site.instances(await small(site), 4)
    rows = await site.placed(ids, timeout=within(5))  # 80 - 72 - 1 = 7 are free on each
    assert sorted(card(r) for r in rows) == [0, 1, 2, 3]
    await site.clean()


async def test_what_is_booked_but_not_used_yet_hides_no_foreign_use(site: Site, tmp_path: Path) -> None:
    await site.fleet(W("w1", 512, "1x80", "2/1"))
    await adopted(site, tmp_path, await site.model(need=30), "SCHEDULED", 40, cards=1)
    await sample(site, {0: 38})  # 80 - 40 booked - 38 of others
    ids = await site.instances(await small(site))
    [row] = await site.refused(ids, timeout=within(5))
    assert "outside the scheduler" in row["state_message"]


async def test_where_all_cards_are_foreign_full_the_reason_says_so(site: Site, tmp_path: Path) -> None:
    await site.fleet(EIGHT)
    await sample(site, dict.fromkeys(range(8), 78.9))
    model = await site.model(need=60)
    ids = await site.instances(model)
    [row] = await site.refused(ids, timeout=within(5))
    assert row["state"] == "PENDING"
    assert "processes outside the scheduler use" in row["state_message"]
    assert "8 GPUs" in row["state_message"]
    assert "0 GPUs" not in row["state_message"].replace("80 GPUs", "")
    assert "fit.foreign_memory" in {r["code"] for r in row["reasons"]}
    # Nobody is told of a sample; it is seen all the same, and what waits is tried again without being
    # rewritten before.
    await sample(site, {5: 0.8})
    rows = await site.placed(ids, timeout=within(10))
    assert [card(r) for r in rows] == [5]
    assert rows[0]["attempts"] == 2


async def test_an_old_sample_counts_nothing(site: Site) -> None:
    await site.fleet(W("w1", 512, "1x80", "2/1"))
    await sample(site, {0: 78.9}, age=3600)
    rows = await site.placed(await site.instances(await site.model(need=60)), timeout=within(5))
    assert card(rows[0]) == 0


async def test_unless_asked_for_nothing_is_avoided(database: str, tmp_path: Path) -> None:
    async with site_on(database, tmp_path / "models") as site, crew(database, tmp_path / "logs") as daemons:
        await site.fleet(W("w1", 512, "1x80", "2/1"))
        await sample(site, {0: 78.9})
        await daemons.start()
        rows = await site.placed(await site.instances(await site.model(need=60)), timeout=within(5))
        assert card(rows[0]) == 0


async def test_a_sample_without_its_time_is_not_trusted(site: Site, tmp_path: Path) -> None:
    await site.fleet(W("w1", 512, "1x80", "2/1"))
    await site.sql.execute("UPDATE gpu_devices SET vram_used = vram_total")
    model = await site.model(need=60)
    await site.placed(await site.instances(model), timeout=within(5))
