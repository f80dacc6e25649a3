"""The embedded PostgreSQL: really started, killed, found again."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from gpustackd.store.embedded import (
    AlreadyRunning,
    EmbeddedPostgres,
    EmbeddedPostgresFailed,
    find_binaries,
    identity,
)
from gpustackd.store.embedded.identity import ServerUser
from gpustackd.store.embedded.postmaster import postmaster_of
from tests.servers import QUICK, Server
from tests.waiting import until, until_in_thread

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")

SAME = ServerUser("same")
PARENT = """
    import sys, threading
    from gpustackd.store.embedded import EmbeddedPostgres
    server = EmbeddedPostgres(sys.argv[1], settings=dict(fsync=False))
    {start}
    print(server.pid, server.url(), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder below a closed one, as a home is; short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="gpustackd-test-") as closed:
        yield Path(closed) / "pg"


def query(url: str, statement: str) -> object:
    async def ask() -> object:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(ask())


ACTIVE = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE state = 'active' AND query LIKE '%generate_series%' AND pid <> pg_backend_pid()"
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def begin_parent(
    folder: Path, start: str = "server.start()", identity: ServerUser = SAME
) -> subprocess.Popen[str]:
    """A process of its own that starts a server and then waits to be told or killed."""
    script = textwrap.dedent(PARENT).format(start=start)
    command = identity.command(Path(sys.executable), "-c", script, str(folder))
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def told(parent: subprocess.Popen[str]) -> tuple[int, str]:
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    return int(pid), url


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # an orphan that init has not reaped yet is a zombie
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] == "Z"


# --- starting and stopping --------------------------------------------------------------------------------


def test_it_starts_serves_and_stops_without_leaving_a_process(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        pid = server.pid
        assert pid is not None
        assert query(server.url(), "SELECT current_database()") == "gpustackd"
        assert query(server.url("postgres"), "SELECT current_user") == "gpustackd"
        assert query(server.url(), "SHOW fsync") == "off"
    assert server.pid is None
    assert gone(pid)
    assert "database system is shut down" in server.log.read_text()


def test_data_outlive_a_restart_at_the_same_address(folder: Path) -> None:
    with Server(folder) as server:
        url = server.url()
        query(url, "CREATE TABLE kept AS SELECT 7 AS n")
        server.restart()
        assert server.url() == url
        assert query(url, "SELECT n FROM kept") == 7
    with EmbeddedPostgres(folder) as again:
        assert query(again.url(), "SELECT n FROM kept") == 7


def test_after_a_crash_the_next_start_recovers_what_was_committed(folder: Path) -> None:
    with Server(folder) as server:
        query(server.url(), "CREATE TABLE kept AS SELECT 7 AS n")
        server.crash()
        assert server.pid is None
        server.start()
        assert query(server.url(), "SELECT n FROM kept") == 7
    assert "automatic recovery in progress" in server.log.read_text()


@on_linux
def test_after_a_kill_of_the_server_even_with_a_query_running_it_starts_again(folder: Path) -> None:
    async def kill_amid_a_query(server: EmbeddedPostgres) -> None:
        connection = await asyncpg.connect(server.url())
        pid = server.pid
        assert pid is not None
        # busy, not waiting: it does not notice that its postmaster is gone
        busy = asyncio.create_task(connection.fetchval("SELECT count(*) FROM generate_series(1, 1000000000)"))
        await until(lambda: asyncio.to_thread(query, server.url(), ACTIVE), "the query runs")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: server.pid is None, "the server is gone")
        await asyncio.to_thread(server.start)
        with pytest.raises((asyncpg.PostgresError, asyncpg.InterfaceError, OSError)):
            await busy

    with EmbeddedPostgres(folder, settings=QUICK) as server:
        asyncio.run(kill_amid_a_query(server))
        assert query(server.url(), "SELECT 1") == 1


