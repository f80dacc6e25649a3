"""The schema's revisions: up, down, up; many at once; cut short; other schemas; other builds."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from gpustackd.errors import DatabaseUnavailable, UsageError, WrongRevision
from gpustackd.store.postgres import migrate as schema
from gpustackd.store.postgres.revision import HEAD, REVISIONS, check_revision
from tests.integration.world import GIB, world_of
from tests.schema import difference
from tests.waiting import listening, soon, until

pytestmark = pytest.mark.anyio


ROOT = Path(__file__).resolve().parents[2]

CATALOGUE = """
SELECT 'column', c.relname || '.' || a.attname,
       format_type(a.atttypid, a.atttypmod) || a.attnotnull || coalesce(pg_get_expr(d.adbin, d.adrelid), '')
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'r' AND a.attnum > 0
UNION ALL
SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint
 WHERE connamespace = quote_ident(current_schema())::regnamespace AND contype <> 'n'
UNION ALL
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = current_schema()
UNION ALL
SELECT 'trigger', t.tgrelid::regclass || '.' || tgname, pg_get_triggerdef(t.oid)
  FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND NOT tgisinternal
UNION ALL
SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc
 WHERE pronamespace = quote_ident(current_schema())::regnamespace
ORDER BY 1, 2, 3"""


async def catalogue(url: str) -> list[tuple[str, str, str]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(r) for r in await connection.fetch(CATALOGUE)]
    finally:
        await connection.close()


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def with_path(url: str, path: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}options={quote(f'-csearch_path={path}')}"


async def test_up_down_and_up_again_is_the_same_schema_and_down_leaves_nothing(empty_database: str) -> None:
    url = empty_database
    assert await schema.current(url) is None
    assert await schema.migrate(url) == (None, HEAD)
    first = await catalogue(url)
    assert {kind for kind, _, _ in first} == {"column", "constraint", "index", "trigger", "function"}
    assert await schema.on_connection(url, difference) == []
    assert await schema.migrate(url) == (HEAD, HEAD)

    assert await schema.migrate(url, "base") == (HEAD, None)
    assert {name.partition(".")[0] for _, name, _ in await catalogue(url)} <= {
        "alembic_version", "alembic_version_pkc",
    }  # fmt: skip

    assert await schema.migrate(url) == (None, HEAD)
    assert await catalogue(url) == first
    assert await schema.on_connection(url, difference) == []


async def test_the_build_names_the_revisions_of_its_folder() -> None:
    config = Config()
    config.set_main_option("script_location", str(schema.scripts()))
    steps = ScriptDirectory.from_config(config).walk_revisions()
    assert tuple(s.revision for s in steps)[::-1] == REVISIONS


async def test_the_printed_statements_make_the_same_schema(empty_database: str, database: str) -> None:
    await execute(empty_database, schema.sql())
    assert await catalogue(empty_database) == await catalogue(database)
    assert await schema.current(empty_database) == HEAD


async def test_of_many_at_once_one_migrates_and_the_others_wait_for_it(empty_database: str) -> None:
    said: list[str] = []
    moves = await asyncio.gather(*[schema.migrate(empty_database, say=said.append) for _ in range(5)])
    assert sorted(moves, key=str) == sorted([(None, HEAD), *[(HEAD, HEAD)] * 4], key=str)
    assert said
    assert set(said) == {"another gpustackd migrates this database; waiting for it"}
    assert await schema.on_connection(empty_database, difference) == []


async def test_a_run_that_is_killed_half_way_leaves_whole_steps_and_the_next_one_goes_on(
    empty_database: str,
) -> None:
    url = empty_database
    control = await asyncpg.connect(url)
    # the migration comes to a halt in the middle of its statements
    await control.execute("""
        CREATE FUNCTION public.halt() RETURNS event_trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF to_regclass('public.gpu_devices') IS NOT NULL THEN
                PERFORM pg_advisory_xact_lock(77);
            END IF;
        END $$;
        CREATE EVENT TRIGGER halt ON ddl_command_end WHEN TAG IN ('CREATE TABLE')
            EXECUTE FUNCTION public.halt();
        SELECT pg_advisory_lock(77);
    """)
    code = (
        "import anyio, sys\n"
        "from gpustackd.store.postgres.migrate import migrate\n"
        "anyio.run(migrate, sys.argv[1])"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, url)

    waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND objid = 77"
    await until(lambda: control.fetchval(waits), "the migration is half way")
    process.kill()
    await process.wait()
    await control.execute("SELECT pg_advisory_unlock(77)")
    await control.execute("DROP EVENT TRIGGER halt; DROP FUNCTION public.halt()")
    assert await control.fetchval("SELECT to_regclass('model_instances')") is None
    await control.close()

    assert await schema.migrate(url) == (None, HEAD)
    assert await schema.on_connection(url, difference) == []


async def test_a_table_in_use_is_waited_for_in_short_tries(database: str) -> None:
    reader = await asyncpg.connect(database)
    transaction = reader.transaction()
    await transaction.start()
    await reader.fetch("SELECT * FROM models")
    tried = asyncio.Event()
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        tried.set()

    moving = asyncio.ensure_future(schema.migrate(database, "base", say=say))
    await soon(tried.wait(), "the migration says that a table is in use")
    await reader.fetch("SELECT * FROM models")  # never blocked for good behind a queued lock
    await transaction.commit()
    assert await moving == (HEAD, None)
    assert said[0] == "a table is in use; trying again"
    await reader.close()


async def test_an_unknown_revision_is_named_and_nothing_moves(database: str) -> None:
    with pytest.raises(UsageError, match="no revision '4711'"):
        await schema.migrate(database, "4711")
    assert await schema.current(database) == HEAD


# --- schemas -----------------------------------------------------------------------------------------------


async def test_two_gpustackd_live_in_two_schemas_of_one_database(empty_database: str) -> None:
    await execute(empty_database, "CREATE SCHEMA red; CREATE SCHEMA blue")
    urls = {name: with_path(empty_database, name) for name in ("red", "blue")}
    for url in urls.values():
        assert await schema.migrate(url) == (None, HEAD)
        assert await schema.on_connection(url, difference) == []
    async with world_of(urls["red"]) as red, world_of(urls["blue"]) as blue:
        async with (
            listening(urls["red"], "gpustackd_red") as at_red,
            listening(urls["blue"], "gpustackd_blue") as at_blue,
        ):
            for world in (red, blue):
                worker, (gpu,) = await world.worker(80 * GIB)
                await world.placed(await world.part(worker, [gpu], 80 * GIB, GIB))
            await at_red.heard()
            await at_blue.heard()
            await red.sql.execute("DELETE FROM models")
            assert await at_red.heard() == ["capacity"]
            assert await at_blue.heard() == []
        assert await red.ledger() == []
        assert len(await blue.ledger()) == 2
        await red.clean()
        await blue.clean()
        assert (await red.store.health()).revision == HEAD
        assert await red.sql.fetchval("SELECT current_schema()") == "red"
    assert await schema.migrate(urls["red"], "base") == (HEAD, None)
    assert await schema.current(urls["blue"]) == HEAD
    async with world_of(urls["blue"]) as blue:
        await blue.sql.execute("DELETE FROM workers")
        await blue.clean()


async def test_the_search_path_may_be_a_setting_of_the_database(empty_database: str) -> None:
    await execute(
        empty_database,
        """CREATE SCHEMA "Mixed Case";
        DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = "Mixed Case"', current_database());
        END $$""",
    )
    assert await schema.migrate(empty_database) == (None, HEAD)
    async with world_of(empty_database) as world, listening(empty_database, "gpustackd_Mixed Case") as ear:
        assert await world.sql.fetchval("SELECT to_regclass('public.models')") is None
        instance = await world.instance()
        assert await ear.heard() == [f"created {instance}"]
        await world.clean()
    assert await schema.migrate(empty_database, "base") == (HEAD, None)


async def test_a_schema_with_the_longest_name_works(empty_database: str) -> None:
    name = "s" * 63
    await execute(empty_database, f"CREATE SCHEMA {name}")
    url = with_path(empty_database, name)
    await schema.migrate(url)
    async with world_of(url) as world, listening(url, f"gpustackd_{name}"[:63]) as ear:
        instance = await world.instance()
        assert await ear.heard() == [f"created {instance}"]


async def test_a_search_path_that_leads_nowhere_is_said(empty_database: str) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        await schema.migrate(with_path(empty_database, "nowhere"))


# --- builds and servers ------------------------------------------------------------------------------------


def newer_build(folder: Path) -> Path:
    """A copy of this build with one more revision."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "gpustackd", folder / "gpustackd", ignore=ignored)
    shutil.copytree(ROOT / "migrations", folder / "migrations", ignore=ignored)
    (folder / "migrations/versions/0002_next.py").write_text(
        "import sqlalchemy as sa\n"
        "from alembic import op\n"
        f"revision, down_revision, branch_labels, depends_on = '0002', {HEAD!r}, None, None\n"
        "def upgrade():\n"
        "    op.add_column('models', sa.Column('more', sa.Text()))\n"
        "def downgrade():\n"
        "    op.drop_column('models', 'more')\n"
    )
    file = folder / "gpustackd/store/postgres/revision.py"
    file.write_text(file.read_text().replace(f'REVISIONS = ("{HEAD}",)', f'REVISIONS = ("{HEAD}", "0002")'))
    return folder


