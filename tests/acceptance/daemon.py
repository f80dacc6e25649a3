"""One daemon as a process: heard line by line, signalled, looked at from outside."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

Line = dict[str, Any]

_TICK = os.sysconf("SC_CLK_TCK")


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
        code = await self.process.wait()
        if rest and code != -signal.SIGKILL:  # who is killed may be cut short in the middle of a line
            self._note(rest)
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
