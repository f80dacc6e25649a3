"""One PostgreSQL server: initialised once, started and stopped."""

import atexit
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO
from urllib.parse import quote, urlencode

import anyio
import anyio.to_thread

from gpustackd.store.embedded.binaries import EmbeddedPostgresFailed, find_binaries
from gpustackd.store.embedded.identity import ServerUser, choose
from gpustackd.store.embedded.postmaster import Postmaster, await_predecessor, end_orphans

Setting = str | int | float | bool

USER = "gpustackd"
PORT = 5432
"""Part of the socket's name alone: nothing listens on TCP."""
SOCKET_PATH_LIMIT = 107
LONGEST_SOCKET = ".s.PGSQL.65535"
PREDECESSOR_PATIENCE = 15.0
_ANOTHER_FOLDER = "make room there, or name another folder: run --embedded DIR"


class AlreadyRunning(EmbeddedPostgresFailed):
    """Another process serves this folder; `pid` is its postmaster if known."""

    def __init__(self, folder: Path, pid: int | None) -> None:
        which = f" (process {pid})" if pid else ""
        super().__init__(
            f"a PostgreSQL already runs on {folder}{which}",
            "stop it, name another folder, or connect to it with GPUSTACKD_DATABASE_URL",
        )
        self.pid = pid


