"""Queues: the queue of keys as the daemon makes it, and what wakes instances up. On a clock that a case
moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.daemon.backoff import Backoff
from gpustackd.daemon.queue.instance_queue import InstanceQueue
from gpustackd.daemon.queue.key_queue import KeyQueue
from gpustackd.daemon.queue.wakeups import Wakeups
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.ports import Wake
from gpustackd.store.memory.store import MemoryStore

STEP = 0.001
"""Seconds by which a case's clock is moved while it waits."""


class _Draw:
    """A random number that is given."""

    value = 0.0

    def random(self) -> float:
        return self.value


class Keys:
    """The queue of keys. Whoever takes a key looks at the rows as they are then; so what is said of a key is
    kept here, as the rows would be, and not in the queue."""

    def __init__(self, base: float, most: float, jitter: float) -> None:
        self.now = 0.0
        self.draw = _Draw()
        backoff = Backoff(self.draw, first=base, ceiling=most, spread=jitter)  # type: ignore[arg-type]
        self.queue: KeyQueue[str] = KeyQueue(lambda: self.now, backoff)
        self.rows: dict[str, tuple[str, Any]] = {}

    def said(self, key: str, change: str, news: Any) -> None:
        """What the rows say from now on. What is deleted stays so until it is added anew."""
        known = self.rows.get(key)
        if known is not None and known[0] == "DELETED" and change == "MODIFIED":
            return
        self.rows[key] = change, news

    def add(self, key: str) -> None:
        self.queue.add(key)

    def add_after(self, key: str, delay: float) -> None:
        self.queue.add_after(key, delay)

    def add_rate_limited(self, key: str) -> None:
        """As the daemon does after a failure."""
        self.queue.add_after(key, self.queue.backoff(key))

    def get(self, patience: float) -> str | None:
        """The next key within so many seconds."""
        end = self.now + patience
        while True:
            key = self.queue.get_nowait()
            if key is not None:
                return key
            if self.now >= end:
                return None
            self.now = min(self.now + STEP, end)

    def done(self, key: str) -> None:
        self.queue.done(key)

    def backoff(self, key: str, draw: float | None) -> float:
        self.draw.value = draw or 0.0
        return self.queue.backoff(key)

    def failures(self, key: str) -> int:
        return self.queue._failures.get(key, 0)

    def forget(self, key: str) -> None:
        self.queue.forget(key)

    def __len__(self) -> int:
        return len(self.queue)


# -- instances -----------------------------------------------------------------------------------------------

WAKES = {"CREATED": "created", "ADDED": "created", "DELETED": "deleted"}
"""Words of instances that have a wake-up here; an update of an instance has none."""


def heard(kinds: Iterable[str]) -> list[str]:
    """Of these kinds of events those that bring the instance that they name into the queue."""
    found = []
    for kind in kinds:
        wakes = Wakeups()
        if kind in WAKES:
            wakes.notify(Wake(WAKES[kind], (7,)))
        if 7 in wakes.take().created:
            found.append(kind)
    return found


def at_start() -> tuple[bool, bool]:
    """(whether a daemon that starts looks at everything, whether old events are played to it again)."""
    wakes = Wakeups()
    wakes.rescan()
    batch = wakes.take()
    return batch.full, bool(batch.created)


async def found_by_scan(ids: Iterable[int]) -> list[int]:
    """Of instances that waited before the start those that a full look brings into the queue."""
    store = _store(ids, ())
    return sorted(_queued(await store.waiting(None)))


async def evaluated(named: int | None, *, waits: bool, kind: str = "CREATED") -> tuple[list[int], bool]:
    """(instances that an event brings into the queue, whether it makes the daemon look at everything)."""
    store = _store({named or 7, 8, 9}, () if waits or named is None else (named,))
    wakes = Wakeups()
    if kind in WAKES and named is not None:
        wakes.notify(Wake(WAKES[kind], (named,)))
    batch = wakes.take()
    rows = await store.waiting(sorted(batch.created)) if batch.created else []
    return _queued(rows), batch.full


def _store(ids: Iterable[int], running: Iterable[int]) -> MemoryStore:
    store = MemoryStore()
    model = store.database.insert("models", name="m")
    for id_ in ids:
        store.database.insert("model_instances", id=id_, name=f"i{id_}", model_id=model)
    for id_ in running:
        store.database.model_instances[id_].state = InstanceState.RUNNING
    return store


def _queued(rows: Iterable[Any]) -> list[int]:
    queue = InstanceQueue(lambda: 0.0)
    for row in rows:
        queue.put(row.id, row.priority, row.created_at.timestamp(), model_id=row.model_id)
    return [taken.id for taken in queue.take_nowait(100)]


def settings(given: Mapping[str, Any]) -> tuple[float, float, float]:
    """(first delay, longest delay, jitter) of a case's queue; the daemon's own where it says nothing."""
    nested = given.get("backoff") or {}
    base = nested.get("base", given.get("backoff_base", 1.0))
    most = nested.get("cap", given.get("backoff_max", 300.0))
    return base, most, nested.get("jitter", given.get("backoff_jitter", 0.0))
