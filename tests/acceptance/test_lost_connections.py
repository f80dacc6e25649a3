"""FR-35: the LISTEN connection is dead, the database is made anew, or the server is down."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import asyncpg
import pytest

from gpustackd.store.embedded import EmbeddedPostgres
from gpustackd.store.postgres.migrate import migrate
from tests.acceptance.daemons import Daemon, crew, gpustackd, within
from tests.acceptance.machines import Site, W, site_on
from tests.acceptance.wire import wire_to
from tests.conftest import Server
from tests.servers import QUICK
from tests.waiting import elapse

pytestmark = pytest.mark.anyio

SLOW = {"lease": 30, "rescan_interval": 600}


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedPostgres]:
    """A server of this test's own, to be stopped."""
    async with (
        anyio.TemporaryDirectory(prefix="gpustackd-test-") as folder,
        EmbeddedPostgres(folder, settings={**QUICK, "max_connections": 30}) as postgres,
    ):
        await migrate(postgres.url())
        yield postgres


async def origin(daemon: Daemon, instance_id: int) -> str:
    """What told the daemon of an instance."""
    return str((await daemon.logged("instance.enqueued", instance_id=instance_id))["origin"])


async def hears(daemon: Daemon, site: Site, model: int) -> None:
    """A notification tells the daemon of an instance. A scan that runs at that moment may be faster; one scan
    cannot be so twice, and there are few."""
    for _ in range(10):
        (id_,) = await site.instances(model)
        await site.placed([id_], timeout=within(1))
        if await origin(daemon, id_) == "notify":
            return
        await site.delete("model_instances", id_)
    raise AssertionError(f"no notification is heard:\n{daemon.last_words()}")


async def test_a_database_that_is_just_starting_is_waited_for(site: Site, tmp_path: Path) -> None:
    await site.worker(W("w1", 64, "8x24"))
    async with wire_to(site.url) as wire, crew(wire.url, tmp_path / "logs", **SLOW) as daemons:
        wire.starting = True
        (daemon,) = await daemons.start(ready=False)
        told = await daemon.logged("database.lost")
        assert "the database system is starting up" in told["reason"]
        wire.starting = False
        await daemon.ready()
        (instance,) = await site.instances(await site.model(need=14))
        await site.placed([instance], timeout=within(5))


async def test_a_listening_session_that_the_server_ends_is_made_anew_and_what_came_meanwhile_is_found(
    site: Site, tmp_path: Path
) -> None:
    await site.worker(W("w1", 64, "8x24"))
    model = await site.model(need=14)
    async with crew(site.url, tmp_path / "logs", **SLOW) as daemons:
        (daemon,) = await daemons.start()
        async with site.sql.transaction():
            ended = await site.sql.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE application_name LIKE 'gpustackd listen%' AND datname = current_database()"
            )
            (missed,) = await site.instances(model)
        assert ended == 1
        again = await daemon.logged("listen.started", times=2)
        await site.placed([missed], timeout=within(5))
        await daemon.logged("rescan.done", after=again)
        await hears(daemon, site, model)
        await daemon.metric("gpustackd_listening", 1)
        await daemon.metric("gpustackd_listen_reconnects_total", 1)


async def test_a_line_that_falls_silent_is_found_out_and_meanwhile_the_scan_places(
    site: Site, tmp_path: Path
) -> None:
    await site.worker(W("w1", 64, "8x24"))
    model = await site.model(need=14)
    async with (
        wire_to(site.url) as wire,
        crew(wire.url, tmp_path / "logs", lease=30, rescan_interval=2) as daemons,
    ):
        (daemon,) = await daemons.start()
        (first,) = await site.instances(model)
        await site.placed([first], timeout=within(1))
        await daemon.logged("instance.scheduled", instance_id=first)
        before = await daemon.metric_now("gpustackd_placed_only_by_rescan_total")
        wire.silent = "gpustackd listen"
        (unheard,) = await site.instances(model)
        await site.placed([unheard], timeout=within(4))
        assert await origin(daemon, unheard) == "rescan"
        # told within the probe's interval and its patience: 15 s
        await daemon.logged("listen.lost", timeout=within(15))
        await daemon.metric("gpustackd_listening", 0)
        await daemon.metric("gpustackd_placed_only_by_rescan_total", before + 1)
        assert (await daemon.readiness(200))["listening"] is False
        wire.silent = ""
        await daemon.logged("listen.started", times=2)
        await hears(daemon, site, model)


