"""Writes lines to a file descriptor from a thread, so that a slow reader never holds up the event loop."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable


class LineWriter:
    """`write` costs an append; the thread joins what has come in and writes it at once.

    A reader that stops reading costs lines, not memory and not time: beyond `limit` waiting lines the new
    ones are dropped and counted, and a line that `dropped_line` makes tells how many when it flows again.
    """

    def __init__(self, fd: int, dropped_line: Callable[[int], str], limit: int = 50_000) -> None:
        self._fd = fd
        self._dropped_line = dropped_line
        self._limit = limit
        self._lines: deque[str] = deque()
        self._awake = False
        self._wake = threading.Event()
        self._closed = False
        self._untold = 0
        self.dropped = 0
        """Lines that were never written, ever."""
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        """Have a line (without its line break) written soon. Safe from any thread."""
        if len(self._lines) >= self._limit or self._closed:
            self.dropped += 1
            self._untold += 1
            return
        self._lines.append(line)
        if not self._awake:
            self._awake = True
            self._wake.set()

    def close(self, seconds: float = 2.0) -> None:
        """Write what waits, for at most so many seconds."""
        self._closed = True
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            # the order matters: a line appended after this is either seen below or wakes us again
            self._awake = False
            self._flush()
            if self._closed and not self._lines:
                return

    def _flush(self) -> None:
        while self._lines:
            batch = [self._lines.popleft() for _ in range(min(len(self._lines), 1000))]
            if self._untold and not self._closed:
                batch.append(self._dropped_line(self._untold))
                self._untold = 0
            if not self._written("\n".join(batch) + "\n"):
                self.dropped += len(batch)

    def _written(self, text: str) -> bool:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # someone made our stdout non-blocking
                select.select([], [self._fd], [])
            except OSError:  # a reader that is gone is no reason to stop scheduling
                return False
        return True
