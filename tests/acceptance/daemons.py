"""Daemons as real processes: started as people start them, heard by their logs, signalled, always reaped."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from gpustackd.store.embedded.identity import ServerUser
from tests.acceptance.daemon import START, Daemon, Line
from tests.waiting import soon

__all__ = [
    "Crew",
    "Daemon",
    "Line",
    "clean_environment",
    "command",
    "crew",
    "gpustackd",
    "variables",
    "within",
]

_FOREIGN = (
    "GPUSTACKD_", "GPUSTACK_", "PG", "HF_", "NOTIFY_SOCKET", "WATCHDOG_", "PYTHONDONTWRITEBYTECODE"
)  # fmt: skip
_STRETCH = float(os.environ.get("GPUSTACKD_TEST_PATIENCE", "6"))
_LEAST = 5 * _STRETCH
"""Seconds that a busy machine may need for anything."""


def within(seconds: float) -> float:
    """How long a test waits for what the contract promises within `seconds`: this machine may be busy. Where
    it matters, rescans and leases are set far beyond it, so that only what is tested can explain success."""
    return max(_LEAST, seconds * _STRETCH)


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

    async def stop(self) -> None:
        """Stop all that run, as a service manager does it: then their logs are whole."""
        running = list(self)
        for daemon in running:
            daemon.signal(signal.SIGTERM)
        assert [await daemon.gone() for daemon in running] == [0] * len(running)

    def whole(self, event: str, **fields: Any) -> list[Line]:
        """All lines of this event that any of them logged; all have ended."""
        return [line for d in self.all for line in d.whole(event, **fields)]

    def tally(self) -> Counter[str]:
        """How often they logged each event; all have ended."""
        return sum((d.tally() for d in self.all), Counter())

    def faults(self) -> list[str]:
        """What should never be in a log: `daemon.error`, a traceback, words that are no log line; all have
        ended."""
        return [f"{d.name}: {text}" for d in self.all for text in d.faults()]

    async def reap(self) -> None:
        """End whatever is left, stopped processes too."""
        for daemon in self.all:
            daemon.signal(signal.SIGKILL)
        for daemon in self.all:
            await daemon.ended.wait()


@asynccontextmanager
async def crew(
    url: str,
    folder: Path,
    *,
    keep: int | None = None,
    forgiving: bool = False,
    excuse: str = "",
    **settings: Any,
) -> AsyncIterator[Crew]:
    """Daemons on `url` with these settings. Whatever happens, none is left when this ends; unless
    `forgiving`, a fault in any log fails the test, but for those that match `excuse`. `keep`: lines
    remembered of each daemon (None = all)."""
    folder.mkdir(parents=True, exist_ok=True)
    async with anyio.create_task_group() as tasks:
        made = Crew(url, folder, tasks, variables(settings), keep)
        try:
            yield made
        finally:
            with anyio.CancelScope(shield=True):
                await made.reap()
    faults = [f for f in made.faults() if not (excuse and re.search(excuse, f))]
    if not forgiving:
        assert faults == [], "\n".join(faults[:10])


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
    return ServerUser("same").command(
        Path(sys.executable), "-m", "gpustackd", *arguments, death_signal=signal.SIGKILL
    )


async def gpustackd(
    url: str, *arguments: str, timeout: float = START, said: bytes = b""
) -> tuple[int, str, str]:
    """Run another command to its end: exit code, standard output, standard error."""
    environment = {**clean_environment(), "GPUSTACKD_DATABASE_URL": url}
    running = anyio.run_process(command(*arguments), input=said, env=environment, check=False)
    done = await soon(running, f"gpustackd {' '.join(arguments)} ends", timeout)
    return done.returncode, done.stdout.decode(), done.stderr.decode()