async def test_a_database_that_is_dropped_and_made_anew_is_served_by_the_same_process(
    site: Site, postgres_server: Server, tmp_path: Path
) -> None:
    name = urlsplit(site.url).path[1:]
    await site.worker(W("w1", 64, "1x24"))
    (old,) = await site.instances(await site.model(need=14))
    async with crew(site.url, tmp_path / "logs", **SLOW) as daemons:
        (daemon,) = await daemons.start()
        await site.placed([old])
        maintenance = await asyncpg.connect(postgres_server.maintenance_url)
        try:
            await maintenance.execute(f'DROP DATABASE "{name}" WITH (FORCE)')
            await daemon.logged("database.lost")
            assert name in (await daemon.readiness(503))["database"]
            await maintenance.execute(f'CREATE DATABASE "{name}"')
        finally:
            await maintenance.close()
        assert (await gpustackd(site.url, "migrate"))[0] == 0
        await daemon.logged("database.back")
        async with site_on(site.url, tmp_path / "models") as anew:
            await anew.worker(W("w2", 64, "2x24"))
            model = await anew.model(need=14)
            (first,) = await anew.instances(model)
            (row,) = await anew.placed([first], timeout=within(10))
            assert row["worker_name"] == "w2"
            await daemon.logged("listen.started", times=2)
            (second,) = await anew.instances(model)
            await anew.placed([second], timeout=within(1))
            await daemon.readiness(200)
            await anew.clean()


async def server_down(server: EmbeddedPostgres, folder: Path, seconds: float) -> dict[str, float]:
    """Instances before, during and after a time without server; what the daemon used of a processor."""
    async with site_on(server.url(), folder / "models") as site:
        await site.worker(W("w1", 64, "4x24"))
        model = await site.model(need=14)
        (before,) = await site.instances(model)
    async with crew(server.url(), folder / "logs", **SLOW) as daemons:
        (daemon,) = await daemons.start()
        async with site_on(server.url(), folder / "models") as site:
            await site.placed([before])
        await anyio.to_thread.run_sync(server.stop)
        await daemon.logged("database.lost")
        await daemon.readiness(503)
        started, used = time.monotonic(), daemon.cpu_seconds()
        while time.monotonic() - started < seconds:
            assert (await daemon.get("/healthz"))[0] == 200
            await elapse(0.25, "between two looks at it, for as long as the server is down")
        share = (daemon.cpu_seconds() - used) / (time.monotonic() - started)
        await anyio.to_thread.run_sync(server.start)
        back = time.monotonic()
        async with site_on(server.url(), folder / "models") as site:
            (after,) = await site.instances(model)
            await site.placed([before, after], timeout=within(5))
            took = time.monotonic() - back
            await daemon.logged("database.back")
            await daemon.logged("listen.started", times=2)
            await daemon.readiness(200)
            (last,) = await site.instances(model)
            await site.placed([last], timeout=within(1))
            assert await site.sql.fetchval("SELECT count(*) FROM model_instances WHERE state = 'ERROR'") == 0
            await site.clean()
    return {"share": share, "back": took}


async def test_a_server_that_is_down_costs_no_processor_and_nothing_turns_to_error(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    found = await server_down(server, tmp_path, seconds=3)  # of the report's 120
    assert found["share"] < 0.05


@pytest.mark.chaos
@pytest.mark.timeout(400)
async def test_a_server_that_is_down_for_two_minutes(
    server: EmbeddedPostgres, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    found = await server_down(server, tmp_path, seconds=120)
    tell(
        f"FR-35 d: 2 min without server: {found['share']:.2%} of a processor,"
        f" placing again {found['back']:.2f} s after"
    )
    assert found["share"] < 0.05