def test_a_connected_client_does_not_hold_up_a_stop(folder: Path) -> None:
    async def stop_while_connected() -> str:
        async with EmbeddedPostgres(folder, settings=QUICK) as server:
            connection = await asyncpg.connect(server.url())
            await asyncio.to_thread(server.stop)
            assert server.pid is None
            connection.terminate()
            return server.log.read_text()

    log = asyncio.run(stop_while_connected())
    assert "received fast shutdown request" in log
    assert "immediate shutdown" not in log


def test_a_thread_that_ends_takes_no_server_with_it(folder: Path) -> None:
    server = EmbeddedPostgres(folder, settings=QUICK)
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        # a death signal would be on its way by the time that this thread is joined
        assert query(server.url(), "SELECT pg_sleep(0.3)::text") == ""
        assert server.pid is not None
    finally:
        server.stop()


def test_a_deep_folder_gets_its_socket_elsewhere(folder: Path) -> None:
    deep = folder / ("d" * 60) / ("e" * 60)
    with EmbeddedPostgres(deep, settings=QUICK) as server:
        sockets = server.sockets
        assert deep not in sockets.parents
        assert mode(sockets) == 0o700
        assert query(server.url(), "SELECT 1") == 1
    assert not sockets.exists()


# --- who may reach it -------------------------------------------------------------------------------------


def test_nothing_is_opened_to_others(folder: Path) -> None:
    above = mode(folder.parent)
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        for closed in (folder, server.data, server.sockets):
            assert mode(closed) == 0o700, closed
        assert mode(server.log) == 0o600
    assert mode(folder.parent) == above == 0o700