class EmbeddedPostgres:
    """A PostgreSQL server with its data in `folder`, which ends with this process.

    `with EmbeddedPostgres(folder) as server: … server.url()`, `async with` alike, or `start()` and `stop()`.
    Reached only through a socket in a folder that only this user may enter. Started again on the same folder,
    it serves the same data.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        settings: Mapping[str, Setting] | None = None,
        bin_dir: Path | str | None = None,
        timeout: float = 60.0,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.data = self.folder / "data"
        self.log = self.folder / "postgres.log"
        self.settings = dict(settings or {})
        self.binaries = find_binaries(bin_dir)
        self.timeout = timeout
        self._report = report or (lambda text: print(text, file=sys.stderr, flush=True))
        self._postmaster: Postmaster | None = None
        self._lock: TextIO | None = None
        self._short_sockets: Path | None = None

    # --- how to reach it ----------------------------------------------------------------------------------

    @property
    def sockets(self) -> Path:
        """The socket's folder: in `folder`, or a private temporary one where that path is too long."""
        inside = self.folder / "socket"
        if len(os.fsencode(inside / LONGEST_SOCKET)) < SOCKET_PATH_LIMIT:
            return inside
        if self._short_sockets is None:
            self._short_sockets = Path(tempfile.mkdtemp(prefix="gpustackd-"))
        return self._short_sockets

    def url(self, database: str = USER) -> str:
        """A libpq-style URL through the socket, without a password: nobody else can reach the socket."""
        place = urlencode({"host": str(self.sockets), "port": PORT}, safe="/")
        return f"postgresql://{USER}@/{quote(database)}?{place}"

    def psql(self, database: str = USER) -> str:
        """The command that opens a client."""
        return f"{self.binaries.psql or 'psql'} '{self.url(database)}'"

    @property
    def pid(self) -> int | None:
        """The server's pid; None while it does not run."""
        return self._postmaster.pid if self._postmaster is not None else None

    # --- its life -----------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Start the server and wait until it accepts connections; a new folder is initialised first.

        Raises EmbeddedPostgresFailed.
        """
        if self.pid is not None:
            return self
        self._halt(signal.SIGQUIT)  # releases one that died by itself
        self._take_folder()
        try:
            identity = choose(self.data, self.binaries.postgres)
            if pid := await_predecessor(self.data, PREDECESSOR_PATIENCE, self._report):
                raise AlreadyRunning(self.folder, pid)
            end_orphans(self.data)
            if not (self.data / "PG_VERSION").exists():
                self._initialise(identity)
            self._launch(identity)
        except BaseException:
            self.stop(signal.SIGQUIT)
            raise
        atexit.register(self.stop)
        return self

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server by a fast shutdown: connections are closed and data written."""
        self._halt(how)
        if self._short_sockets is not None:
            shutil.rmtree(self._short_sockets, ignore_errors=True)
            self._short_sockets = None

    def _halt(self, how: signal.Signals) -> None:
        atexit.unregister(self.stop)
        if self._postmaster is not None:
            self._postmaster.halt(how)
            self._postmaster = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        try:
            return await anyio.to_thread.run_sync(self.start)
        except BaseException:  # cancelled while it started: __aexit__ will not be called
            self.stop(signal.SIGQUIT)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.stop)

    # --- steps of a start ---------------------------------------------------------------------------------

    def _take_folder(self) -> None:
        """Lock the folder for this process; the kernel releases the lock if the process is killed."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        except OSError as error:
            raise EmbeddedPostgresFailed(
                f"{self.folder} cannot be used: {error.strerror}", _ANOTHER_FOLDER
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise AlreadyRunning(self.folder, await_predecessor(self.data, 0, self._report)) from None
        self._lock = lock

    def _initialise(self, identity: ServerUser) -> None:
        """initdb in a folder beside the final one, so that an interrupted start leaves nothing incomplete."""
        self._report(f"initialising PostgreSQL in {self.folder}")
        draft = self.folder / "data.new"
        for path in (draft, self.data):  # a data folder without PG_VERSION holds no data
            shutil.rmtree(path, ignore_errors=True)
        try:
            self._make(identity, draft)
            draft.rename(self.data)
        except OSError as error:
            raise EmbeddedPostgresFailed(
                f"{self.folder} cannot be written to: {error.strerror or error}", _ANOTHER_FOLDER
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # an incomplete folder takes no space

    def _make(self, identity: ServerUser, draft: Path) -> None:
        draft.mkdir(mode=0o700)
        identity.give(draft)
        command = [
            f"--pgdata={draft}",
            f"--username={USER}",
            "--encoding=UTF8",
            "--locale=C",
        ]
        # the socket is behind a closed folder, loopback is open to every user of the machine
        command += ["--auth-local=trust", "--auth-host=reject"]
        if self.settings.get("fsync") in (False, "off"):
            command.append("--no-sync")
        self._run(identity, "initdb", *command)
        self._run(
            identity, "postgres", "--single", "-D", str(draft), "postgres", said=f"CREATE DATABASE {USER}\n"
        )

    def _launch(self, identity: ServerUser) -> None:
        self.sockets.mkdir(mode=0o700, exist_ok=True)
        self.log.touch(mode=0o600)
        for path in (self.sockets, self.log):
            identity.give(path)
        settings: dict[str, Setting] = {
            "port": PORT,
            "listen_addresses": "",
            "unix_socket_directories": str(self.sockets).replace(",", "\\,"),
            "unix_socket_permissions": "0700",
            "logging_collector": False,
            **self.settings,
        }
        arguments = [f"-c{name}={_text(value)}" for name, value in settings.items()]
        # SIGINT when this process dies: a fast shutdown, so that even a killed parent leaves clean data
        command = identity.command(
            self.binaries.postgres, "-D", str(self.data), *arguments, death_signal=signal.SIGINT
        )
        self._postmaster = Postmaster(command, self.log, _environment())
        self._postmaster.wait_until_ready(self.data, self.timeout, self._report)

    def _run(self, identity: ServerUser, program: str, *arguments: str, said: str = "") -> None:
        command = identity.command(self.binaries.folder / program, *arguments, death_signal=signal.SIGINT)
        result = subprocess.run(
            command, input=said, capture_output=True, text=True, env=_environment(), check=False
        )
        if result.returncode:
            words = (result.stderr.strip() or result.stdout.strip()).replace("\n", " / ")
            raise EmbeddedPostgresFailed(f"{program} failed: {words}", _ANOTHER_FOLDER)


def _text(value: Setting) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _environment() -> dict[str, str]:
    """This process's environment without PG* variables, which would redirect PostgreSQL's programs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
