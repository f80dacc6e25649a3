"""Daemons as real processes: started as people start them, heard by their logs, signalled, always reaped."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.text import TextReceiveStream

from gpustackd.store.embedded.identity import Identity

Line = dict[str, Any]

_FOREIGN = (
    "GPUSTACKD_", "GPUSTACK_", "PG", "HF_", "NOTIFY_SOCKET", "WATCHDOG_", "PYTHONDONTWRITEBYTECODE"
)  # fmt: skip
_STRETCH = float(os.environ.get("GPUSTACKD_TEST_PATIENCE", "6"))
_TICK = os.sysconf("SC_CLK_TCK")


def within(seconds: float) -> float:
    """How long a test waits for what the contract promises within `seconds`: this machine may be busy. Where
    it matters, rescans and leases are set far beyond it, so that only what is tested can explain success."""
    return seconds * _STRETCH


class Daemon:
    """One process. `lines` holds what it logged, `events` counts it, `strays` is what was no log line."""

    def __init__(self, name: str, process: Process, log: Path, keep: int | None) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.lines: deque[Line] = deque(maxlen=keep)
        self.events: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ended = anyio.Event()
        self._address = ""
        self._news = anyio.Event()

    # -- hearing --------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Read its output until it ends."""
        assert self.process.stdout is not None
        rest = ""
        with self.log.open("a") as file:
            async for text in TextReceiveStream(self.process.stdout, errors="replace"):
                file.write(text)
                *whole, rest = (rest + text).split("\n")
                for line in whole:
                    self._note(line)
                self._tell()
        if rest:
            self._note(rest)
        await self.process.wait()
        self.ended.set()
        self._tell()

    def _note(self, text: str) -> None:
        try:
            line = json.loads(text)
            event = str(line["event"])
        except (ValueError, KeyError, TypeError):
            if text.strip() and not _announcement(text):
                self.faults.append(text)
            return
        self.lines.append(line)
        self.events[event] += 1
        if event == "daemon.started":
            self._address = str(line.get("http", ""))
        if event in {"daemon.error", "http.error"} or "exception" in line or "Traceback" in text:
            self.faults.append(text)

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def told(self, event: str, **fields: Any) -> list[Line]:
        """Lines of this event with these fields, so far."""
        return [
            line
            for line in list(self.lines)
            if line["event"] == event and all(line.get(k) == v for k, v in fields.items())
        ]

    async def until(self, true: Callable[[], bool], what: str, patience: float = 60.0) -> None:
        """Wait until its output makes `true` so. Raise AssertionError where that does not happen in time, or
        the process ends first."""
        with anyio.move_on_after(patience):
            while not true():
                news = self._news
                if self.ended.is_set():
                    raise AssertionError(f"{self.name} ended before {what}:\n{self.last_words()}")
                await news.wait()
            return
        raise AssertionError(f"{self.name}: no {what} in {patience:.0f} s:\n{self.last_words()}")

    async def said(self, event: str, times: int = 1, patience: float = 60.0, **fields: Any) -> Line:
        """Wait until it has logged an event so often since its start; returns the last of them."""
        await self.until(lambda: len(self.told(event, **fields)) >= times, event, patience)
        return self.told(event, **fields)[times - 1]

    def count(self, event: str) -> int:
        return self.events[event]

    def last_words(self, count: int = 15) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    # -- its life -------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def ready(self, patience: float = 90.0) -> None:
        """Wait until it has looked at all rows once and hears notifications."""
        await self.until(
            lambda: self.events["rescan.done"] > 0 and self.events["listen.started"] > 0,
            "readiness",
            patience,
        )

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM, SIGSTOP, SIGCONT, …: to this process id alone."""
        if self.running:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.gone()

    async def gone(self, patience: float = 30.0) -> int:
        """Wait for its end; the exit code."""
        with anyio.move_on_after(patience):
            await self.ended.wait()
            code = self.process.returncode
            assert code is not None
            return code
        raise AssertionError(f"{self.name} does not end:\n{self.last_words()}")

    async def stop(self, patience: float = 30.0) -> int:
        """SIGTERM, as a service manager does it; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.gone(patience)

    # -- looking at it from outside ----------------------------------------------------------------------

    async def get(self, path: str, patience: float = 10.0) -> tuple[int, str]:
        """One HTTP GET: status and body."""
        host, _, port = self._address.rpartition(":")
        with anyio.fail_after(patience):
            async with await anyio.connect_tcp(host, int(port)) as stream:
                await stream.send(
                    f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                answer = b""
                async for chunk in stream:
                    answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), body.decode()

    async def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status and details of `/readyz`."""
        status, body = await self.get("/readyz")
        found: dict[str, Any] = json.loads(body)
        return status, found

    async def metrics(self) -> dict[str, float]:
        """`name{labels}` -> value."""
        _, body = await self.get("/metrics")
        return {
            m[1]: float(m[2])
            for m in re.finditer(r"^([a-zA-Z_:][^#\n]*?) ([-+0-9.eE]+|NaN)$", body, re.MULTILINE)
        }

    def cpu_seconds(self) -> float:
        """Processor time used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK

    def rss(self) -> int:
        """Bytes of memory that it occupies."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def bytes_read(self) -> int:
        """Bytes that it has read from files and sockets."""
        return int(Path(f"/proc/{self.pid}/io").read_text().split()[1])


def _announcement(text: str) -> bool:
    return text.startswith("PostgreSQL runs in") or text.lstrip().startswith(("psql ", "/"))


class Crew:
    """Daemons on one database. Iterating gives those that run."""

    def __init__(
        self, url: str, folder: Path, tasks: TaskGroup, environment: dict[str, str], keep: int | None
    ) -> None:
        self.all: list[Daemon] = []
        """Every process that was ever started here."""
        self._url = url
        self._folder = folder
        self._tasks = tasks
        self._environment = environment
        self._keep = keep
        self._names = 0

    def __iter__(self) -> Iterator[Daemon]:
        return iter([d for d in self.all if d.running])

    async def start(self, count: int = 1, *, ready: bool = True, **settings: Any) -> list[Daemon]:
        """More daemons; `settings` as keywords (`lease=2`), `url` another database, `name` a name."""
        made = [await self.launch(**settings) for _ in range(count)]
        if ready:
            for daemon in made:
                await daemon.ready()
        return made

    async def launch(self, *arguments: str, name: str = "", url: str = "", **settings: Any) -> Daemon:
        """One process of `gpustackd run`, not awaited."""
        self._names += 1
        name = name or f"replica-{self._names}"
        environment = {
            **clean_environment(),
            "GPUSTACKD_DATABASE_URL": url or self._url,
            "GPUSTACKD_REPLICA": name,
            "GPUSTACKD_HTTP": "127.0.0.1:0",
            "GPUSTACKD_LOG_FORMAT": "json",
            "XDG_CACHE_HOME": str(self._folder / "cache"),
            **self._environment,
            **variables(settings),
        }
        process = await anyio.open_process(
            command("run", *arguments), env=environment, stderr=-2, stdin=-3, start_new_session=True
        )
        daemon = Daemon(name, process, self._folder / f"{name}.log", self._keep)
        self.all.append(daemon)
        self._tasks.start_soon(daemon.listen)
        return daemon

    def count(self, event: str) -> int:
        """How often all of them together said it."""
        return sum(d.events[event] for d in self.all)

    def faults(self) -> list[str]:
        """What should never be in a log: `daemon.error`, a traceback, words that are no log line."""
        return [f"{d.name}: {text}" for d in self.all for text in d.faults]

    async def reap(self) -> None:
        """End whatever is left, stopped processes too."""
        for daemon in self.all:
            daemon.signal(signal.SIGKILL)
        for daemon in self.all:
            await daemon.ended.wait()


@asynccontextmanager
async def crew(
    url: str, folder: Path, *, keep: int | None = None, forgiving: bool = False, **settings: Any
) -> AsyncIterator[Crew]:
    """Daemons on `url` with these settings. Whatever happens, none is left when this ends; unless
    `forgiving`, a fault in any log fails the test. `keep`: lines remembered of each daemon (None = all)."""
    folder.mkdir(parents=True, exist_ok=True)
    async with anyio.create_task_group() as tasks:
        made = Crew(url, folder, tasks, variables(settings), keep)
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.reap()
    if not forgiving:
        assert made.faults() == [], "\n".join(made.faults()[:10])


def variables(settings: dict[str, Any]) -> dict[str, str]:
    """Settings as environment variables: `lease` is GPUSTACKD_LEASE, upper-case names stand as they are."""
    return {k if k.isupper() else f"GPUSTACKD_{k.upper()}": str(v) for k, v in settings.items()}


def clean_environment() -> dict[str, str]:
    """Ours, without what would lead a daemon elsewhere."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return {**ours, "PYTHONPYCACHEPREFIX": _compiled()}


@cache
def _compiled() -> str:
    """A folder for compiled modules; where the environment forbids them, compiling is most of a start."""
    folder = tempfile.mkdtemp(prefix="gpustackd-test-pyc-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def command(*arguments: str) -> list[str]:
    """`gpustackd …`, tied to our life by the kernel: killed as we may be, it goes too."""
    return Identity("same").command(
        Path(sys.executable), "-m", "gpustackd", *arguments, death_signal=signal.SIGKILL
    )


async def gpustackd(
    url: str, *arguments: str, patience: float = 90.0, said: bytes = b""
) -> tuple[int, str, str]:
    """Run another command to its end: exit code, standard output, standard error."""
    environment = {**clean_environment(), "GPUSTACKD_DATABASE_URL": url}
    with anyio.fail_after(patience):
        done = await anyio.run_process(command(*arguments), input=said, env=environment, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()
