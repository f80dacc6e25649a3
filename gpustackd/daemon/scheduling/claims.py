"""Claims: waiting instances become ours to work on, PENDING -> ANALYZING, many in one statement."""

from __future__ import annotations

from collections.abc import Sequence

from gpustackd.daemon.queue.lanes import WakeOrigin
from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.daemon.scheduling.work_state import WorkItem
from gpustackd.errors import Contended

RETRY_IN = 1.0
"""Seconds after which instances are taken up again whose rows were locked by others."""


class Claims:
    """Writes claims; the lease loop keeps them alive, a commit or a refusal ends them."""

    def __init__(self, context: SchedulingContext) -> None:
        self._context = context

    async def claim(self, items: Sequence[WorkItem]) -> list[WorkItem]:
        """Claim these instances; returns those that are ours now. The others go back to the queue, or leave
        it. Raise DatabaseUnavailable."""
        started = self._context.clock()
        try:
            written = await self._context.store.claim(
                self._context.identity.owner, [(i.id, i.epoch) for i in items], self._context.lease
            )
        except Contended:
            self._retry(items)
            return []
        self._context.reporter.phase("claim", self._context.clock() - started)
        claims = {c.id: c for c in written}
        ours: list[WorkItem] = []
        missed: list[WorkItem] = []
        for item in items:
            claim = claims.get(item.id)
            if claim is None:
                missed.append(item)
                continue
            self._context.work.hold(item, claim)
            self._context.reporter.analyzing(item)
            ours.append(item)
        if missed:
            await self._missed(missed)
        return ours

    async def _missed(self, items: list[WorkItem]) -> None:
        """Another replica was faster, or our copy of the row is old. A new row is in good hands there; one
        that was refused before may have been written again meanwhile, and no notification says so."""
        refused = [i.id for i in items if i.signature is not None]
        try:
            waiting = {r.id: r for r in await self._context.store.waiting(refused)} if refused else {}
        except Contended:
            self._retry(items)
            return
        for item in items:
            row = waiting.get(item.id)
            if row is None:
                self._context.work.drop_row(item.id)
                self._context.queue.done(item.id)
            else:
                self._context.work.put_row(row)
                self._context.queue.put(
                    row.id,
                    row.priority,
                    row.created_at.timestamp(),
                    model_id=row.model_id,
                    origin=WakeOrigin.CURE,
                )
                self._context.queue.done(item.id)  # and comes back at once, with what the row says now

    def _retry(self, items: Sequence[WorkItem]) -> None:
        self._context.reporter.contended("claim")
        for item in items:
            self._context.queue.retry(item.id, RETRY_IN)
