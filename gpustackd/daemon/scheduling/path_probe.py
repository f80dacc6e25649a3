"""Asking workers whether they have a model's local path: bounded, remembered for a while, before decisions.

Only workers that a decision may choose, and of which nothing is known, are asked: those with a READY file of
the model have it. What they say is a fact that decisions are given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import anyio
import anyio.to_thread

from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.paths import PathKnowledge, Paths, Presence
from gpustackd.errors import ModelUnreadable
from gpustackd.ports import Wake
from gpustackd.sources.worker_files import WorkerHost

AT_ONCE = 16
"""Workers asked at the same time about one path."""
BUDGET = 3.0
"""Seconds for one path over all workers; who was not asked by then is asked the next time."""
PROBE_TOTAL, PROBE_CONNECT = 1.0, 0.5
"""Seconds that one worker has for its answer, and for taking the connection."""
OWN_LOOK = 1.0
"""Seconds for a look at this host's own files, which may hang."""
MOST = 64
"""Paths remembered."""
ASK_REST_AFTER = 5.0
NOBODY_TO_ASK = 300.0
KEPT: Mapping[Presence, float] = {Presence.HERE: 300.0, Presence.MISSING: 30.0, Presence.SILENT: 10.0}
"""Seconds for which an answer is believed."""
KEPT_SHARED = 60.0
"""Seconds for which silence is believed of a path that is on this host too: it drops nobody."""


class Asker(Protocol):
    """The file API of workers."""

    def exists(self, host: WorkerHost, path: str) -> Awaitable[bool]:
        """Whether a worker has the path. Raises ModelUnreadable where it does not say."""


@dataclass(slots=True)
class _Known:
    """What is known of one path."""

    answers: dict[int, Presence] = field(default_factory=dict)
    until: dict[Presence, float] = field(default_factory=dict)
    shared: bool = False
    due: float = 0.0
    """When to ask again."""
    doubts: int = -1
    asking: anyio.Lock = field(default_factory=anyio.Lock)


class PathProbe:
    """One per process; the session under way sets `changed` and `tell`."""

    def __init__(self, asker: Asker, around: FileLocations, clock: Callable[[], float]) -> None:
        self._asker = asker
        self._around = around
        self._clock = clock
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._silent: dict[int, float] = {}
        """Worker id -> until when it need not be asked about other paths either."""
        self._doubts = 0
        self.facts: Paths = MappingProxyType({})
        """All that is known, as decisions take it; a new value at every change."""
        self.changed: Callable[[Paths], None] = lambda _: None
        self.tell: Callable[[Wake], None] = lambda _: None

    def current(self, spec: ModelSpec) -> bool:
        """Whether a decision can be made on what is known."""
        if not _asks(spec):
            return True
        known = self._known.get(spec.local_path or "")
        return known is not None and known.doubts == self._doubts and self._clock() < known.due

    def in_the_way(self, spec: ModelSpec) -> bool:
        """Whether an answer that has aged may be what keeps a model waiting."""
        known = self._known.get(spec.local_path or "") if _asks(spec) else None
        if known is None or self.current(spec):
            return False
        return any(p is not Presence.HERE for p in known.answers.values())

    def doubt(self) -> None:
        """Workers came or changed: there may be some that were never asked."""
        self._doubts += 1
        self._silent.clear()

    async def look(self, spec: ModelSpec) -> None:
        """Ask whom it takes. Never raises for what workers do."""
        path = spec.local_path
        if path is None or not _asks(spec):
            return
        known = self._known.setdefault(path, _Known())
        self._known.move_to_end(path)
        async with known.asking:
            if self.current(spec):
                return
            known.doubts = self._doubts
            await self._ask(known, spec, path)
        while len(self._known) > MOST:
            self._known.popitem(last=False)
        self._publish()

    async def _ask(self, known: _Known, spec: ModelSpec, path: str) -> None:
        now = self._clock()
        before = known.answers
        kept = {w: p for w, p in before.items() if now < known.until.get(p, 0.0)}
        wanted = {w: h for w, h in self._around.to_ask(spec, path).items() if w not in kept}
        said = {w: Presence.SILENT for w in wanted if now < self._silent.get(w, 0.0)}
        said |= await self._answers({w: h for w, h in wanted.items() if w not in said}, path)
        answers = kept | said
        if Presence.SILENT in said.values():
            known.shared = await _on_this_host(path)
        now = self._clock()
        for presence in set(said.values()):
            shared = presence is Presence.SILENT and known.shared
            known.until[presence] = now + (KEPT_SHARED if shared else KEPT[presence])
        known.answers = answers
        dues = [known.until[p] for p in set(answers.values())]
        if len(said) < len(wanted):
            dues.append(now + ASK_REST_AFTER)
        known.due = min(dues, default=now + NOBODY_TO_ASK)
        if any(p is Presence.HERE and before.get(w, p) is not p for w, p in said.items()):
            self.tell(Wake("files"))

    async def _answers(self, hosts: Mapping[int, WorkerHost], path: str) -> dict[int, Presence]:
        """What these workers say, as far as they do within the budget."""
        found: dict[int, Presence] = {}
        queue = iter(hosts.items())
        with anyio.move_on_after(BUDGET):
            async with anyio.create_task_group() as tasks:
                for _ in range(min(AT_ONCE, len(hosts))):
                    tasks.start_soon(self._one_after_another, queue, path, found)
        return found

    async def _one_after_another(
        self, hosts: Iterator[tuple[int, WorkerHost]], path: str, found: dict[int, Presence]
    ) -> None:
        for worker_id, host in hosts:
            try:
                there = await self._asker.exists(host, path)
            except ModelUnreadable:
                found[worker_id] = Presence.SILENT
                self._silent[worker_id] = self._clock() + KEPT[Presence.SILENT]
            else:
                found[worker_id] = Presence.HERE if there else Presence.MISSING

    def _publish(self) -> None:
        facts = {
            path: PathKnowledge(MappingProxyType(k.answers), k.shared)
            for path, k in self._known.items()
            if k.answers
        }
        self.facts = MappingProxyType(facts)
        self.changed(self.facts)


def _asks(spec: ModelSpec) -> bool:
    return spec.source is Source.LOCAL_PATH and bool(spec.local_path)


async def _on_this_host(path: str) -> bool:
    """Whether this process sees the path; a file system that hangs counts as one that does not have it."""
    found = False
    with anyio.move_on_after(OWN_LOOK):
        try:
            found = await anyio.to_thread.run_sync(partial(_exists, path), abandon_on_cancel=True)
        except OSError:
            return False
    return found


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except ValueError:  # a NUL in it
        return False
