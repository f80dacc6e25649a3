"""Writes lines to a file descriptor from a thread, so that a slow reader never holds up the event loop."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable


class LineWriter:
    """`write` costs an append; a thread writes what has come in together.

    A reader that stops reading costs lines, neither memory nor time: beyond `limit` waiting lines new ones
    are dropped and counted, and once lines are read again, the line that `dropped_line` makes says how
    many."""

    def __init__(self, fd: int, dropped_line: Callable[[int], str], limit: int = 50_000) -> None:
        self._fd = fd
        self._dropped_line = dropped_line
        self._limit = limit
        self._lines: deque[str] = deque()
        self._awake = False
        self._wake = threading.Event()
        self._closed = False
        self._unreported = 0
        self.dropped = 0
        """Lines that were never written, in total."""
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Have a line (without its line break) written soon. Safe from any thread."""
        if len(self._lines) >= self._limit or self._closed:
            self.dropped += 1
            self._unreported += 1
            return
        self._lines.append(line)
        if not self._awake:
            self._awake = True
            self._wake.set()

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, for at most so many seconds, and end the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            # the order matters: a line appended after this is either written below or sets the event again
            self._awake = False
            self._flush()
            if self._closed and not self._lines:
                return

    def _flush(self) -> None:
        while self._lines:
            batch = [self._lines.popleft() for _ in range(min(len(self._lines), 1000))]
            if self._unreported and not self._closed:
                batch.append(self._dropped_line(self._unreported))
                self._unreported = 0
            if not self._written("\n".join(batch) + "\n"):
                self.dropped += len(batch)

    def _written(self, text: str) -> bool:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # someone made stdout non-blocking
                select.select([], [self._fd], [])
            except OSError:  # a reader that is gone must not stop the daemon
                return False
        return True
