"""The server as a process: start, wait, halt; and one that a killed parent may have left behind."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpustackd.store.embedded.binaries import EmbeddedPostgresFailed

POLL = 0.02


class Postmaster:
    """A postgres process, a child of this process throughout."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self._command = command
        self._log = log
        self._environment = environment
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        # The kernel's death signal follows the thread that forked, not the process: a pool's thread that ends
        # would end the server. This thread lives exactly as long as the server.
        threading.Thread(target=self._keep, name="postmaster", daemon=True).start()
        self._begun.wait()
        if self._failure is not None:
            raise EmbeddedPostgresFailed(f"{command[0]} cannot be run: {self._failure}")

    def _keep(self) -> None:
        try:
            with os.fdopen(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "wb") as log:
                # A session of its own: Ctrl-C in the terminal is for this process, which stops the server.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
        except OSError as error:
            self._failure = error
        finally:
            self._begun.set()
        if self._process is not None:
            self._process.wait()
        self._ended.set()

    @property
    def pid(self) -> int | None:
        """The pid; None once it has ended."""
        return self._process.pid if self._process is not None and not self._ended.is_set() else None

    def wait_until_ready(self, data: Path, timeout: float, report: Callable[[str], None]) -> None:
        """Wait until it takes connections, as pg_ctl does: by the last line of its pid file."""
        assert self._process is not None
        started, next_report = time.monotonic(), 2.0
        while True:
            lines = pid_file(data)
            if len(lines) >= 8 and lines[0] == str(self._process.pid) and lines[7] == "ready":
                return
            waited = time.monotonic() - started
            if self._ended.is_set():
                raise EmbeddedPostgresFailed(f"PostgreSQL ended as it started: {last_words(self._log)}")
            if waited > timeout:
                raise EmbeddedPostgresFailed(
                    f"PostgreSQL on {data} is not ready after {timeout:.0f} s: {last_words(self._log)}",
                    f"is the machine very busy? its log is {self._log}",
                )
            if waited > next_report:
                next_report += 5.0
                report(f"waiting for PostgreSQL on {data} to start ({waited:.0f} of {timeout:.0f} s)")
            time.sleep(POLL)

    def halt(self, how: signal.Signals) -> None:
        """Stop it and wait. SIGINT: a fast shutdown, SIGQUIT: an immediate one; SIGKILL if it hangs."""
        assert self._process is not None
        for number, patience in ((how, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            if self._ended.wait(patience):
                return


def pid_file(data: Path) -> list[str]:
    """The lines of postmaster.pid: pid, data, start, port, socket folder, address, shared memory, status."""
    try:
        return [line.strip() for line in (data / "postmaster.pid").read_text().splitlines()]
    except OSError:
        return []


def postmaster_of(data: Path) -> int | None:
    """The process that serves `data` now, if there is one."""
    lines = pid_file(data)
    if not lines or not lines[0].lstrip("-").isdigit():
        return None
    pid = abs(int(lines[0]))
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    # The pid may belong to another process by now; its working folder tells, if it can be read.
    try:
        return pid if Path(f"/proc/{pid}/cwd").samefile(data) else None
    except FileNotFoundError:
        return None if Path("/proc/self").exists() else pid
    except OSError:
        return pid


def await_predecessor(data: Path, patience: float, report: Callable[[str], None]) -> int | None:
    """Wait for a server that shuts down because its parent died; its pid if it does not end in time."""
    started, next_report = time.monotonic(), 1.0
    while (pid := postmaster_of(data)) is not None:
        waited = time.monotonic() - started
        if waited > patience:
            return pid
        if waited > next_report:
            next_report += 5.0
            report(f"waiting for an earlier PostgreSQL on {data} to end (process {pid})")
        time.sleep(POLL)
    return None


def end_orphans(data: Path, patience: float = 10.0) -> None:
    """End backends that a killed postmaster left: a busy one does not notice, and no new server may start.

    Only for a folder that this process has locked and that has no postmaster.
    """
    deadline = time.monotonic() + patience
    while (orphans := _backends_of(data)) and time.monotonic() < deadline:
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGQUIT)
        time.sleep(POLL)


def _backends_of(data: Path) -> list[int]:
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if (entry / "exe").readlink().name.startswith("postgres") and (entry / "cwd").samefile(data):
                pids.append(int(entry.name))
    return pids


def last_words(log: Path) -> str:
    """The last lines of the log, as one line."""
    try:
        return " / ".join(log.read_text(errors="replace").strip().splitlines()[-4:]) or "its log is empty"
    except OSError:
        return "it wrote no log"
