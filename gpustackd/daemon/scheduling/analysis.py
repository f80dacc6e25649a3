"""Analysis: taken work gets its claim, its model's row and its model's facts, then it is ready to decide.

A model whose facts are cached never waits here for one whose facts are not: reading goes on in tasks of
its own, one per model, while claims are kept alive by the lease loop.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from anyio.abc import TaskGroup

from gpustackd.daemon.queue.instance_queue import InstanceQueue, Lane, Taken, WakeOrigin
from gpustackd.daemon.scheduling.gpu_usage import GpuUsage
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.scheduling.work_state import Work, WorkState
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.outcome import Cure
from gpustackd.errors import Contended
from gpustackd.ports import Store

_BATCH = 64
_READING_MOST = 32
"""Instances of one model that may hold a claim while its facts are read; the rest stay PENDING."""


class Analysis:
    """Runs until cancelled; `tasks` is where models are read. `batches` bounds how many batches are under way
    at once: one is being committed, the others are decided or wait for it.
    `in_order`: a batch is decided in the order in which it was taken."""

    def __init__(
        self,
        *,
        owner: UUID,
        lease: float,
        store: Store,
        queue: InstanceQueue,
        desk: WorkState,
        catalogue: ModelCatalog,
        reports: Reporter,
        tasks: TaskGroup,
        paths: PathProbe,
        usage: GpuUsage,
        clock: Callable[[], float],
        batches: int = 4,
        in_order: bool = False,
    ) -> None:
        self._owner = owner
        self._lease = lease
        self._store = store
        self._queue = queue
        self._desk = desk
        self._catalogue = catalogue
        self._reports = reports
        self._tasks = tasks
        self._paths = paths
        self._usage = usage
        self._clock = clock
        self._in_order = in_order
        self._most = max(1, batches - 1) * _BATCH

    async def run(self) -> None:
        """Until the queue is closed."""
        while True:
            await self._desk.room(self._most)
            taken = await self._queue.take(_BATCH)
            if not taken:
                return
            try:
                await self._sort(taken)
            except Contended:
                self._reports.contended("claim")
                for t in taken:
                    if self._queue.lane_of(t.id) is Lane.IN_FLIGHT and t.id not in self._desk.held:
                        self._queue.retry(t.id, 1.0)

    async def _sort(self, taken: list[Taken]) -> None:
        rows = self._desk.rows
        unknown = [t.id for t in taken if t.id not in rows]
        if unknown:
            for found in await self._store.waiting(unknown):
                rows[found.id] = found
        await self._catalogue.load({t.model_id for t in taken})
        await self._usage.look()
        fresh: list[Work] = []
        tried: list[Work] = []
        for t in taken:
            row = rows.get(t.id)
            if row is None:  # somebody else took it, or it is gone; a scan finds it if it waits again
                self._queue.done(t.id)
                continue
            work = Work(t, row.name, None, row.signature, row.epoch, row.attempts, hints=row.hints)
            known = self._catalogue.demand(t.model_id)
            if row.signature is None or t.origin is WakeOrigin.DUE:
                if known is None and len(self._desk.reading.get(t.model_id, ())) >= _READING_MOST:
                    self._queue.retry(t.id, 0.25, Cure.MODEL | Cure.FILES)
                else:
                    fresh.append(work)
            elif (known is None and self._catalogue.last(t.model_id) is None) or not self._asked(t.model_id):
                self.read_then(work)  # refused before: the row stays as it is until there is news
            else:
                tried.append(work)
        if self._in_order:
            rank = {t.id: n for n, t in enumerate(taken)}
            ready = [*tried, *(await self.claim(fresh) if fresh else ())]
            self._desk.push(sorted(ready, key=lambda work: rank[work.id]))
        else:  # what needs no claim does not wait for one
            self._desk.push(tried)
            if fresh:
                self._desk.push(await self.claim(fresh))
        await self._catalogue.fill()

    async def claim(self, wanted: list[Work]) -> list[Work]:
        """Claim, and read what must be read first. Returns what can be decided at once."""
        ready: list[Work] = []
        for work in await self.claim_only(wanted):
            if self._catalogue.demand(work.model_id) is None or not self._asked(work.model_id):
                self.read_then(work)
            else:
                ready.append(work)
        return ready

    async def claim_only(self, wanted: list[Work]) -> list[Work]:
        """Claim; what is lost to another replica is dropped from the queue. Returns what is ours."""
        started = self._clock()
        claims = await self._store.claim(self._owner, [(w.id, w.epoch) for w in wanted], self._lease)
        self._reports.phase("claim", self._clock() - started)
        mine = {c.id: c for c in claims}
        ours: list[Work] = []
        missed: list[Work] = []
        for work in wanted:
            claim = mine.get(work.id)
            if claim is None:
                missed.append(work)
                continue
            work.claim = claim
            work.epoch, work.attempts = claim.epoch, claim.attempts
            self._desk.held[work.id] = claim
            self._reports.analyzing(work)
            ours.append(work)
        if missed:
            await self._missed(missed)
        return ours

    async def _missed(self, missed: list[Work]) -> None:
        """Another replica was faster, or our idea of the row is old. A new row is in good hands there; one
        that was refused before may have been written again meanwhile, and nobody will tell us."""
        refused = [w.id for w in missed if w.signature is not None]
        waiting = {r.id: r for r in await self._store.waiting(refused)} if refused else {}
        for work in missed:
            row = waiting.get(work.id)
            if row is None:
                self._desk.rows.pop(work.id, None)
                self._queue.done(work.id)
            else:
                self._desk.rows[work.id] = row
                self._queue.put(
                    row.id,
                    row.priority,
                    row.created_at.timestamp(),
                    model_id=row.model_id,
                    origin=WakeOrigin.CURE,
                )
                self._queue.done(work.id)  # and comes back at once, with what the row says now

    def read_then(self, work: Work) -> None:
        """The work becomes ready when its model has been read."""
        waiting = self._desk.reading.get(work.model_id)
        if waiting is not None:
            waiting.append(work)
            return
        self._desk.reading[work.model_id] = [work]
        self._tasks.start_soon(self._read, work.model_id)

    def _asked(self, model_id: int) -> bool:
        """Whether workers have said what a decision wants to know of the model's path."""
        record = self._catalogue.record(model_id)
        return record is None or record.spec is None or self._paths.current(record.spec)

    async def _read(self, model_id: int) -> None:
        started = self._clock()
        try:
            await self._catalogue.read(model_id)
            record = self._catalogue.record(model_id)
            if record is not None and record.spec is not None:
                await self._paths.look(record.spec)
        finally:
            waiting = self._desk.reading.pop(model_id, [])
        self._reports.phase("facts", self._clock() - started)
        self._desk.push(waiting)
        await self._catalogue.fill()
