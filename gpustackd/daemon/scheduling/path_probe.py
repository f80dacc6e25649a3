"""Asking workers whether they have a model's local path: bounded, remembered for a while, before decisions.

Only workers that a decision may choose, and of which nothing is known, are asked: those with a READY file of
the model have it. What they answer is a fact that decisions are given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import anyio

from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.paths import PathKnowledge, Paths, Presence
from gpustackd.errors import ModelUnreadable
from gpustackd.ports import Wake
from gpustackd.sources.abandonable_threads import AbandonableThreads, mount_of
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


class FileApi(Protocol):
    """The file API of workers."""

    def exists(self, host: WorkerHost, path: str) -> Awaitable[bool]:
        """Whether a worker has the path. Raises ModelUnreadable where it does not say."""


@dataclass(slots=True)
class _ProbedPath:
    """What is known of one path."""

    answers: dict[int, Presence] = field(default_factory=dict)
    until: dict[Presence, float] = field(default_factory=dict)
    shared: bool = False
    due: float = 0.0
    """When to ask again."""
    fleet_changes: int = -1
    """Changes of the fleet that its answers know of."""
    asking: anyio.Lock = field(default_factory=anyio.Lock)


class PathProbe:
    """One per process. This host's own files are looked at in `threads`; `wake` is told of files that a
    worker turned out to have."""

    def __init__(
        self,
        file_api: FileApi,
        file_locations: FileLocations,
        threads: AbandonableThreads,
        clock: Callable[[], float],
        wake: Callable[[Wake], None] = lambda _: None,
    ) -> None:
        self._file_api = file_api
        self._file_locations = file_locations
        self._threads = threads
        self._clock = clock
        self._wake = wake
        self._probed: OrderedDict[str, _ProbedPath] = OrderedDict()
        self._silent: dict[int, float] = {}
        """Worker id -> until when it need not be asked about other paths either."""
        self._fleet_changes = 0
        self.paths: Paths = MappingProxyType({})
        """All that is known, as decisions take it; a new value at every change."""

    def current(self, spec: ModelSpec) -> bool:
        """Whether a decision can be made on what is known."""
        if not _has_path(spec):
            return True
        probed = self._probed.get(spec.local_path or "")
        return (
            probed is not None and probed.fleet_changes == self._fleet_changes and self._clock() < probed.due
        )

    def may_hold_up(self, spec: ModelSpec) -> bool:
        """Whether an answer that has aged may be what keeps a model waiting."""
        probed = self._probed.get(spec.local_path or "") if _has_path(spec) else None
        if probed is None or self.current(spec):
            return False
        return any(p is not Presence.HERE for p in probed.answers.values())

    def workers_changed(self) -> None:
        """Workers came or changed: there may be some that were never asked."""
        self._fleet_changes += 1
        self._silent.clear()

    async def look(self, spec: ModelSpec) -> None:
        """Ask the workers that have to be asked. Never raises for what workers do."""
        path = spec.local_path
        if path is None or not _has_path(spec):
            return
        probed = self._probed.setdefault(path, _ProbedPath())
        self._probed.move_to_end(path)
        async with probed.asking:
            if self.current(spec):
                return
            probed.fleet_changes = self._fleet_changes
            await self._ask(probed, spec, path)
        while len(self._probed) > MOST:
            self._probed.popitem(last=False)
        self._publish()

    async def _ask(self, probed: _ProbedPath, spec: ModelSpec, path: str) -> None:
        now = self._clock()
        before = probed.answers
        kept = {w: p for w, p in before.items() if now < probed.until.get(p, 0.0)}
        wanted = {w: h for w, h in self._file_locations.to_ask(spec, path).items() if w not in kept}
        new = {w: Presence.SILENT for w in wanted if now < self._silent.get(w, 0.0)}
        new |= await self._answers({w: h for w, h in wanted.items() if w not in new}, path)
        answers = kept | new
        if Presence.SILENT in new.values():
            probed.shared = await self._on_this_host(path)
        now = self._clock()
        for presence in set(new.values()):
            shared = presence is Presence.SILENT and probed.shared
            probed.until[presence] = now + (KEPT_SHARED if shared else KEPT[presence])
        probed.answers = answers
        dues = [probed.until[p] for p in set(answers.values())]
        if len(new) < len(wanted):
            dues.append(now + ASK_REST_AFTER)
        probed.due = min(dues, default=now + NOBODY_TO_ASK)
        if any(p is Presence.HERE and before.get(w, p) is not p for w, p in new.items()):
            self._wake(Wake("files"))

    async def _answers(self, hosts: Mapping[int, WorkerHost], path: str) -> dict[int, Presence]:
        """What these workers answer, as far as they do within the budget."""
        answers: dict[int, Presence] = {}
        queue = iter(hosts.items())
        with anyio.move_on_after(BUDGET):
            async with anyio.create_task_group() as tasks:
                for _ in range(min(AT_ONCE, len(hosts))):
                    tasks.start_soon(self._one_after_another, queue, path, answers)
        return answers

    async def _one_after_another(
        self, hosts: Iterator[tuple[int, WorkerHost]], path: str, answers: dict[int, Presence]
    ) -> None:
        for worker_id, host in hosts:
            try:
                there = await self._file_api.exists(host, path)
            except ModelUnreadable:
                answers[worker_id] = Presence.SILENT
                self._silent[worker_id] = self._clock() + KEPT[Presence.SILENT]
            else:
                answers[worker_id] = Presence.HERE if there else Presence.MISSING

    async def _on_this_host(self, path: str) -> bool:
        """Whether this process sees the path; a file system that hangs counts as not having it."""
        with anyio.move_on_after(OWN_LOOK):
            return await self._threads.run(lambda: _exists(path), group=mount_of(path))
        return False

    def _publish(self) -> None:
        known = {
            path: PathKnowledge(MappingProxyType(p.answers), p.shared)
            for path, p in self._probed.items()
            if p.answers
        }
        self.paths = MappingProxyType(known)


def _has_path(spec: ModelSpec) -> bool:
    return spec.source is Source.LOCAL_PATH and bool(spec.local_path)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # no permission, a NUL in it
        return False
