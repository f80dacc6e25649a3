"""A real PostgreSQL for the tests, and a fresh database for each test that asks for one.

`GPUSTACKD_TEST_DATABASE_URL` names a server on which databases may be created; otherwise an embedded one is
started, one for each worker of xdist, when the first test asks for it.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import asyncpg
import hypothesis
import pytest

from gpustackd.store.embedded import EmbeddedPostgres
from tests.exploring import explored
from tests.gpustack_reference.verdict import told as gpustack_verdicts
from tests.servers import QUICK

# An example's time says more about the machine than about the code; `make bench` measures.
hypothesis.settings.register_profile(
    "gpustackd",
    explored(100),
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("gpustackd")


class Server:
    """A PostgreSQL server and one connection to it for creating and dropping databases. `ours`: one that
    writes nothing through, where copying a template's files is quicker than copying its rows."""

    def __init__(self, url: str, *, ours: bool = False) -> None:
        self.maintenance_url = url
        self._how = "STRATEGY FILE_COPY" if ours else ""
        # unlike those of any other run or worker, on a server that is not ours alone
        self._prefix = f"gpustackd_test_{os.getpid():x}_{os.urandom(3).hex()}"
        self._numbers = count(1)
        self._runner = asyncio.Runner()
        self._connection: Any = None
        self._template: str | None = None

    def url(self, database: str) -> str:
        """The server's URL with another database."""
        return urlunsplit(urlsplit(self.maintenance_url)._replace(path=f"/{quote(database)}"))

    def execute(self, statement: str) -> None:
        """Run a statement outside any transaction, as CREATE DATABASE needs it."""
        self._runner.run(self._execute(statement))

    async def _execute(self, statement: str) -> None:
        if self._connection is None or self._connection.is_closed():  # a test may have restarted the server
            self._connection = await asyncpg.connect(self.maintenance_url)
        await self._connection.execute(statement)

    def create(self, template: str = "template1") -> str:
        """The name of a fresh database."""
        name = f"{self._prefix}_{next(self._numbers)}"
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" {self._how}')
        return name

    def drop(self, name: str) -> None:
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def migrated_template(self) -> str:
        """A database with the schema at head, migrated once and then only copied."""
        from gpustackd.store.postgres.migrate import migrate

        if self._template is None:
            name = self.create()
            self._runner.run(migrate(self.url(name)))
            self._template = name
        return self._template

    def close(self) -> None:
        if self._template is not None:
            self.drop(self._template)
        if self._connection is not None:
            self._runner.run(self._connection.close())
        self._runner.close()


@contextmanager
def serving(url: str, *, ours: bool = False) -> Iterator[Server]:
    server = Server(url, ours=ours)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def fresh_database(server: Server, template: str = "template1") -> Iterator[str]:
    name = server.create(template)
    try:
        yield server.url(name)
    finally:
        server.drop(name)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """The running PostgreSQL of this test run; `.url(database)`, `.create()`, `.drop(name)`."""
    if url := os.environ.get("GPUSTACKD_TEST_DATABASE_URL"):
        with serving(url) as server:
            yield server
        return
    # not pytest's own temporary folder: its paths are too long for a socket
    with (
        tempfile.TemporaryDirectory(prefix="gpustackd-test-") as folder,
        EmbeddedPostgres(folder, settings={**QUICK, "max_connections": 200, "autovacuum": False}) as postgres,
        serving(postgres.url("postgres"), ours=True) as server,
    ):
        yield server


@pytest.fixture
def empty_database(postgres_server: Server) -> Iterator[str]:
    """The URL of a database without anything in it, dropped after the test."""
    with fresh_database(postgres_server) as url:
        yield url


@pytest.fixture
def database(postgres_server: Server) -> Iterator[str]:
    """The URL of a database with the schema at head, dropped after the test."""
    with fresh_database(postgres_server, postgres_server.migrated_template()) as url:
        yield url


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests, marked `@pytest.mark.anyio`, run on asyncio: asyncpg knows nothing else."""
    return "asyncio"


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """What a test that passed has to say: shown at the end of the run, whichever process ran it."""
    return lambda text: record_property("told", text)


_SLOWEST_FIRST = ("chaos", "acceptance", "property", "integration", "conformance")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slowest folders first: what is left for the end is short, so that no process waits for another."""
    here = Path(__file__).parent
    rank = {folder: n for n, folder in enumerate(_SLOWEST_FIRST)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(here).parts[0], len(rank)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what tests told, and how the cases of GPUStack came out."""
    reports = [
        r for word in ("passed", "failed") for r in terminalreporter.getreports(word) if r.when == "call"
    ]
    properties = [(name, str(text)) for r in reports for name, text in r.user_properties]
    lines = [text for name, text in properties if name == "told"]
    verdicts = [text for name, text in properties if name == "gpustack"]
    if verdicts:
        lines += gpustack_verdicts(verdicts)
    if lines:
        terminalreporter.section("told by tests")
        for text in lines:
            terminalreporter.write_line(text)
