"""A plan is what happens: on a quiet fleet with one daemon every instance goes where it was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpustackd.daemon.compose import make_plan
from gpustackd.daemon.whatif.plan import PlannedDecision
from gpustackd.domain.outcome import Placed
from gpustackd.settings import load
from gpustackd.store.documents.apply import apply_documents
from gpustackd.store.documents.reading import read_documents
from tests.acceptance.daemons import Daemon, crew
from tests.acceptance.machines import Site, emptied
from tests.acceptance.random_sites import Situation, at_rest, text

pytestmark = pytest.mark.anyio

SETTINGS = {"lease": 60, "rescan_interval": 600}
TABLES = (
    "models", "model_instances", "instance_claims", "workers", "gpu_devices", "scheduling_decisions"
)  # fmt: skip
FEW = 8
MANY = 200

Where = tuple[str | None, tuple[int, ...], dict[str, int], int]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


async def test_what_is_planned_is_what_happens(
    site: Site, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    await run(site, tmp_path, range(FEW), tell)


@pytest.mark.chaos
async def test_what_is_planned_is_what_happens_on_many_fleets(
    site: Site, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    await run(site, tmp_path, range(1000, 1000 + MANY), tell)


async def run(site: Site, tmp_path: Path, seeds: Sequence[int], tell: Callable[[str], None]) -> None:
    found: Counter[str] = Counter()
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons:
        (daemon,) = await daemons.start()
        for read_before in (False, True):
            for seed in seeds[read_before::2]:
                happened = await planned_and_applied(site, daemon, tmp_path, seed, read_before)
                found += happened
                await emptied(site)
                if happened["slow"]:  # for a while it waits for nobody's files
                    await daemon.stop()
                    (daemon,) = await daemons.start()
    assert found["fleets"] >= len(seeds) // 2
    assert found["placed"] > 0
    assert found["waiting"] > 0
    tell(f"{found['fleets']} plans: {found['placed']} instances went where they were planned,"
         f" {found['waiting']} waited as planned; {found['slow']} more fleets whose models took long to read"
         " are left out")  # fmt: skip


async def planned_and_applied(
    site: Site, daemon: Daemon, folder: Path, seed: int, read_before: bool
) -> Counter[str]:
    """One fleet: what was planned is what happened, unless the daemon says that a burst's files took longer
    than it waits for them; they do not where it has read them before."""
    now = Situation(seed, folder)
    for m in now.models:  # what was asked before counts for it, and a plan does not know that
        if m["placement_strategy"] == "fragmentation":
            m["placement_strategy"] = "best_fit"
    if read_before:
        one_each = [{**d, "model": m["name"]} for d, m in zip(now.instances(9, start=50), now.models)]  # noqa: B905
        await applied(site, [*now.workers, *now.models, *one_each])
        await at_rest(site)
        await site.sql.execute("DELETE FROM model_instances")
    await applied(site, [*now.workers, *now.models[:2], *now.instances(0)])
    there = [d for d in now.instances(4) if d["model"] in {m["name"] for m in now.models[:2]}]
    await applied(site, there)
    await at_rest(site)
    before = await snapshot_of(site)
    wanted = [*now.models[1:], *now.instances(now.chance.randint(2, 9), start=10)]
    wanted = [d for d in wanted if d["kind"] == "Model" or known(d["model"], now)]
    settings = load(None, {"database_url": site.url})
    async with make_plan(site.url, settings, [documents(wanted)]) as (plan, _):
        foreseen = {t.name: where(t) for t in plan.trials}
    assert await snapshot_of(site) == before, "a plan wrote something"
    began = daemon.latest()
    await applied(site, wanted)
    await at_rest(site)
    rows = await site.sql.fetch(
        "SELECT id, name, worker_name, gpu_indexes, computed_resource_claim AS claim, distributed_servers"
        " FROM model_instances WHERE name = ANY ($1)",
        list(foreseen),
    )
    decided = [
        await daemon.logged("instance.scheduled", "instance.unschedulable", instance_id=r["id"]) for r in rows
    ]
    last = max(decided, key=lambda line: line.number)
    if not read_before and any(
        line.number > began.number for line in daemon.before(last, "model.slow") if began
    ):
        return Counter(slow=1)
    happened = {r["name"]: actual(r) for r in rows}
    assert happened == foreseen, f"seed {seed}"
    placed = sum(w[0] is not None for w in foreseen.values())
    return Counter(fleets=1, placed=placed, waiting=len(foreseen) - placed)


def known(model: str, now: Situation) -> bool:
    return model in {m["name"] for m in now.models}


def documents(raw: list[dict[str, Any]]) -> Any:
    return read_documents(text(raw), "plan.json")


async def applied(site: Site, raw: list[dict[str, Any]]) -> None:
    if raw:
        await apply_documents(site.sql, documents(raw))


async def snapshot_of(site: Site) -> list[Any]:
    """Every row that a plan could have touched, with the transaction that wrote it."""
    return [await site.sql.fetch(f"SELECT xmin::text, t::text FROM {table} t ORDER BY 2") for table in TABLES]


def where(trial: PlannedDecision) -> Where:
    if not isinstance(trial.outcome, Placed):
        return None, (), {}, 0
    main, *others = trial.outcome.placement.parts
    vram = {str(i): v for i, v in zip(main.gpu_indexes, main.vram, strict=True)}
    return main.worker_name, main.gpu_indexes, vram, len(others)


def actual(row: Any) -> Where:
    if row["worker_name"] is None:
        return None, (), {}, 0
    others = (row["distributed_servers"] or {}).get("subordinate_workers") or []
    return row["worker_name"], tuple(row["gpu_indexes"] or ()), row["claim"]["vram"], len(others)
