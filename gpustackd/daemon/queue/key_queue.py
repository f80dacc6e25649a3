"""A queue of keys to look at: each at most once, never two at work on one key.

For level-triggered work: whoever takes a key looks at everything that concerns it, so that what comes for a
waiting key melts into it, and what comes while somebody is at work on it makes one further pass.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

import anyio

from gpustackd.daemon.backoff import Backoff

K = TypeVar("K", bound=Hashable)


class KeyQueue(Generic[K]):
    """`clock` is monotonic seconds; `backoff` says how long a key waits after failures in a row."""

    def __init__(self, clock: Callable[[], float], backoff: Backoff) -> None:
        self._clock = clock
        self._backoff = backoff
        self._ready: deque[K] = deque()
        self._waiting: set[K] = set()
        """The same keys."""
        self._later: dict[K, int] = {}
        """Keys that are put off, with the stamp of their entry in the heap."""
        self._heap: list[tuple[float, int, K]] = []
        self._at_work: dict[K, bool] = {}
        """Taken keys, and whether they were added again since."""
        self._failures: dict[K, int] = {}
        self._stamps = count()
        self._more = anyio.Event()

    def __len__(self) -> int:
        return len(self._ready) + len(self._later)

    @property
    def busy(self) -> int:
        """Keys at work, or ready for it."""
        return len(self._ready) + len(self._at_work)

    def add(self, key: K) -> None:
        """Have a key looked at; what was put off is not needed any more."""
        self._later.pop(key, None)
        self._enter(key)

    def add_after(self, key: K, delay: float) -> None:
        """Have it looked at after `delay` seconds; of one key only the latest wish stands. A key that waits
        already is looked at before that."""
        stamp = self._later[key] = next(self._stamps)
        heapq.heappush(self._heap, (self._clock() + max(delay, 0.0), stamp, key))
        self._signal()

    def get_nowait(self) -> K | None:
        """The next key, which is at work until `done`; None = nothing now."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, stamp, key = heapq.heappop(self._heap)
            if self._later.get(key) == stamp:
                del self._later[key]
                self._enter(key)
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._waiting.discard(key)
        self._at_work[key] = False
        return key

    async def get(self) -> K:
        """Wait for the next key."""
        while True:
            key = self.get_nowait()
            if key is not None:
                return key
            due = self._heap[0][0] - self._clock() if self._heap else None
            more = self._more
            with anyio.move_on_after(None if due is None else max(due, 0.0)):
                await more.wait()

    def done(self, key: K) -> None:
        """The work on a key is over; what came meanwhile makes it wait again."""
        if self._at_work.pop(key, False):
            self._enter(key)

    def backoff(self, key: K) -> float:
        """Count a failure of a key; the seconds until it should be tried again."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return self._backoff.seconds(failures)

    def forget(self, key: K) -> None:
        """It worked: failures are counted anew."""
        self._failures.pop(key, None)

    def _enter(self, key: K) -> None:
        if key in self._at_work:
            self._at_work[key] = True
        elif key not in self._waiting:
            self._waiting.add(key)
            self._ready.append(key)
            self._signal()

    def _signal(self) -> None:
        self._more.set()
        self._more = anyio.Event()
