"""Aftercare: placed instances that nobody takes, that fail, or that are to leave their worker.

What is done about a failure is decided by `replicas.restart`; before a place is given up, a decision in
memory looks whether there is another one.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from gpustackd.daemon.reconcile.worker_health import WorkerHealth
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.recovery_reporter import RecoveryReporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.placement_hints import AvoidedPlace, with_claim_raise
from gpustackd.domain.timeouts import Timeouts, Watch
from gpustackd.errors import Contended, DatabaseUnavailable
from gpustackd.replicas.crash_backoff import FailedInstance, RestartAction, RestartDecision, decide_restart
from gpustackd.store.postgres.health import LIMIT, WorkerHealthStore
from gpustackd.store.postgres.lifecycle import FailedRow, InstanceLifecycleStore, LeavingRow

_READING = 5.0
"""Seconds of one round in which models may be read; who comes later is restarted where it is."""


class InstanceRecovery:
    """Runs until cancelled; a new one begins with every session."""

    def __init__(
        self,
        *,
        health: WorkerHealthStore,
        lifecycle: InstanceLifecycleStore,
        workers: WorkerHealth,
        windows: Timeouts,
        view: FleetFeed,
        catalogue: ModelCatalog,
        judge: Decider,
        paths: PathProbe,
        reports: RecoveryReporter,
        clock: Callable[[], float],
    ) -> None:
        self._health = health
        self._lifecycle = lifecycle
        self._workers = workers
        self._windows = windows
        self._view = view
        self._catalogue = catalogue
        self._judge = judge
        self._paths = paths
        self._reports = reports
        self._clock = clock
        self._watch = Watch(windows.gap)
        self._read_until = 0.0

    async def run(self) -> None:
        while True:
            await anyio.sleep(self._windows.care)
            try:
                await self.look()
            except Contended:
                self._reports.contended("aftercare")
            except DatabaseUnavailable:
                raise
            except Exception as error:  # one row that trips this must not stop what places the others
                self._reports.unexpected("aftercare", error)

    async def look(self) -> None:
        """One round."""
        watched = self._watch.look(self._clock(), await self._health.clock())
        self._read_until = self._clock() + _READING
        while True:
            moved = await self._health.overdue(watched)
            self._reports.moved(moved)
            if len(moved) < LIMIT:
                break
        self._watch.done()
        if failed := await self._lifecycle.failed():
            await self._mend(failed)
        if self._workers.draining and (leaving := await self._lifecycle.leaving()):
            await self._drain(leaving)

    # -- failed ---------------------------------------------------------------------------------------

    async def _mend(self, rows: list[FailedRow]) -> None:
        again: list[FailedRow] = []
        for row in rows:
            step = decide_restart(self._failed(row))
            if step.action is RestartAction.GIVE_UP:
                self._reports.hopeless(row)
            elif step.action is RestartAction.RESTART or (
                step.action in (RestartAction.MOVE, RestartAction.RAISE_CLAIM)
                and not await self._replace(row, step)
            ):
                again.append(row)
        if again:
            done = await self._lifecycle.restart(again)
            for row in again:
                if row.id in done:
                    self._reports.restarted(row)

    def _failed(self, row: FailedRow) -> FailedInstance:
        return FailedInstance(
            id=row.id,
            restart_count=row.restart_count,
            failures=row.failures,
            since=row.since,
            message=row.message,
            vram=row.vram,
            ram=row.ram,
            gpus=len(row.gpu_ids),
            model_version=row.model_version,
            edited=row.edited,
            claim_raise=row.hints.claim_raise,
            first_delay=self._windows.backoff,
        )

    async def _replace(self, row: FailedRow, step: RestartDecision) -> bool:
        """Give its place up, if there is another one. False = there is none, or it is not known."""
        demand = await self._demand(row.model_id)
        if demand is None:
            return False
        avoid: AvoidedPlace | None = None
        if step.action is RestartAction.MOVE:
            before = any(a.worker_id == row.worker_id for a in row.hints.avoid)
            avoid = AvoidedPlace(row.worker_id, () if step.whole_worker or before else row.gpu_ids)
        more = step.claim_raise or row.hints.claim_raise
        shunned = (*row.hints.avoid, avoid) if avoid is not None else ()
        if self._judge.anew(with_claim_raise(demand, more), row.id, row.name, shunned) is None:
            return False
        if avoid is None:
            cause, why = (
                "out_of_memory",
                f"it ran out of memory on worker {row.worker}; more is booked for it",
            )
        else:
            cause, why = "failed", f"it failed {row.failures} times on worker {row.worker}"
        text = f"{why}; the instance is placed anew"
        if not await self._lifecycle.replace(row, text, avoid, self._windows.avoid, step.claim_raise):
            return True  # somebody else did something about it
        self._reports.replaced(row, cause, f"{why}: {row.message or ''}"[:1000])
        return True

    # -- to leave -------------------------------------------------------------------------------------

    async def _drain(self, rows: list[LeavingRow]) -> None:
        """Those that do not serve go at once; of the others one a round from each worker."""
        left: set[str] = set()
        for row in rows:
            serves = row.state == InstanceState.RUNNING
            if not row.overdue:
                if serves and row.worker in left:
                    continue
                if serves and row.running - 1 < row.least:
                    self._reports.held(row, f"{row.running} replicas run, and {row.least} have to go on")
                    continue
                if not await self._could_leave(row):
                    self._reports.held(row, "there is no other place for it now")
                    continue
            if await self._lifecycle.drain(row):
                self._reports.drained(row)
                if serves:
                    left.add(row.worker)

    async def _could_leave(self, row: LeavingRow) -> bool:
        demand = await self._demand(row.model_id)
        if demand is None:
            return False
        return (
            self._judge.anew(with_claim_raise(demand, row.hints.claim_raise), row.id, row.name, ())
            is not None
        )

    # -- deciding -------------------------------------------------------------------------------------

    async def _demand(self, model_id: int) -> Demand | None:
        """What the model asks, on a view that is up to date; None where that cannot be known soon."""
        found = None
        await self._catalogue.load([model_id])
        with anyio.move_on_after(max(self._read_until - self._clock(), 0.0)):
            found = await self._catalogue.read(model_id)
            if isinstance(found, Demand) and self._paths.in_the_way(found.spec):
                await self._paths.look(found.spec)
        await self._view.refresh()
        return found if isinstance(found, Demand) else None
