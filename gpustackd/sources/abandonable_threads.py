"""Blocking calls in threads that may be left behind: a dead file system holds up neither loop nor exit.

anyio's worker threads are joined when the interpreter exits, so that one thread stuck in a hard NFS mount
would keep a stopped daemon alive for ever. These threads are daemons: the waiting task can be
cancelled, the thread is forgotten, and its place in the limit is given back when (if) it returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import from_thread
from anyio.lowlevel import current_token

T = TypeVar("T")


class AbandonableThreads:
    """Runs calls in daemon threads, at most `limit` of one group at a time, stuck ones included.

    A group is a mount point: when the server behind one mount is dead, its calls wait for each other and
    end in time-outs, while calls on other mounts go on.
    """

    def __init__(self, limit: int = 8) -> None:
        self._limit = limit
        self._busy: dict[str, int] = {}
        self._freed: dict[str, anyio.Event] = {}

    def busy(self, group: str) -> int:
        """Calls of this group that have not returned, abandoned ones included."""
        return self._busy.get(group, 0)

    async def run(self, call: Callable[[], T], *, group: str = "") -> T:
        """Await `call()` in a thread of its own and return its result, or raise what it raised. Cancelling
        the wait abandons the thread."""
        while self.busy(group) >= self._limit:
            await self._freed.setdefault(group, anyio.Event()).wait()
        self._busy[group] = self.busy(group) + 1
        token = current_token()
        done = anyio.Event()
        result: list[T] = []
        error: list[BaseException] = []

        def finish() -> None:
            self._busy[group] -= 1
            if not self._busy[group]:
                del self._busy[group]
            if (freed := self._freed.pop(group, None)) is not None:
                freed.set()
            done.set()

        def work() -> None:
            try:
                result.append(call())
            except BaseException as e:  # whatever it was, the waiting task raises it
                error.append(e)
            try:
                from_thread.run_sync(finish, token=token)
            except RuntimeError:
                return  # the loop is gone: nobody waits any more

        threading.Thread(target=work, daemon=True, name=f"gpustackd-read {group}").start()
        await done.wait()
        if error:
            raise error[0]
        return result[0]


def mount_of(path: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The mount point that `path` lies on, by its text alone: asking the path itself could block."""
    best = "/"
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return best
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        if len(point) > len(best) and (path == point or path.startswith(point.rstrip("/") + "/")):
            best = point
    return best
