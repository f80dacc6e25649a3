"""This replica's view of the fleet: fed by what changed, corrected by what its own commits did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import anyio
import anyio.lowlevel

from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.ports import CommitResult, FleetChanges, Proposal, Store

_CHUNK = 2000
"""Rows applied before others on the event loop get a turn."""
_by_id = attrgetter("id")
"""The order in which rows are taken over: it tells equal places apart, so that the same rows give the same
answer, in whatever order a table holds them."""


class FleetFeed:
    """Owns the `Fleet`. `lock` keeps reads of the feed apart from commits and their acknowledgement, so that
    a read never overwrites what a commit that crossed it did."""

    def __init__(
        self, store: Store, on_state: Callable[[WorkerRow, str | None], None] = lambda *_: None
    ) -> None:
        self.fleet = Fleet()
        self.lock = anyio.Lock()
        self.foreign = 0
        """Rows that others changed, as of the last look."""
        self.news = 0
        """Rises whenever a look brings such rows."""
        self._store = store
        self._on_state = on_state
        self._mark: str | None = None
        self._whole = True
        """Whether the next look has to be a complete one. Told apart from the mark, which a look under way
        sets at its end."""

    async def load(self) -> None:
        """Read everything anew."""
        self._whole = True
        async with self.lock:
            await self._feed()

    async def refresh(self) -> int:
        """Read what changed since the last look; returns how many rows others had changed."""
        async with self.lock:
            return await self._feed()

    async def reconcile(self) -> bool:
        """At a rescan: find rows that vanished or differ without any notice. True = something did."""
        async with self.lock:
            await self._feed()
            known = await self._store.fleet_sums()
            fleet = self.fleet
            mine = (
                len(fleet.position),
                int(fleet.worker_version[: fleet.count][fleet.alive[: fleet.count]].sum()),
                len(fleet.slot),
                int(fleet.gpu_version[fleet.gpu_id > 0].sum()),
            )
            if known == mine:
                return False
            self._whole = True
            await self._feed()
            return True

    async def _feed(self) -> int:
        whole, self._whole = self._whole, False
        try:
            return await self._read(None if whole else self._mark)
        except BaseException:
            self._whole |= whole
            raise

    async def _read(self, since: str | None) -> int:
        changes = await self._store.fleet_changes(since)
        changed = await self._apply(changes)
        if changed:
            wanted = None if changes.complete else sorted(changed)
            by_worker: dict[int, list[Booking]] = defaultdict(list)
            for booking in await self._store.bookings(wanted):
                by_worker[booking.worker_id].append(booking)
            for worker_id in changed:
                self.fleet.set_bookings(worker_id, by_worker.get(worker_id, ()))
        self._mark = changes.mark
        self.news += self.foreign > 0
        return self.foreign

    async def _apply(self, changes: FleetChanges) -> set[int]:
        """Put the rows that differ from what we know; returns the workers whose ledger must be read."""
        fleet = self.fleet
        changed: set[int] = set()
        self.foreign = 0
        for n, worker in enumerate(sorted(changes.workers, key=_by_id), 1):
            w = fleet.position.get(worker.id)
            if w is None or fleet.worker_version[w] != worker.version:
                before = None if w is None else fleet.row(w).state
                fleet.put_worker(worker)
                if before not in (None, worker.state):
                    self._on_state(worker, before)
                changed.add(worker.id)
                self.foreign += 1
            if n % _CHUNK == 0:
                await anyio.lowlevel.checkpoint()
        for n, gpu in enumerate(sorted(changes.gpus, key=_by_id), 1):
            place = fleet.slot.get(gpu.id)
            if place is None or fleet.gpu_version[place] != gpu.version:
                fleet.put_gpu(gpu)
                changed.add(gpu.worker_id)
                self.foreign += 1
            if n % _CHUNK == 0:
                await anyio.lowlevel.checkpoint()
        if changes.complete:
            self._drop_missing({w.id for w in changes.workers}, {g.id for g in changes.gpus})
            changed |= set(fleet.position)
        return changed

    def _drop_missing(self, workers: set[int], gpus: set[int]) -> None:
        for gpu_id in [g for g in self.fleet.slot if g not in gpus]:
            self.fleet.drop_gpu(gpu_id)
        for worker_id in [w for w in self.fleet.position if w not in workers]:
            self.fleet.drop_worker(worker_id)

    async def committed(self, batch: Sequence[Proposal], results: Iterable[CommitResult]) -> None:
        """Acknowledge a commit: confirm what was booked, forget what was refused. Call with `lock` held."""
        again: set[int] = set()
        for result in results:
            if result.code is None:
                again.update(self.fleet.confirm(result.instance_id))
            else:
                self.fleet.forget(result.instance_id)
        if again:
            by_worker: dict[int, list[Booking]] = defaultdict(list)
            for booking in await self._store.bookings(sorted(again)):
                by_worker[booking.worker_id].append(booking)
            for worker_id in again:
                self.fleet.set_bookings(worker_id, by_worker.get(worker_id, ()))

    def reload_next(self) -> None:
        """Rows were deleted: only a complete look shows which."""
        self._whole = True
