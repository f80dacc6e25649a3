"""`gpustackd worker` as a real process beside a daemon: simulated workers, and this host."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from tests.acceptance.daemons import (
    Daemon,
    clean_environment,
    command,
    crew,
    gpustackd,
    variables,
    within,
)
from tests.acceptance.machines import GIB, Site, W
from tests.acceptance.record import Record, watching

pytestmark = pytest.mark.anyio

SETTINGS = {
    "lease": 30,
    "rescan_interval": 600,
    "GPUSTACK_WORKER_HEARTBEAT_INTERVAL": 0.5,
    "GPUSTACK_WORKER_HEARTBEAT_GRACE_PERIOD": 6,
    "GPUSTACK_MODEL_INSTANCE_RESCHEDULE_GRACE_PERIOD": 600,
}
IS = "SELECT state = $2 FROM model_instances WHERE id = $1"


@asynccontextmanager
async def process(url: str, folder: Path, *arguments: str, excuse: str = "") -> AsyncIterator[Daemon]:
    """`gpustackd worker …` until this ends, heard by its log; `excuse`: what it may say beside log lines."""
    environment = {
        **clean_environment(),
        **variables(SETTINGS),
        "GPUSTACKD_DATABASE_URL": url,
        "GPUSTACKD_LOG_FORMAT": "json",
    }
    folder.mkdir(parents=True, exist_ok=True)
    started = await anyio.open_process(
        command("worker", *arguments), env=environment, stderr=-2, stdin=-3, start_new_session=True
    )
    made = Daemon("worker", started, folder / "worker.log", None)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.listen)
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.kill()
    assert [f for f in made.faults() if not (excuse and re.search(excuse, f))] == []


async def test_what_is_placed_on_a_simulated_worker_runs_until_the_worker_is_killed(
    site: Site, record: Record, tmp_path: Path
) -> None:
    model = await site.model(need=8)
    made_up = ("--create", "--gpus", "2x24GiB", "--ram", "64GiB", "--delay", "0.2")
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        (daemon,) = await daemons.start()
        async with process(site.url, tmp_path, "--simulate", "s1", *made_up) as worker:
            await worker.logged("worker.beats", worker="s1", state="READY")
            kept, gone = await site.instances(model, 2)
            await site.until(IS, kept, "RUNNING", timeout=within(15))
            assert await record.states(kept) == [
                *("PENDING", "ANALYZING", "SCHEDULED"),
                *("INITIALIZING", "DOWNLOADING", "STARTING", "RUNNING"),
            ]
            # deleted at whatever step: the others go on
            await site.delete("model_instances", gone)
            (late,) = await site.instances(model)
            await site.until(
                "SELECT state <> 'SCHEDULED' AND worker_id IS NOT NULL FROM model_instances WHERE id = $1",
                late,
            )
            await site.delete("model_instances", late)
            (last,) = await site.instances(model)
            await site.until(IS, last, "RUNNING", timeout=within(15))
            beat = await site.sql.fetchval("SELECT heartbeat_at FROM workers")
            booked = await site.sql.fetchval("SELECT version FROM workers")
            await site.until("SELECT heartbeat_at > $1 FROM workers", beat)
            assert await site.sql.fetchval("SELECT version FROM workers") == booked
            await worker.kill()
        await daemon.logged("worker.state_changed", worker="s1")
        await site.until("SELECT state = 'NOT_READY' FROM workers", timeout=within(15))
        await site.until(IS, kept, "UNREACHABLE", timeout=within(15))
        # back: READY at its first heartbeat, and what it ran is reported again; a stop is in order
        async with process(site.url, tmp_path / "again", "--simulate", "s1") as worker:
            await site.until(IS, kept, "RUNNING", timeout=within(15))
            await site.until("SELECT state = 'READY' FROM workers", timeout=within(15))
            assert await worker.stop() == 0
            assert len(worker.whole("worker.stopped", reason="SIGTERM")) == 1
    assert await record.broken() == []
    await site.clean()


async def test_starts_that_are_to_fail_are_in_error_with_the_words_that_were_given(
    site: Site, record: Record, tmp_path: Path
) -> None:
    await site.fleet(W("w1", 64, "1x24"))
    model = await site.model(need=8, restart_on_error=False)
    failing = ("--fail-rate", "1", "--fail-message", "no such image", "--delay", "0", "--seed", "3")
    async with crew(site.url, tmp_path / "logs", **SETTINGS) as daemons, watching(site.url):
        await daemons.start()
        said = "were deleted|next:"
        async with process(site.url, tmp_path, "--simulate", "w1", *failing, excuse=said) as worker:
            (instance,) = await site.instances(model)
            await site.until(IS, instance, "ERROR", timeout=within(15))
            row = await site.row("model_instances", instance)
            assert (row["state_message"], row["worker_name"]) == ("no such image", "w1")
            await worker.logged("instance.reported", state="ERROR", reason="no such image")
            # its row is deleted: nothing is left to beat for
            await site.sql.execute("DELETE FROM workers")
            assert await worker.gone() == 1
            assert "were deleted" in worker.last_words()
    assert await record.broken() == []


async def test_this_host_is_registered_outlives_a_broken_connection_and_keeps_its_state(
    site: Site, tmp_path: Path
) -> None:
    async with process(site.url, tmp_path, "here", "--ip", "10.1.2.3") as worker:
        await worker.logged("worker.beats", worker="here", state="READY")
        row = dict(await site.sql.fetchrow("SELECT * FROM workers WHERE name = 'here'"))
        assert row["ram_total"] > GIB // 4
        assert row["cpu_arch"] in {"amd64", "arm64"}
        assert (row["ip"], bool(row["hostname"])) == ("10.1.2.3", True)
        assert row["heartbeat_at"] is not None
        # a connection that breaks is made anew, and it beats on
        cut = await site.sql.fetchval(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE application_name = 'gpustackd-worker' AND datname = current_database()"
        )
        assert cut == 1
        await worker.logged("database.back")
        await site.until("SELECT heartbeat_at > $1 FROM workers", row["heartbeat_at"])
        worker.signal(signal.SIGINT)
        assert await worker.gone() == 0
    await site.update("workers", row["id"], state="MAINTENANCE")
    async with process(site.url, tmp_path / "again", "here") as worker:
        await worker.logged("worker.beats", worker="here", state="MAINTENANCE")


async def test_a_worker_or_cluster_that_does_not_exist_is_refused_with_the_next_step(site: Site) -> None:
    for arguments, says in (
        (("--simulate", "nobody"), "add --create"),
        (("--simulate", "a", "--create", "--cluster", "nowhere"), "there is no Cluster nowhere"),
    ):
        found, _, told = await gpustackd(site.url, "worker", *arguments)
        assert (found, says in told, "next:" in told) == (1, True, True), told
    assert await site.sql.fetchval("SELECT count(*) FROM workers") == 0
