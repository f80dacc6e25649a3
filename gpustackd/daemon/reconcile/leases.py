"""Leases: ours are renewed while we work, those of replicas that died are swept.

Times are the database's: only lengths are ours.
"""

from __future__ import annotations

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.queue.wakeups import Wakeups
from gpustackd.daemon.scheduling.context import SchedulingContext
from gpustackd.errors import Contended
from gpustackd.ports import Wake

_RENEWALS = 3
"""Renewals that the length of a lease holds: one may fail without harm."""
_SWEEPS = 6


class LeaseRenewal:
    """Keeps the claims of this replica alive."""

    name = "lease renewal"

    def __init__(self, context: SchedulingContext) -> None:
        self._context = context

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            await anyio.sleep(self._context.lease / _RENEWALS)
            ids = self._context.work.held_ids()
            if not ids:
                continue
            try:
                renewed = await self._context.store.renew(
                    self._context.identity.owner, ids, self._context.lease
                )
            except Contended:
                self._context.reporter.contended("lease renewal")
                continue
            for lost in set(ids) - renewed:
                # Either it ended while we asked, or it was taken from us; the commit will say which.
                self._context.work.release(lost)


class LeaseSweep:
    """Rows whose lease is over become PENDING, and whoever swept them takes them up at once."""

    name = "lease sweep"

    def __init__(self, context: SchedulingContext, wakeups: Wakeups) -> None:
        self._context = context
        self._wakeups = wakeups

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            await anyio.sleep(self._context.lease / _SWEEPS)
            try:
                expired = await self._context.store.expire_leases()
            except Contended:
                self._context.reporter.contended("lease sweep")
                continue
            if expired:
                self._context.reporter.leases_expired(expired)
                self._wakeups.notify(Wake("created", tuple(expired)))
