"""FR-40: several daemons migrate at once, a migration is killed half-way, a build meets another schema."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import anyio
import asyncpg
import pytest

from gpustackd.store.postgres.migrate import on_connection
from gpustackd.store.postgres.revision import HEAD
from tests.acceptance.daemons import clean_environment, command, crew, gpustackd, within
from tests.acceptance.machines import Site, W, site_on
from tests.schema import difference
from tests.waiting import until

pytestmark = pytest.mark.anyio

SLOW = {"lease": 30, "rescan_interval": 600}

PAUSE = """
CREATE FUNCTION pause() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_event_trigger_ddl_commands()
                WHERE object_identity LIKE '%.model_instances') THEN
        PERFORM pg_advisory_lock_shared(4711);
    END IF;
END $$;
CREATE EVENT TRIGGER pause ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION pause();
"""


async def test_three_daemons_that_migrate_an_empty_database_at_once_all_work(
    empty_database: str, tmp_path: Path
) -> None:
    async with crew(empty_database, tmp_path, **SLOW) as daemons:
        for _ in range(3):
            await daemons.launch("--migrate")
        for daemon in list(daemons):
            await daemon.ready()
        async with site_on(empty_database, tmp_path / "models") as site:
            assert await site.sql.fetch("SELECT version_num FROM alembic_version") == [(HEAD,)]
            await site.worker(W("w1", 64, "3x24"))
            ids = await site.instances(await site.model(need=14), 3)
            await site.placed(ids, timeout=within(5))
            await site.clean()
        assert len(list(daemons)) == 3
    assert await on_connection(empty_database, difference) == []


@pytest.fixture
async def paused(empty_database: str) -> Any:
    """A connection that holds up every migration in the middle, until it gives the lock back."""
    connection = await asyncpg.connect(empty_database)
    if not await connection.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user"):
        pytest.skip("only a superuser can hold up a migration in its middle")
    await connection.execute(PAUSE)
    await connection.execute("SELECT pg_advisory_lock(4711)")
    yield connection
    await connection.close()


async def test_a_migration_killed_half_way_is_finished_by_the_next_run(
    empty_database: str, paused: Any
) -> None:
    environment = {**clean_environment(), "GPUSTACKD_DATABASE_URL": empty_database}
    half = await anyio.open_process(command("migrate"), env=environment, stdout=-3, stderr=-3)
    try:
        await waiting_for_the_lock(paused)
        half.send_signal(signal.SIGKILL)
        assert await half.wait() == -signal.SIGKILL
    finally:
        if half.returncode is None:
            half.kill()
    await paused.execute("SELECT pg_advisory_unlock(4711); DROP EVENT TRIGGER pause; DROP FUNCTION pause")
    assert (await gpustackd(empty_database, "migrate"))[0] == 0
    assert await paused.fetchval("SELECT version_num FROM alembic_version") == HEAD
    assert await on_connection(empty_database, difference) == []
    assert (await gpustackd(empty_database, "audit"))[0] == 0


async def test_others_wait_while_one_migrates_and_then_find_it_done(
    empty_database: str, paused: Any, tmp_path: Path
) -> None:
    async with crew(empty_database, tmp_path, **SLOW) as daemons:
        first = await daemons.launch("--migrate")
        await waiting_for_the_lock(paused)
        second = await daemons.launch("--migrate")
        both = (
            "SELECT count(*) >= 2 FROM pg_stat_activity WHERE application_name LIKE"
            " 'gpustackd migrate lock' AND datname = current_database()"
        )
        await until(lambda: paused.fetchval(both), "a second migration waits for the first")
        assert first.running
        assert second.running
        await paused.execute("SELECT pg_advisory_unlock(4711)")
        await first.ready()
        await second.ready()
        assert await paused.fetch("SELECT version_num FROM alembic_version") == [(HEAD,)]


async def waiting_for_the_lock(connection: Any) -> None:
    question = (
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = 'gpustackd migrate'"
        " AND wait_event = 'advisory' AND datname = current_database())"
    )
    await until(lambda: connection.fetchval(question), "a migration waits in its middle")


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        pytest.param(
            "UPDATE alembic_version SET version_num = '9999'",
            f"schema is newer (9999) than this build ({HEAD})",
            id="newer",
        ),
        pytest.param("DELETE FROM alembic_version", "no gpustackd schema", id="none"),
    ],
)
async def test_a_build_that_meets_another_schema_says_so_exits_with_3_and_writes_nothing(
    site: Site, statement: str, told: str
) -> None:
    await site.worker(W("w1", 64, "1x24"))
    (waiting,) = await site.instances(await site.model(need=14))
    before = await site.row("model_instances", waiting)
    await site.sql.execute(statement)
    for arguments in (("run", "--http", "off"), ("check",)):
        code, out, err = await gpustackd(site.url, *arguments)
        assert code == 3
        assert told in out + err
        assert "Traceback" not in err
    assert await site.row("model_instances", waiting) == before


async def test_a_running_daemon_stops_writing_when_the_schema_moves_on_without_it(
    site: Site, tmp_path: Path
) -> None:
    await site.worker(W("w1", 64, "2x24"))
    model = await site.model(need=14)
    async with crew(site.url, tmp_path / "logs", **SLOW) as daemons:
        (daemon,) = await daemons.start()
        await site.placed(await site.instances(model), timeout=within(5))
        await site.sql.execute("UPDATE alembic_version SET version_num = '9999'")
        lost = await daemon.logged("database.lost")
        assert f"schema is newer (9999) than this build ({HEAD})" in lost["reason"]
        assert "9999" in (await daemon.readiness(503))["database"]
        (later,) = await site.instances(model)
        assert (await site.row("model_instances", later))["state"] == "PENDING"
        await site.sql.execute(f"UPDATE alembic_version SET version_num = '{HEAD}'")
        await daemon.logged("database.back")
        await site.placed([later], timeout=within(5))