def test_a_folder_that_was_there_keeps_its_mode(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert mode(folder) == 0o755
        assert mode(server.data) == mode(server.sockets) == 0o700


def test_it_does_not_listen_on_loopback(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert query(server.url(), "SHOW listen_addresses") == ""


# --- one server a folder ----------------------------------------------------------------------------------


def test_a_second_server_on_the_folder_is_refused_by_the_first_ones_number(folder: Path) -> None:
    with EmbeddedPostgres(folder, settings=QUICK) as first:
        with pytest.raises(AlreadyRunning, match=f"process {first.pid}"):
            EmbeddedPostgres(folder).start()
        assert query(first.url(), "SELECT 1") == 1


def test_a_start_that_fails_says_why_and_holds_nothing(folder: Path) -> None:
    with pytest.raises(EmbeddedPostgresFailed, match="no_such_setting"):
        EmbeddedPostgres(folder, settings={"no_such_setting": 1}).start()
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert query(server.url(), "SELECT 1") == 1


def test_a_start_that_was_cut_short_is_done_anew(folder: Path) -> None:
    (folder / "data.new" / "base").mkdir(parents=True)
    (folder / "data").mkdir()
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert query(server.url(), "SELECT 1") == 1


def test_missing_programs_are_named(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedPostgresFailed, match=str(tmp_path / "postgres")):
        find_binaries(tmp_path)


# --- no orphans -------------------------------------------------------------------------------------------


@on_linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    "start",
    [
        "server.start()",
        "thread = threading.Thread(target=server.start); thread.start(); thread.join()",
    ],
    ids=["from the main thread", "from another thread"],
)
def test_a_killed_parent_leaves_no_server(folder: Path, start: str, number: signal.Signals) -> None:
    with begin_parent(folder, start) as parent:
        pid, url = told(parent)
        query(url, "CREATE TABLE kept AS SELECT 7 AS n")
        parent.send_signal(number)
    until_in_thread(lambda: gone(pid), "the server is gone")
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert query(server.url(), "SELECT n FROM kept") == 7
    assert "not properly shut down" not in server.log.read_text(), "it was a clean shutdown, even so"


@on_linux
def test_a_start_right_after_a_kill_waits_for_the_old_server(folder: Path) -> None:
    with begin_parent(folder) as parent:
        pid, _ = told(parent)
        parent.kill()
        parent.wait()
        with EmbeddedPostgres(folder, settings=QUICK) as server:
            assert server.pid not in (None, pid)
            assert postmaster_of(server.data) == server.pid


def test_a_parent_that_ends_by_itself_stops_its_server(folder: Path) -> None:
    with begin_parent(folder) as parent:
        pid, _ = told(parent)
        parent.communicate(timeout=60)
    assert parent.returncode == 0
    until_in_thread(lambda: gone(pid), "the server is gone")


# --- who it runs as ---------------------------------------------------------------------------------------


@as_root
@on_linux
def test_as_root_all_files_stay_roots_and_no_user_is_made(folder: Path) -> None:
    users = Path("/etc/passwd").read_text()
    if identity.choose(folder, find_binaries().postgres).way != "namespace":
        pytest.skip("this system refuses user namespaces")
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert server.data.stat().st_uid == 0
        assert Path(f"/proc/{server.pid}").stat().st_uid == 0
    assert Path("/etc/passwd").read_text() == users


@as_root
@on_linux
def test_where_namespaces_are_refused_root_starts_it_as_another_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_namespace", lambda: None)
    assert identity.choose(folder / "data", find_binaries().postgres) == ServerUser(
        "user", 65534, 65534, reach=True
    )
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert query(server.url(), "SELECT 1") == 1
        assert server.data.stat().st_uid == 65534
        assert f"Uid:\t{65534}" in Path(f"/proc/{server.pid}/status").read_text()
        assert mode(server.data) == 0o700
    assert mode(folder.parent) == 0o700
    # and from then on its owner is who runs it, namespaces or not
    monkeypatch.undo()
    with EmbeddedPostgres(folder, settings=QUICK) as server:
        assert f"Uid:\t{65534}" in Path(f"/proc/{server.pid}/status").read_text()


@as_root
@on_linux
def test_where_namespaces_are_refused_a_killed_parent_leaves_no_server_either(folder: Path) -> None:
    start = (
        "from gpustackd.store.embedded import identity; identity._namespace = lambda: None; server.start()"
    )
    with begin_parent(folder, start) as parent:
        pid, _ = told(parent)
        parent.kill()
    until_in_thread(lambda: gone(pid), "the server is gone")


@as_root
@on_linux
def test_another_user_finds_programs_in_folders_that_are_closed_to_others(tmp_path: Path) -> None:
    program = tmp_path / "closed" / "program"
    program.parent.mkdir(mode=0o700)
    program.touch(mode=0o755)
    look = f"import os, sys; sys.exit(not os.access({str(program)!r}, os.X_OK))"
    other = ServerUser("user", 65534, 65534, reach=True)
    assert subprocess.run(other.command(Path(sys.executable), "-c", look), check=False).returncode == 0


@as_root
@on_linux
def test_a_normal_user_needs_no_root() -> None:
    # Where Python lies under a folder that is closed to others, the user gets the one right that passes it.
    open_to_all = all(parent.stat().st_mode & 0o001 for parent in Path(sys.executable).resolve().parents)
    user = ServerUser("user", 65534, 65534, reach=not open_to_all)
    with tempfile.TemporaryDirectory(prefix="gpustackd-test-") as home:
        os.chown(home, 65534, 65534)
        with begin_parent(Path(home) / "pg", identity=user) as parent:
            pid, url = told(parent)
            assert f"Uid:\t{65534}" in Path(f"/proc/{pid}/status").read_text()
            assert query(url, "SELECT 1") == 1
            parent.kill()
        until_in_thread(lambda: gone(pid), "the server is gone")
        assert (Path(home) / "pg" / "data").stat().st_uid == 65534


@on_linux
def test_a_user_without_a_name_is_mapped_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_known", lambda uid: uid == 65534)
    monkeypatch.setattr(identity, "_namespace", lambda: ServerUser("namespace", 65534, 65534))
    monkeypatch.setattr(os, "geteuid", lambda: 123456)
    assert identity.choose(Path("/nowhere"), Path("/bin/true")).way == "namespace"
