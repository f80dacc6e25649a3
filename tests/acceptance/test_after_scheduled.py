"""What becomes of placed instances: nobody takes them, they fail, their worker is drained or goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.acceptance.agents import Agents, agents
from tests.acceptance.daemons import Crew, crew, within
from tests.acceptance.machines import Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {
    "lease": 30,
    "rescan_interval": 600,
    "restart_backoff": 0.5,
    "GPUSTACK_WORKER_HEARTBEAT_INTERVAL": 0.5,
    "GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD": 6,
    "GPUSTACK_MODEL_INSTANCE_RESCHEDULE_GRACE_PERIOD": 4,
}
"""Of the defaults a twentieth, a sixtieth, a twenty-fifth and a seventy-fifth."""
RUNNING = "SELECT state = 'RUNNING' FROM model_instances WHERE id = $1"
MOVED = "SELECT state = 'RUNNING' AND worker_id <> $2 FROM model_instances WHERE id = $1"


@dataclass
class Scene:
    site: Site
    daemons: Crew
    fleet: Agents
    workers: list[int]

    async def row(self, instance: int) -> dict[str, Any]:
        return await self.site.row("model_instances", instance)

    async def running(self, instance: int) -> dict[str, Any]:
        await self.site.until(RUNNING, instance, timeout=within(15))
        return await self.row(instance)

    async def moved(self, instance: int, away_from: int) -> dict[str, Any]:
        await self.site.until(MOVED, instance, away_from, timeout=within(15))
        return await self.row(instance)


@asynccontextmanager
async def scene_of(
    site: Site, record: Record, folder: Path, *fleet: W, pickup_window: float = 60
) -> AsyncIterator[Scene]:
    """Workers that beat, two daemons. The only hands laid on what a worker had taken are lawful ones."""
    workers = await site.fleet(*fleet)
    async with (
        agents(site.url, workers) as beating,
        crew(site.url, folder / "logs", pickup_window=pickup_window, **SETTINGS) as daemons,
        watching(site.url),
    ):
        await daemons.start(2)
        yield Scene(site, daemons, beating, workers)
        await daemons.stop()
    assert await record.broken() == []
    await site.clean()


async def test_what_a_worker_does_not_take_or_cannot_start_goes_on_elsewhere(
    site: Site, record: Record, tmp_path: Path
) -> None:
    fleet = W("w1", 64, "1x24"), W("w2", 64, "1x24")
    async with scene_of(site, record, tmp_path, *fleet, pickup_window=4) as scene:
        # nobody takes it: fenced, placed on the other one, and the late worker's report is refused
        scene.fleet.lazy = set(scene.workers)
        (instance,) = await site.instances(await site.model(need=8))
        (row,) = await site.placed([instance])
        first, epoch = row["worker_id"], row["placement_epoch"]
        scene.fleet.lazy = {first}
        row = await scene.moved(instance, first)
        assert row["placement_epoch"] > epoch
        with pytest.raises(asyncpg.CheckViolationError, match="never falls"):
            await site.update("model_instances", instance, state="ERROR", placement_epoch=epoch)
        await site.delete("model_instances", instance)

        # it fails for no reason that is known: again where it is, with a counter
        scene.fleet.lazy = set()
        scene.fleet.broken = dict.fromkeys(scene.workers, "something broke")
        (instance,) = await site.instances(await site.model(need=8))
        await site.until("SELECT restart_count >= 1 FROM model_instances WHERE id = $1", instance)
        at = (await scene.row(instance))["worker_id"]
        scene.fleet.broken = {}
        row = await scene.running(instance)
        assert row["worker_id"] == at
        assert row["restart_count"] == row["failures"] >= 1
        await site.delete("model_instances", instance)

        # a card is broken: after two failures there it goes to another one
        (instance,) = await site.instances(await site.model(need=8))
        at = (await scene.running(instance))["worker_id"]
        scene.fleet.broken = {at: "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus"}
        await site.update("model_instances", instance, state="ERROR", state_message=scene.fleet.broken[at])
        row = await scene.moved(instance, at)
        assert row["restart_count"] == 2
        assert row["avoid"][0]["worker_id"] == at
        assert len(row["avoid"][0]["gpu_ids"]) == 1
    evicted = [line["cause"] for line in scene.daemons.whole("instance.evicted")]
    assert sorted(evicted) == ["failed", "not_taken"]


async def test_out_of_memory_books_more_and_wrong_flags_are_given_up(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with scene_of(site, record, tmp_path, W("w1", 64, "1x24"), W("w2", 64, "1x32")) as scene:
        small, large = scene.workers
        model = await site.model(need=8, worker_selector=None)
        await site.update("workers", large, state="MAINTENANCE")
        (instance,) = await site.instances(model)
        row = await scene.running(instance)
        booked = sum(row["computed_resource_claim"]["vram"].values())
        await site.update("workers", large, state="READY")
        words = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
        await site.update("model_instances", instance, state="ERROR", state_message=words)
        row = await scene.moved(instance, small)
        assert sum(row["computed_resource_claim"]["vram"].values()) > booked
        assert row["claim_raise"]["first_vram"] == booked
        # there is no larger card: where it is, again
        await site.update("model_instances", instance, state="ERROR", state_message=words)
        row = await scene.running(instance)
        assert (row["worker_id"], row["restart_count"]) == (large, 2)
        await site.delete("model_instances", instance)

        # what it was told is wrong: three times, then it is said, until the model is edited
        wrong = "vllm: error: unrecognized arguments: --max-modle-len"
        scene.fleet.broken = dict.fromkeys(scene.workers, wrong)
        (instance,) = await site.instances(model)
        await site.until(
            "SELECT failures = 3 AND state = 'ERROR' FROM model_instances WHERE id = $1", instance
        )
        for daemon in scene.daemons:
            line = await daemon.logged("instance.failed", instance_id=instance)
            assert line["reason"] == wrong
        row = await scene.row(instance)
        assert (row["state"], row["state_message"], row["restart_count"]) == ("ERROR", wrong, 2)
        scene.fleet.broken = {}
        await site.update("models", model, backend_parameters=["--max-model-len=4096"])
        await scene.running(instance)


async def test_a_drain_moves_replicas_one_by_one_and_never_below_the_minimum(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with scene_of(site, record, tmp_path, W("w1", 64, "3x24"), W("w2", 64, "3x24")) as scene:
        w1, w2 = scene.workers
        await site.update("workers", w2, state="MAINTENANCE")
        model = await site.model(need=8, share=0.9)
        ids = await site.instances(model, 3)
        for instance in ids:
            await scene.running(instance)
        await site.sql.execute(
            "CREATE FUNCTION fewer() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " IF (SELECT count(*) FROM model_instances WHERE state = 'RUNNING') < 2 THEN"
            " RAISE EXCEPTION 'fewer than two run'; END IF; RETURN NULL; END $$;"
            "CREATE TRIGGER fewer AFTER UPDATE OF state ON model_instances"
            " FOR EACH STATEMENT EXECUTE FUNCTION fewer()"
        )
        # nowhere to go: nothing moves, and it is said
        await site.update("workers", w1, state="MAINTENANCE", maintenance={"drain": True})
        said = [await d.logged("drain.held") for d in scene.daemons]
        assert {s["reason"] for s in said} == {"there is no other place for it now"}
        assert {r["worker_id"] for r in await site.rows(ids)} == {w1}
        await site.update("workers", w2, state="READY")
        await site.until(
            "SELECT bool_and(state = 'RUNNING' AND worker_id = $1) FROM model_instances",
            w2,
            timeout=within(15),
        )
        assert [r["placement_epoch"] for r in await site.rows(ids)] == [3, 3, 3]
    assert scene.daemons.tally()["instance.evicted"] == 3


async def test_a_pinned_model_leaves_a_worker_that_is_not_ready_after_the_grace_and_comes_back_to_it(
    site: Site, record: Record, tmp_path: Path
) -> None:
    """FR-19 (b)."""
    async with scene_of(site, record, tmp_path, W("w1", 64, "1x24"), W("w2", 64, "1x24")) as scene:
        w1, _ = scene.workers
        pinned = {"gpu_ids": ["w1:cuda:0"]}
        (instance,) = await site.instances(await site.model(need=8, gpu_selector=pinned, cpu_offloading=True))
        await scene.running(instance)
        await site.update("workers", w1, state="NOT_READY", state_message="power supply")
        await record.came(instance, "UNREACHABLE")
        (row,) = await site.refused([instance], timeout=within(15))
        assert "worker w1 is NOT_READY" in row["state_message"]
        assert not any(word in row["state_message"] for word in ("memory", "GiB", "not enough"))
        await site.update("workers", w1, state="READY")
        row = await scene.running(instance)
        assert (row["worker_name"], row["gpu_indexes"]) == ("w1", [0])
    workers = await site.sql.fetch("SELECT DISTINCT worker_id FROM recorder.bookings")
    assert [r["worker_id"] for r in workers] == [w1]


async def test_an_instance_over_several_workers_that_loses_a_part_is_placed_anew_as_a_whole(
    site: Site, record: Record, tmp_path: Path
) -> None:
    fleet = [W(f"w{n}", 64, "1x24") for n in range(4)]
    async with scene_of(site, record, tmp_path, *fleet) as scene:
        model = await site.model(need=30, distributed_inference_across_workers=True)
        (instance,) = await site.instances(model)
        row = await scene.running(instance)
        (part,) = row["distributed_servers"]["subordinate_workers"]
        lost = part["worker_id"]
        await site.update("workers", lost, state="NOT_READY")
        await site.until(
            "SELECT state = 'RUNNING' AND placement_epoch > $2 FROM model_instances WHERE id = $1",
            instance,
            row["placement_epoch"],
            timeout=within(15),
        )
        held = await site.sql.fetch("SELECT worker_id FROM instance_claims WHERE vram > 0")
        assert len({r["worker_id"] for r in held}) == len(held) == 2
        assert lost not in {r["worker_id"] for r in held}
    assert scene.daemons.tally()["instance.evicted"] == 1
