"""A queue of keys to look at: each at most once, never two at work on one key, deletions first.

For level-triggered work: whoever takes a key looks at everything that concerns it, so that what comes for a
waiting key melts into it, and what comes while somebody is at work on it makes one further pass.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Generic, TypeVar

import anyio

from gpustackd.daemon.backoff import Backoff

K = TypeVar("K", bound=Hashable)


class KeyChange(StrEnum):
    """What is said of a key; DELETED sticks until the key is taken."""

    CREATED = "CREATED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


@dataclass(slots=True)
class QueuedKey(Generic[K]):
    """One key with the latest that was said of it."""

    key: K
    change: KeyChange
    news: object = None
    due: float = 0.0


class KeyQueue(Generic[K]):
    """`clock` is monotonic seconds; `window` holds a key back so long after its first word."""

    def __init__(
        self, clock: Callable[[], float], backoff: Backoff | None = None, *, window: float = 0.0
    ) -> None:
        self._clock = clock
        self._backoff = backoff
        self._window = window
        self._ready: deque[K] = deque()
        self._waiting: dict[K, QueuedKey[K]] = {}
        """Keys that are ready, or in their window."""
        self._later: dict[K, QueuedKey[K]] = {}
        self._heap: list[tuple[float, int, QueuedKey[K]]] = []
        self._at_work: dict[K, QueuedKey[K] | None] = {}
        """Taken keys, with what came since."""
        self._failures: dict[K, int] = {}
        self._stamp = count()
        self._more = anyio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._later)

    @property
    def busy(self) -> int:
        """Keys at work, or ready for it."""
        return len(self._ready) + len(self._at_work)

    # -- coming in ----------------------------------------------------------------------------------------

    def add(self, key: K, change: KeyChange = KeyChange.MODIFIED, news: object = None) -> None:
        """Say something of a key. A deletion goes to the front and takes back what was put off."""
        item = _merged(self._later.pop(key, None), QueuedKey(key, change, news))
        if key in self._at_work:
            self._at_work[key] = _merged(self._at_work[key], item)
        else:
            self._enter(item)

    def _enter(self, item: QueuedKey[K]) -> None:
        key, known = item.key, self._waiting.get(item.key)
        item = self._waiting[key] = _merged(known, item)
        if item.change is KeyChange.DELETED:
            if key in self._ready:
                self._ready.remove(key)
            self._ready.appendleft(key)
            item.due = 0.0
        elif known is not None:
            item.due = known.due
        elif self._window > 0:
            item.due = self._clock() + self._window
            self._put_off(item)
        else:
            self._ready.append(key)
        self._tell()

    def add_after(
        self, key: K, delay: float, change: KeyChange = KeyChange.MODIFIED, news: object = None
    ) -> None:
        """Say it after `delay` seconds; of one key only the latest wish stands. A key that waits already is
        looked at before that."""
        item = QueuedKey(key, change, news, self._clock() + max(delay, 0.0))
        self._later[key] = item
        self._put_off(item)
        self._tell()

    def _put_off(self, item: QueuedKey[K]) -> None:
        heapq.heappush(self._heap, (item.due, next(self._stamp), item))

    # -- going out ----------------------------------------------------------------------------------------

    def get_nowait(self) -> QueuedKey[K] | None:
        """The next key, which is at work until `done`; None = nothing now."""
        self._promote()
        if not self._ready:
            return None
        key = self._ready.popleft()
        self._at_work[key] = None
        return self._waiting.pop(key)

    async def get(self, timeout: float | None = None) -> QueuedKey[K] | None:
        """Wait for the next key; None after `timeout` seconds without one."""
        end = None if timeout is None else self._clock() + timeout
        while True:
            item = self.get_nowait()
            if item is not None:
                return item
            now = self._clock()
            if end is not None and now >= end:
                return None
            wake = [t for t in (end, self._heap[0][0] if self._heap else None) if t is not None]
            more = self._more
            with anyio.move_on_after(None if not wake else max(min(wake) - now, 0.0)):
                await more.wait()

    def done(self, key: K) -> None:
        """The work on a key is over; what came meanwhile makes it wait again."""
        item = self._at_work.pop(key, None)
        if item is not None:
            self._enter(item)

    def _promote(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, _, item = heapq.heappop(self._heap)
            if self._later.get(item.key) is item:
                del self._later[item.key]
                if item.key in self._at_work:
                    self._at_work[item.key] = _merged(item, self._at_work[item.key])
                elif item.key not in self._waiting:
                    self._waiting[item.key] = item
                    self._ready.append(item.key)
            elif (known := self._waiting.get(item.key)) and known.due == item.due and item.due:
                known.due = 0.0  # its window is over
                self._ready.append(item.key)

    def _tell(self) -> None:
        self._more.set()
        self._more = anyio.Event()

    # -- failures -----------------------------------------------------------------------------------------

    def backoff(self, key: K) -> float:
        """Count a failure of a key; the seconds until it should be tried again."""
        assert self._backoff is not None, "a queue without back-off"
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        return self._backoff.seconds(failures)

    def forget(self, key: K) -> None:
        """It worked: failures are counted anew."""
        self._failures.pop(key, None)


def _merged(old: QueuedKey[K] | None, new: QueuedKey[K] | None) -> QueuedKey[K]:
    if old is None or new is None:
        merged = new or old
        assert merged is not None
        return merged
    stuck = KeyChange.DELETED in (old.change, new.change)
    return QueuedKey(
        new.key, KeyChange.DELETED if stuck else new.change, new.news if new.news is not None else old.news
    )
