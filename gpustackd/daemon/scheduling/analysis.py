"""Analysis: queued instances get their claim, their model's row and its facts; then they are ready to decide.

A model whose facts are cached never waits here for one whose facts are not: models are read in tasks of
their own, one per model, while the lease loop keeps the claims alive.
"""

from __future__ import annotations

from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.queue.instance_queue import QueueEntry
from gpustackd.daemon.queue.lanes import WakeOrigin
from gpustackd.daemon.scheduling.claims import RETRY_IN, Claims
from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.scheduling.gpu_usage import GpuUsage
from gpustackd.daemon.scheduling.work_state import WorkItem
from gpustackd.domain.outcome import Cure
from gpustackd.errors import Contended

_BATCH = 64
_READING_LIMIT = 32
"""Instances of one model that may hold a claim while its facts are read; the rest stay PENDING."""


class Analysis:
    """`max_batches` bounds how many batches are in progress at once: one is being committed, the others are
    decided or wait for it. `in_order`: a batch is decided in the order in which it left the queue."""

    name = "analysis"

    def __init__(
        self,
        context: SchedulingContext,
        claims: Claims,
        usage: GpuUsage,
        *,
        max_batches: int = 4,
        in_order: bool = False,
    ) -> None:
        self._context = context
        self._claims = claims
        self._usage = usage
        self._in_order = in_order
        self._ready_limit = max(1, max_batches - 1) * _BATCH

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until the queue is closed."""
        task_status.started()
        while True:
            await self._context.work.wait_for_room(self._ready_limit)
            entries = await self._context.queue.take(_BATCH)
            if not entries:
                return
            try:
                await self._read_rows(entries)
            except Contended:
                self._context.reporter.contended("analysis")
                for e in entries:
                    self._context.queue.retry(e.id, RETRY_IN)
            else:
                await self._analyze(entries)

    async def _analyze(self, entries: list[QueueEntry]) -> None:
        await self._usage.refresh()
        new, refused = self._sort(entries)
        if self._in_order:
            position = {e.id: n for n, e in enumerate(entries)}
            ready = [*refused, *(await self._claim(new) if new else ())]
            self._context.work.push(sorted(ready, key=lambda item: position[item.id]))
        else:  # what needs no claim does not wait for one
            self._context.work.push(refused)
            if new:
                self._context.work.push(await self._claim(new))
        await self._context.catalog.fill()

    async def _read_rows(self, entries: list[QueueEntry]) -> None:
        if unknown := self._context.work.unknown(e.id for e in entries):
            for row in await self._context.store.waiting(unknown):
                self._context.work.put_row(row)
        await self._context.catalog.load({e.model_id for e in entries})

    def _sort(self, entries: list[QueueEntry]) -> tuple[list[WorkItem], list[WorkItem]]:
        """(New instances to claim, refused ones to try in memory); the others wait for their models."""
        new: list[WorkItem] = []
        refused: list[WorkItem] = []
        for e in entries:
            row = self._context.work.row(e.id)
            if row is None:  # another replica took it, or it is gone; a scan finds it if it waits again
                self._context.queue.done(e.id)
                continue
            item = WorkItem(e, row.name, None, row.signature, row.epoch, row.attempts, hints=row.hints)
            demand = self._context.catalog.demand(e.model_id)
            if row.signature is None or e.origin is WakeOrigin.DUE:
                if demand is None and self._context.work.reading_count(e.model_id) >= _READING_LIMIT:
                    self._context.queue.retry(e.id, 0.25, Cure.MODEL | Cure.FILES)
                else:
                    new.append(item)
            elif self._context.catalog.is_ready(e.model_id, aged=True):
                refused.append(item)
            else:
                self.read_model(item)  # the row stays as it is until there is news
        return new, refused

    async def _claim(self, items: list[WorkItem]) -> list[WorkItem]:
        """Claim; returns what can be decided at once, the rest waits for its models."""
        ready: list[WorkItem] = []
        for item in await self._claims.claim(items):
            if self._context.catalog.is_ready(item.model_id):
                ready.append(item)
            else:
                self.read_model(item)
        return ready

    def read_model(self, item: WorkItem) -> None:
        """The item becomes ready when its model has been read."""
        if self._context.work.wait_for_facts(item):
            self._context.tasks.start_soon(self._read, item.model_id)

    async def _read(self, model_id: int) -> None:
        started = self._context.clock()
        try:
            await self._context.catalog.prepare(model_id)
        finally:
            self._context.reporter.phase("facts", self._context.clock() - started)
            self._context.work.facts_read(model_id)
        await self._context.catalog.fill()