ASK = """
import json, sys, anyio
from gpustackd.errors import GpustackdError
from gpustackd.store.postgres import migrate, revision
said = {}
if "judge" in sys.argv:
    try:
        revision.check_revision(anyio.run(migrate.current, sys.argv[1]))
        said["judged"] = "fine"
    except GpustackdError as error:
        said |= {"judged": str(error), "exit_code": error.exit_code}
else:
    said["moved"] = anyio.run(migrate.migrate, sys.argv[1], *sys.argv[2:])
print(json.dumps(said))
"""


def ask(build: Path, url: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, url, *arguments],
        cwd=build,
        env={"PYTHONPATH": str(build), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_an_older_and_a_newer_schema_are_each_called_so(database: str, tmp_path: Path) -> None:
    build = await asyncio.to_thread(newer_build, tmp_path)
    judged = await asyncio.to_thread(ask, build, database, "judge")
    assert judged["exit_code"] == 3
    assert f"schema is older ({HEAD}) than this build (0002)" in judged["judged"]
    assert "gpustackd migrate" in judged["judged"]

    assert (await asyncio.to_thread(ask, build, database))["moved"] == [HEAD, "0002"]
    assert (await asyncio.to_thread(ask, build, database, "judge"))["judged"] == "fine"
    with pytest.raises(WrongRevision, match=rf"newer \(0002\) than this build \({HEAD}\)") as newer:
        check_revision(await schema.current(database))
    assert newer.value.exit_code == 3
    assert "upgrade" in newer.value.remedy
    with pytest.raises(WrongRevision, match="newer"):  # an old build changes nothing
        await schema.migrate(database)
    assert await schema.current(database) == "0002"

    assert (await asyncio.to_thread(ask, build, database, HEAD))["moved"] == ["0002", HEAD]
    check_revision(await schema.current(database))
    assert await schema.on_connection(database, difference) == []


async def test_no_schema_at_all_is_said_too(empty_database: str) -> None:
    with pytest.raises(WrongRevision, match="no gpustackd schema") as absent:
        check_revision(await schema.current(empty_database))
    assert absent.value.exit_code == 3


async def test_a_server_that_is_not_there_is_said() -> None:
    with pytest.raises(DatabaseUnavailable) as gone:
        await schema.migrate("postgresql://nobody@127.0.0.1:1/none")
    assert gone.value.exit_code == 3


async def test_a_user_without_rights_is_told_which_one_is_missing(empty_database: str) -> None:
    await execute(
        empty_database,
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC;"
        " DO $$ BEGIN CREATE ROLE gpustackd_test_guest LOGIN PASSWORD 'guest';"
        " EXCEPTION WHEN duplicate_object THEN NULL; END $$",
    )
    head, _, tail = empty_database.partition("://")
    rest = tail.partition("@")[2]
    with pytest.raises(DatabaseUnavailable) as refused:
        await schema.migrate(f"{head}://gpustackd_test_guest:guest@{rest}")
    assert "CREATE on the schema" in refused.value.remedy


async def test_a_user_who_may_not_look_at_the_schema_is_told(database: str) -> None:
    await execute(
        database,
        "DO $$ BEGIN CREATE ROLE gpustackd_test_guest LOGIN PASSWORD 'guest';"
        " EXCEPTION WHEN duplicate_object THEN NULL; END $$",
    )
    head, _, tail = database.partition("://")
    with pytest.raises(DatabaseUnavailable) as refused:
        await schema.migrate(f"{head}://gpustackd_test_guest:guest@{tail.partition('@')[2]}")
    assert "permission denied" in refused.value.problem


async def test_a_statement_timeout_of_the_database_does_not_cut_a_migration_short(
    empty_database: str,
) -> None:
    await execute(
        empty_database,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET statement_timeout = 2', current_database());"
        " END $$",
    )
    assert await schema.migrate(empty_database) == (None, HEAD)
