"""Instance recovery: placed instances that nobody takes, that fail, or that are to leave their worker.

What is done about a failure is decided by `replicas.crash_backoff`; before a place is given up, a decision in
memory looks whether there is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.reconcile.worker_health import WorkerHealth
from gpustackd.daemon.scheduling.decider import Decider
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.scheduling.model_catalog import ModelCatalog
from gpustackd.daemon.scheduling.path_probe import PathProbe
from gpustackd.daemon.surface.reporter import RecoveryReporter
from gpustackd.domain.demand import Demand
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.placement_hints import AvoidedPlace, with_claim_raise
from gpustackd.domain.timeouts import ObservationPeriod, Timeouts
from gpustackd.replicas.crash_backoff import FailedInstance, RestartAction, RestartDecision, decide_restart
from gpustackd.store.postgres.instance_recovery import FailedRow, InstanceRecoveryStore, LeavingRow
from gpustackd.store.postgres.worker_health import BATCH, WorkerHealthStore

_READING = 5.0
"""Seconds of one round in which models may be read; who comes later is restarted where it is."""


@dataclass(frozen=True, slots=True)
class PlacementKnowledge:
    """What another decision for a placed instance needs."""

    fleet_feed: FleetFeed
    catalog: ModelCatalog
    path_probe: PathProbe
    decider: Decider


class InstanceRecovery:
    """A new one begins with every session."""

    name = "instance recovery"

    def __init__(
        self,
        *,
        health: WorkerHealthStore,
        lifecycle: InstanceRecoveryStore,
        workers: WorkerHealth,
        timeouts: Timeouts,
        knowledge: PlacementKnowledge,
        reporter: RecoveryReporter,
        clock: Callable[[], float],
    ) -> None:
        self._health = health
        self._lifecycle = lifecycle
        self._workers = workers
        self._timeouts = timeouts
        self._fleet_feed = knowledge.fleet_feed
        self._catalog = knowledge.catalog
        self._path_probe = knowledge.path_probe
        self._decider = knowledge.decider
        self._reporter = reporter
        self._clock = clock
        self._watch = ObservationPeriod(timeouts.max_gap)
        self._read_until = 0.0

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled."""
        task_status.started()
        while True:
            await anyio.sleep(self._timeouts.recovery_interval)
            with self._reporter.contained(self.name):
                await self._recover()

    async def _recover(self) -> None:
        """One round."""
        watched = self._watch.begin(self._clock(), await self._health.clock())
        self._read_until = self._clock() + _READING
        while True:
            moved = await self._health.requeue_overdue(watched)
            self._reporter.moved(moved)
            if len(moved) < BATCH:
                break
        self._watch.complete()
        if failed := await self._lifecycle.failed():
            await self._handle_failed(failed)
        if self._workers.draining and (leaving := await self._lifecycle.leaving()):
            await self._drain(leaving)

    # -- failed ---------------------------------------------------------------------------------------

    async def _handle_failed(self, rows: list[FailedRow]) -> None:
        again: list[FailedRow] = []
        for row in rows:
            step = decide_restart(self._failed_instance(row))
            if step.action is RestartAction.GIVE_UP:
                self._reporter.hopeless(row)
            elif step.action is RestartAction.RESTART or (
                step.action in (RestartAction.MOVE, RestartAction.RAISE_CLAIM)
                and not await self._replace(row, step)
            ):
                again.append(row)
        if again:
            done = await self._lifecycle.restart(again)
            for row in again:
                if row.id in done:
                    self._reporter.restarted(row)

    def _failed_instance(self, row: FailedRow) -> FailedInstance:
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
            first_delay=self._timeouts.backoff,
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
        avoided = (*row.hints.avoid, avoid) if avoid is not None else ()
        if self._decider.find_other_place(with_claim_raise(demand, more), row.id, row.name, avoided) is None:
            return False
        if avoid is None:
            cause, why = (
                "out_of_memory",
                f"it ran out of memory on worker {row.worker}; more is booked for it",
            )
        else:
            cause, why = "failed", f"it failed {row.failures} times on worker {row.worker}"
        text = f"{why}; the instance is placed anew"
        if not await self._lifecycle.replace(row, text, avoid, self._timeouts.avoid, step.claim_raise):
            return True  # somebody else did something about it
        self._reporter.replaced(row, cause, f"{why}: {row.message or ''}"[:1000])
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
                if serves and row.running - 1 < row.min_running:
                    self._reporter.drain_held(
                        row, f"{row.running} replicas run, and {row.min_running} have to go on"
                    )
                    continue
                if not await self._could_leave(row):
                    self._reporter.drain_held(row, "there is no other place for it now")
                    continue
            if await self._lifecycle.drain(row):
                self._reporter.drained(row)
                if serves:
                    left.add(row.worker)

    async def _could_leave(self, row: LeavingRow) -> bool:
        demand = await self._demand(row.model_id)
        if demand is None:
            return False
        return (
            self._decider.find_other_place(
                with_claim_raise(demand, row.hints.claim_raise), row.id, row.name, ()
            )
            is not None
        )

    # -- deciding -------------------------------------------------------------------------------------

    async def _demand(self, model_id: int) -> Demand | None:
        """What the model asks, with the fleet up to date; None where that cannot be known soon."""
        demand = None
        await self._catalog.load([model_id])
        with anyio.move_on_after(max(self._read_until - self._clock(), 0.0)):
            demand = await self._catalog.read(model_id)
            if isinstance(demand, Demand) and self._path_probe.may_hold_up(demand.spec):
                await self._path_probe.look(demand.spec)
        await self._fleet_feed.refresh()
        return demand if isinstance(demand, Demand) else None
