"""Daemons as real processes: started, observed by their logs, killed, stopped, and never left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from anyio.abc import Process, TaskGroup
from anyio.streams.text import TextReceiveStream

from gpustackd.errors import GpustackdError
from gpustackd.store.embedded.identity import ServerUser

if TYPE_CHECKING:
    from io import TextIOWrapper

START_PATIENCE = 60.0
STOP_PATIENCE = 15.0
_FOREIGN = ("GPUSTACKD_", "GPUSTACK_", "PG")


class DaemonProcess:
    """One daemon. Its log goes to a file; `events` counts the events in it."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.events: Counter[str] = Counter()
        self.on_event: Callable[[DaemonProcess, str], None] = lambda daemon, event: None
        """Called with each event as it is read."""
        self.started = anyio.Event()
        self.ended = anyio.Event()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.returncode is None

    async def listen(self) -> None:
        """Read its log until it ends."""
        with self.log.open("w") as file:
            await self._read(file)
        await self.process.wait()
        self.ended.set()

    async def _read(self, file: TextIOWrapper) -> None:
        assert self.process.stdout is not None
        rest = ""
        async for text in TextReceiveStream(self.process.stdout, errors="replace"):
            file.write(text)
            file.flush()
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                self._note(line)

    def _note(self, line: str) -> None:
        try:
            event = json.loads(line).get("event", "")
        except (ValueError, AttributeError):
            return  # not every line is ours
        self.events[event] += 1
        self.on_event(self, event)
        if event == "daemon.started":
            self.started.set()

    async def ready(self) -> None:
        """Wait until it has started. Raise GpustackdError where it ends before, or takes too long."""
        with anyio.move_on_after(START_PATIENCE):
            async with anyio.create_task_group() as group:
                for event in (self.started, self.ended):
                    group.start_soon(_first, event, group)
        if not self.started.is_set():
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-8:])
            what = f"ended with {self.process.returncode}" if not self.running else "did not start in time"
            raise GpustackdError(f"{self.name} {what}:\n{tail}")

    def kill(self) -> None:
        """SIGKILL: no chance to hand anything back."""
        if self.running:
            self.process.kill()

    async def stop(self) -> int | None:
        """SIGTERM, as a service manager does it; its exit code, or None where it had to be killed."""
        if self.running:
            self.process.terminate()
        with anyio.move_on_after(STOP_PATIENCE):
            await self.process.wait()
            return self.process.returncode
        self.process.kill()
        return None


async def _first(event: anyio.Event, group: TaskGroup) -> None:
    await event.wait()
    group.cancel_scope.cancel()


class KillFirstToWork:
    """Kills the first of the daemons that logs that it works on an instance, at once."""

    def __init__(self, among: Sequence[DaemonProcess], patience: float) -> None:
        self._patience = patience
        self._victim: DaemonProcess | None = None
        self._dead = anyio.Event()
        for daemon in among:
            daemon.on_event = self._heard

    def _heard(self, daemon: DaemonProcess, event: str) -> None:
        if event == "instance.analyzing" and self._victim is None:
            self._victim = daemon
            daemon.kill()
            self._dead.set()

    async def sprung(self) -> DaemonProcess:
        """The daemon that was killed, once it has ended. Raise GpustackdError where none was."""
        with anyio.move_on_after(self._patience):
            await self._dead.wait()
        if self._victim is None:
            raise GpustackdError(
                f"no daemon took up the burst within {self._patience:.0f} s",
                "look into the logs of the daemons",
            )
        await self._victim.ended.wait()
        return self._victim


@asynccontextmanager
async def daemons(
    count: int, directory: Path, settings: Mapping[str, str]
) -> AsyncIterator[list[DaemonProcess]]:
    """`count` daemons on one database, started but not yet `ready`. However this ends, none is left behind.

    `settings` are variables of their environment; variables of this process that would lead them elsewhere
    are not passed on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)} | dict(settings)
    processes: list[DaemonProcess] = []
    async with anyio.create_task_group() as group:
        try:
            for n in range(1, count + 1):
                name = f"replica-{n}"
                # tied to our life by the kernel: killed as we may be, they go too
                command = ServerUser("same").command(
                    Path(sys.executable), "-m", "gpustackd", "run", "--replica", name, "--http", "off",
                    "--log-format", "json", death_signal=signal.SIGTERM,
                )  # fmt: skip
                process = await anyio.open_process(command, env=environment, stderr=-2, stdin=None)
                processes.append(DaemonProcess(name, process, directory / f"{name}.log"))
                group.start_soon(processes[-1].listen)
            yield processes
        finally:
            for daemon in processes:
                daemon.kill()
            with anyio.move_on_after(STOP_PATIENCE, shield=True):
                for daemon in processes:
                    await daemon.process.wait()
            group.cancel_scope.cancel()
