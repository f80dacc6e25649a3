"""One daemon as a process: heard line by line, signalled, looked at from outside."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from tests.waiting import PATIENCE, soon, until

_TICK = os.sysconf("SC_CLK_TCK")
_SAMPLE = re.compile(r"^([a-zA-Z_:][^#\n]*?) ([-+0-9.eE]+|NaN)$", re.MULTILINE)


START = 120.0
"""Seconds for a process to come up."""


class Line(dict[str, Any]):
    """One line of a log: its fields, and its place among all lines of that log."""

    number = 0


class Daemon:
    """One process. Its log is read by waiting for a line (`logged`), up to a line that came (`before`), or as
    a whole once the process has ended (`whole`, `tally`, `faults`): there is no reading of it "so far"."""

    def __init__(self, name: str, process: Process, log: Path, keep: int | None) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.ended = anyio.Event()
        """Set when the process is gone and all that it wrote has been read."""
        self._lines: deque[Line] = deque(maxlen=keep)
        self._events: Counter[str] = Counter()
        self._faults: list[str] = []
        self._news = anyio.Event()

    # -- its log --------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Read its output until it ends."""
        assert self.process.stdout is not None
        rest = ""
        with self.log.open("a") as file:
            async for text in TextReceiveStream(self.process.stdout, errors="replace"):
                file.write(text)
                file.flush()
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
            line = Line(json.loads(text))
            event = str(line["event"])
        except (ValueError, KeyError, TypeError):
            if text.strip() and not _announcement(text):
                self._faults.append(text)
            return
        self._events[event] += 1
        line.number = self._events.total()
        self._lines.append(line)
        if event in {"daemon.error", "http.error"} or "exception" in line or "Traceback" in text:
            self._faults.append(text)

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def _matching(self, events: Collection[str], fields: dict[str, Any]) -> list[Line]:
        return [
            line
            for line in self._lines
            if line["event"] in events and all(_is(line.get(k), v) for k, v in fields.items())
        ]

    async def logged(
        self,
        *events: str,
        times: int = 1,
        after: Line | None = None,
        timeout: float = PATIENCE,
        **fields: Any,
    ) -> Line:
        """Wait for a line of one of these events with these fields (values, or patterns found in them): the
        `times`-th since its start, or since the line `after`. Raise AssertionError where none comes in time,
        or the process ends first."""
        wanted = " or ".join(events) + "".join(f" {k}={v!r}" for k, v in fields.items())
        since = after.number if after else 0
        with anyio.move_on_after(timeout):
            while True:
                found = [line for line in self._matching(events, fields) if line.number > since]
                if len(found) >= times:
                    return found[times - 1]
                news = self._news
                assert not self.ended.is_set(), f"{self.name} ended before {wanted}:\n{self.last_words()}"
                await news.wait()
        raise AssertionError(f"{self.name}: no {wanted} in {timeout:.0f} s:\n{self.last_words()}")

    def before(self, mark: Line, event: str, **fields: Any) -> list[Line]:
        """Lines of this event that came before the line `mark`: no more of them can come."""
        return [line for line in self._matching((event,), fields) if line.number < mark.number]

    def latest(self) -> Line | None:
        """The last line that was read: where to look from for what comes `after`."""
        return self._lines[-1] if self._lines else None

    def whole(self, event: str, **fields: Any) -> list[Line]:
        """All lines of this event, of a process that has ended."""
        self._over()
        return self._matching((event,), fields)

    def tally(self) -> Counter[str]:
        """How often it logged each event, of a process that has ended."""
        self._over()
        return self._events

    def faults(self) -> list[str]:
        """What should never be in a log, of a process that has ended: `daemon.error`, a traceback, words that
        are no log line."""
        self._over()
        return self._faults

    def _over(self) -> None:
        assert self.ended.is_set(), f"{self.name} still runs: its log is not whole, stop it first"

    def last_words(self, count: int = 20) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])

    # -- its life -------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def ready(self) -> None:
        """Wait until it has looked at all rows once and hears notifications."""
        await self.logged("rescan.done", timeout=START)
        await self.logged("listen.started", timeout=START)

    @property
    def is_ready(self) -> bool:
        """Whether it was seen to be ready. For choosing among daemons, not for waiting."""
        return self._events["rescan.done"] > 0 and self._events["listen.started"] > 0

    def signal(self, number: signal.Signals) -> None:
        """SIGTERM, SIGSTOP, SIGCONT, …: to this process id alone."""
        if self.running:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.gone()

    async def gone(self, timeout: float = PATIENCE) -> int:
        """Wait for its end; the exit code."""
        with anyio.move_on_after(timeout):
            await self.ended.wait()
            code = self.process.returncode
            assert code is not None
            return code
        raise AssertionError(f"{self.name} did not end in {timeout:.0f} s:\n{self.last_words()}")

    async def stop(self, timeout: float = PATIENCE) -> int:
        """SIGTERM, as a service manager does it; the exit code."""
        self.signal(signal.SIGTERM)
        return await self.gone(timeout)

    # -- looking at it from outside ----------------------------------------------------------------------

    async def get(self, path: str, timeout: float = PATIENCE) -> tuple[int, str]:
        """One HTTP GET, once it serves: status and body."""
        started = await self.logged("daemon.started", timeout=START)
        host, _, port = str(started["http"]).rpartition(":")
        return await soon(_get(host, int(port), path), f"{self.name} answers GET {path}", timeout)

    async def readiness(self, status: int) -> dict[str, Any]:
        """Wait until `/readyz` answers with this status; its details."""

        async def there() -> str:
            found, body = await self.get("/readyz")
            return body if found == status else ""

        body = await until(there, f"{self.name}: /readyz says {status}", shows=self.last_words)
        details: dict[str, Any] = json.loads(body)
        return details

    async def metric(
        self, name: str, wanted: float | Callable[[float], bool], timeout: float = PATIENCE
    ) -> float:
        """Wait until a metric, `name` or `name{label="value"}`, is this number or fulfils this; its value."""
        seen: list[float] = []

        async def there() -> bool:
            _, body = await self.get("/metrics")
            samples = {m[1]: float(m[2]) for m in _SAMPLE.finditer(body)}
            assert name in samples, f"{self.name} has no metric {name}; it has {sorted(samples)}"
            seen.append(samples[name])
            return wanted(seen[-1]) if callable(wanted) else seen[-1] == wanted

        is_ = "is as wanted" if callable(wanted) else f"is {wanted:g}"
        await until(
            there,
            f"{self.name}: {name} {is_}",
            timeout,
            lambda: f"it is {seen[-1:]}; the log ends:\n{self.last_words()}",
        )
        return seen[-1]

    async def metric_now(self, name: str) -> float:
        """What a metric has come to: the base that a later `metric` is compared with."""
        return await self.metric(name, lambda _: True)

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


async def _get(host: str, port: int, path: str) -> tuple[int, str]:
    async with await anyio.connect_tcp(host, port) as stream:
        await stream.send(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        async for chunk in stream:
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def _is(value: Any, wanted: Any) -> bool:
    return bool(wanted.search(str(value))) if isinstance(wanted, re.Pattern) else bool(value == wanted)


def _announcement(text: str) -> bool:
    return text.startswith("PostgreSQL runs in") or text.lstrip().startswith(("psql ", "/"))
