"""The databases that tests are given."""

import asyncpg
import pytest

pytestmark = pytest.mark.anyio


async def test_an_empty_database_has_no_tables(empty_database: str) -> None:
    connection = await asyncpg.connect(empty_database)
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
        await connection.execute("CREATE TABLE leftover (id int)")
    finally:
        await connection.close()


async def test_every_test_gets_a_database_of_its_own(empty_database: str) -> None:
    connection = await asyncpg.connect(empty_database)
    try:
        assert await connection.fetchval("SELECT to_regclass('leftover')") is None
    finally:
        await connection.close()


@pytest.mark.parametrize("round_", range(3))
async def test_a_migrated_database_is_a_copy_of_one_template(database: str, round_: int) -> None:
    connection = await asyncpg.connect(database)
    try:
        assert await connection.fetchval("SELECT count(*) FROM model_instances") == 0
        await connection.execute("INSERT INTO clusters (name) VALUES ('c')")
    finally:
        await connection.close()
