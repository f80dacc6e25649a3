"""Tells systemd how the daemon is: ready, alive, stopping. Silent where no systemd asked."""

import contextlib
import os
import socket
import time
from collections.abc import Callable, MutableMapping
from typing import Self

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus


class Systemd:
    """The service manager's socket, or nothing.

    `watchdog_interval`: for how many seconds it waits for a sign of life before it restarts us; None without
    `WatchdogSec=`.
    """

    def __init__(
        self,
        address: str | None = None,
        watchdog_interval: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = _socket_address(address)
        self.watchdog_interval = watchdog_interval if self._address is not None else None
        self._clock = clock
        self._last_sign = float("-inf")
        self._last_status = ""

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Take the socket and the interval from the environment; children are not to speak for us."""
        address = environment.pop("NOTIFY_SOCKET", None)
        microseconds = environment.pop("WATCHDOG_USEC", "")
        process = environment.pop("WATCHDOG_PID", "")
        ours = not process or process == str(os.getpid())
        interval = (
            int(microseconds) / 1e6 if ours and microseconds.isdigit() and int(microseconds) > 0 else None
        )
        return cls(address, interval)

    @property
    def listening(self) -> bool:
        """Whether anybody asked to be told."""
        return self._address is not None

    def ready(self, status: str = "") -> None:
        """Started: units that wait for this one may go on."""
        self._send("READY=1", _status(status))

    def stopping(self, status: str = "") -> None:
        """On the way out; the stop timeout runs, the watchdog no longer does."""
        self._send("STOPPING=1", _status(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`; the same line again is not sent."""
        if text != self._last_status:
            self._last_status = text
            self._send(_status(text))

    def alive(self) -> None:
        """A sign of life; sent four times per interval at most."""
        if self.watchdog_interval is None:
            return
        now = self._clock()
        if now - self._last_sign >= self.watchdog_interval / 4:
            self._last_sign = now
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        # Neither a missing nor a busy service manager may hold up the daemon.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            channel.sendto("\n".join(filter(None, lines)).encode(), self._address)


def _socket_address(name: str | None) -> str | None:
    """A path or, with a leading @, a name in the abstract namespace; other kinds of address are not ours."""
    if name and name[0] == "@":
        return "\0" + name[1:]
    return name if name and name[0] == "/" else None


def _status(text: str) -> str:
    return "STATUS=" + " ".join(text.split()) if text else ""


class Watchdog:
    """Signs of life for systemd, for as long as the decide loop makes its turns."""

    name = "watchdog"

    def __init__(self, systemd: Systemd, alive: Callable[[], bool]) -> None:
        self._systemd = systemd
        self._alive = alive

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled; returns at once where systemd does not ask for it."""
        task_status.started()
        interval = self._systemd.watchdog_interval
        while interval is not None:
            if self._alive():
                self._systemd.alive()
            await anyio.sleep(interval / 3)
