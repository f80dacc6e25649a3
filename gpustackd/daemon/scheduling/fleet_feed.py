"""This replica's copy of the fleet: fed by what changed, corrected by what its own commits did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from math import inf
from operator import attrgetter
from time import monotonic

import anyio
import anyio.lowlevel

from gpustackd.domain.bookings import Booking
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import WorkerRow
from gpustackd.ports import CommitResult, FleetChanges, Store

_CHUNK = 2000
"""Rows applied before others on the event loop get a turn."""
_by_id = attrgetter("id")
"""The order in which rows are taken over: it tells equal places apart, so that the same rows give the same
answer, in whatever order a table holds them."""


class FleetFeed:
    """Owns the `Fleet`. `lock` keeps reads of the feed apart from commits and their acknowledgement, so that
    a read never overwrites what a commit that crossed it did."""

    def __init__(
        self,
        store: Store,
        on_state: Callable[[WorkerRow, str | None], None] = lambda *_: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`on_state(worker, state before)` is called for every worker that changed its state."""
        self.fleet = Fleet()
        self.lock = anyio.Lock()
        self.changed_by_others = 0
        """Rows that others had changed, as of the last read."""
        self.generation = 0
        """Rises whenever a read brings such rows."""
        self._store = store
        self._on_state = on_state
        self._clock = clock
        self._read_at = -inf
        self._mark: str | None = None
        self._complete_next = True
        """Whether the next read has to be a complete one. Kept apart from the mark, which a read under way
        sets at its end."""

    def age(self) -> float:
        """Seconds since the last read began."""
        return self._clock() - self._read_at

    async def start(self) -> None:
        """Begin with an empty fleet, whatever was known or assumed before, and read everything."""
        self.fleet = Fleet()
        await self.load()

    async def load(self) -> None:
        """Read everything anew."""
        self._complete_next = True
        async with self.lock:
            await self._feed()

    async def refresh(self) -> int:
        """Read what changed since the last read; returns how many rows others had changed."""
        async with self.lock:
            return await self._feed()

    async def reconcile(self) -> bool:
        """At a rescan: find rows that vanished or differ without any notice. True = something did."""
        async with self.lock:
            await self._feed()
            stored = await self._store.fleet_sums()
            fleet = self.fleet
            known = (
                len(fleet.position),
                int(fleet.worker_version[: fleet.count][fleet.alive[: fleet.count]].sum()),
                len(fleet.slot),
                int(fleet.gpu_version[fleet.gpu_id > 0].sum()),
            )
            if known == stored:
                return False
            self._complete_next = True
            await self._feed()
            return True

    async def _feed(self) -> int:
        complete, self._complete_next = self._complete_next, False
        self._read_at = self._clock()
        try:
            return await self._read(None if complete else self._mark)
        except BaseException:
            self._complete_next |= complete
            raise

    async def _read(self, since: str | None) -> int:
        changes = await self._store.fleet_changes(since)
        changed = await self._apply(changes)
        if changed:
            await self._read_bookings(changed, None if changes.complete else sorted(changed))
        self._mark = changes.mark
        self.generation += self.changed_by_others > 0
        return self.changed_by_others

    async def _apply(self, changes: FleetChanges) -> set[int]:
        """Put the rows that differ from those known; returns the workers whose ledger must be read."""
        fleet = self.fleet
        changed: set[int] = set()
        self.changed_by_others = 0
        for n, worker in enumerate(sorted(changes.workers, key=_by_id), 1):
            w = fleet.position.get(worker.id)
            if w is None or fleet.worker_version[w] != worker.version:
                before = None if w is None else fleet.row(w).state
                fleet.put_worker(worker)
                if before not in (None, worker.state):
                    self._on_state(worker, before)
                changed.add(worker.id)
                self.changed_by_others += 1
            if n % _CHUNK == 0:
                await anyio.lowlevel.checkpoint()
        for n, gpu in enumerate(sorted(changes.gpus, key=_by_id), 1):
            place = fleet.slot.get(gpu.id)
            if place is None or fleet.gpu_version[place] != gpu.version:
                fleet.put_gpu(gpu)
                changed.add(gpu.worker_id)
                self.changed_by_others += 1
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

    async def committed(self, results: Iterable[CommitResult]) -> None:
        """Acknowledge a commit: confirm what was booked, forget what was refused. Call with `lock` held."""
        booked: set[int] = set()
        for result in results:
            if result.code is None:
                booked.update(self.fleet.confirm(result.instance_id))
            else:
                self.fleet.forget(result.instance_id)
        if booked:
            await self._read_bookings(booked, sorted(booked))

    async def _read_bookings(self, workers: set[int], ask_for: list[int] | None) -> None:
        """Take over the ledger of these workers; `ask_for` None = read all of it."""
        by_worker: dict[int, list[Booking]] = defaultdict(list)
        for booking in await self._store.bookings(ask_for):
            by_worker[booking.worker_id].append(booking)
        for worker_id in workers:
            self.fleet.set_bookings(worker_id, by_worker.get(worker_id, ()))

    def reload_next(self) -> None:
        """Rows were deleted: only a complete read shows which."""
        self._complete_next = True
