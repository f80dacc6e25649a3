"""Leases: ours are renewed while we work, those of replicas that died are swept."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import anyio

from gpustackd.daemon.scheduling.work_state import WorkState
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.errors import Contended
from gpustackd.ports import Store, Wake

_RENEWALS = 3
"""Renewals a lease's length holds: one may fail without harm."""
_SWEEPS = 6


class Leases:
    """Two loops that run until cancelled. Times are the database's: only lengths are ours."""

    def __init__(
        self,
        *,
        owner: UUID,
        lease: float,
        store: Store,
        desk: WorkState,
        reports: Reporter,
        tell: Callable[[Wake], None],
    ) -> None:
        self._owner = owner
        self._lease = lease
        self._store = store
        self._desk = desk
        self._reports = reports
        self._tell = tell

    async def renew(self) -> None:
        while True:
            await anyio.sleep(self._lease / _RENEWALS)
            ids = list(self._desk.held)
            if not ids:
                continue
            try:
                kept = await self._store.renew(self._owner, ids, self._lease)
            except Contended:
                self._reports.contended("renew")
                continue
            for lost in set(ids) - kept:
                # Either it ended while we asked, or it was taken from us; the commit will tell which.
                self._desk.let_go(lost)

    async def sweep(self) -> None:
        """Rows whose lease is over become PENDING, and whoever swept them takes them up at once."""
        while True:
            await anyio.sleep(self._lease / _SWEEPS)
            try:
                expired = await self._store.expire_leases()
            except Contended:
                self._reports.contended("sweep")
                continue
            if expired:
                self._reports.leases_expired(expired)
                self._tell(Wake("created", tuple(expired)))
