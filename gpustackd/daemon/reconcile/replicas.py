"""Keeping models at their number of replicas: adds what is missing, removes what is too much.

Any number of daemons does this at once. Each looks for itself; the write holds only where everything is still
as it was seen, so that one of them does it and the others find it done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from random import Random
from zoneinfo import ZoneInfo

import anyio
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from gpustackd.daemon.backoff import Backoff
from gpustackd.daemon.queue.key_queue import KeyQueue
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.model_spec import Strategy
from gpustackd.errors import BadRow, Contended, DatabaseUnavailable
from gpustackd.ports import ReplicaSnapshot, ReplicaStore, SyncResult, Wake
from gpustackd.replicas.names import free_names
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.ranking import deletion_order
from gpustackd.replicas.replica import Replica
from gpustackd.replicas.retention_score import RetentionWeights
from gpustackd.replicas.schedule import ScheduledReplicas, scheduled_replicas, usable_schedule
from gpustackd.replicas.sync_plan import MAX_REPLICAS, ReplicaTarget, SyncPlan, role_numbers, sync_plan

AT_ONCE = 8
"""Models brought to their number at the same time, at most."""
_TRIES = 4
_ADDED_AT_ONCE = 2000
"""Instances added in one transaction; a larger number takes several."""
_SPARE_NAMES = 8
_LONGEST_WAIT = 86_400.0
_FEW = 16
"""Models that are brought to their numbers one after another, so that their instances come in their order; of
more, several at once."""
_NOTIFY_DELAY = 0.005
"""Seconds in which the notification of a commit arrives."""
_CLOCK_SKEW = 0.002
"""Seconds: a clock of ours that runs faster than the database's must not look too early."""


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """What the settings say of replicas. Windows in seconds."""

    weights: RetentionWeights = field(default_factory=RetentionWeights)
    strategy: Strategy = Strategy.SPREAD
    """Where a model names none."""
    window: float = 0.0
    """Drain window of models without roles."""
    group_window: float = 60.0
    zone: str | None = None
    """Calendar of scaling windows; None = the database's."""
    at_once: int = AT_ONCE


class ReplicaWakeups:
    """Models whose number may not be right, gathered until somebody looks. One per process."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._full = True
        self._event = anyio.Event()

    def notify(self, wake: Wake) -> None:
        """These models may have the wrong number; without ids, any may."""
        self._ids.update(wake.ids)
        self._full |= not wake.ids
        self._event.set()

    def rescan(self) -> None:
        """Look at every model."""
        self._full = True
        self._event.set()

    async def next(self) -> list[int] | None:
        """Models to look at; None = all."""
        while not (self._full or self._ids):
            self._event = anyio.Event()
            await self._event.wait()
        ids = None if self._full else sorted(self._ids)
        self._full, self._ids = False, set()
        return ids


class ReplicaSync:
    """One per session."""

    name = "replica sync"

    def __init__(
        self,
        *,
        store: ReplicaStore,
        fleet_feed: FleetFeed,
        wakeups: ReplicaWakeups,
        policy: ReplicaPolicy,
        reporter: Reporter,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self._store = store
        self._fleet_feed = fleet_feed
        self._wakeups = wakeups
        self._policy = policy
        self._reporter = reporter
        self._busy = Backoff(rng, first=0.1, ceiling=5.0, spread=0.5)
        self._waits: dict[int, int] = {}
        """Model id -> how often in a row another replica was at it."""
        self._problems: dict[int, str] = {}
        """Model id -> what was last reported of its row."""
        self._one_at_a_time = anyio.Lock()
        self._all_synced = anyio.Event()
        self.queue: KeyQueue[int] = KeyQueue(clock, Backoff(rng, first=1.0, ceiling=300.0))

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Begins with a look at every model."""
        self._wakeups.rescan()
        task_status.started()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._enqueue)
            for _ in range(self._policy.at_once):
                tasks.start_soon(self._work)

    async def _enqueue(self) -> None:
        while True:
            ids = await self._wakeups.next()
            try:
                out_of_sync = await self._store.out_of_sync(ids)
            except Contended:
                self._reporter.contended(self.name)
                await anyio.sleep(1)
                self._wakeups.rescan()
                continue
            for model_id in out_of_sync:
                self.queue.add(model_id)

    async def wait_until_synced(self, patience: float) -> bool:
        """Wait until no model waits for its number, `patience` seconds at most, so that what is asked for
        together stands in the queue together. Returns whether there was anything to wait for."""
        if not self.queue.busy:
            return False
        with anyio.move_on_after(patience):
            while self.queue.busy:
                await self._all_synced.wait()
            await anyio.sleep(_NOTIFY_DELAY)
        return True

    async def _work(self) -> None:
        while True:
            model_id = await self.queue.get()
            try:
                if self.queue.busy <= _FEW:
                    async with self._one_at_a_time:
                        await self._sync_or_retry(model_id)
                else:
                    await self._sync_or_retry(model_id)
            finally:
                self.queue.done(model_id)
                if not self.queue.busy:
                    self._all_synced.set()
                    self._all_synced = anyio.Event()

    async def _sync_or_retry(self, model_id: int) -> None:
        try:
            again = await self.sync_model(model_id)
        except DatabaseUnavailable:
            raise
        except Contended:
            self._reporter.contended(self.name)
            again = self.queue.backoff(model_id)
        except Exception as error:
            self._reporter.unexpected(self.name, error, model=model_id)
            again = self.queue.backoff(model_id)
        else:
            self.queue.forget(model_id)
        if again is not None:
            self.queue.add_after(model_id, min(again, _LONGEST_WAIT) + _CLOCK_SKEW)

    # -- one model ------------------------------------------------------------------------------------------

    async def sync_model(self, model_id: int) -> float | None:
        """Bring one model to its number; seconds until it has to be looked at again by itself."""
        spare = _SPARE_NAMES
        for _ in range(_TRIES):
            seen = await self._store.replicas(model_id)
            if seen is None:
                self._problems.pop(model_id, None)
                return None
            number = self._number(seen)
            if number is None:
                return None
            if number.replicas != seen.replicas and not await self._store.set_replicas(
                seen, number.replicas, number.until
            ):
                break
            todo = await self._steps(seen, number.replicas)
            if todo is None:
                return None
            again = _earliest(todo.due_in, _seconds(seen.now, number.until))
            if todo.is_empty:
                self._waits.pop(model_id, None)
                return again
            names = [free_names(seen.name, s.number + spare, seen.names, s.role) for s in todo.add]
            outcome = await self._store.sync(seen, number.replicas, todo, names)
            self._reporter.replicas_tried(str(outcome))
            if outcome is SyncResult.DONE:
                self._waits.pop(model_id, None)
                self._reporter.replicas_synced(seen, number.replicas, todo)
                return 0.0 if _was_limited(todo) else again
            if outcome is SyncResult.GONE:
                return None
            if outcome is SyncResult.TAKEN:
                spare *= 8
            if outcome is SyncResult.BUSY:
                break
        waits = self._waits.get(model_id, 0)
        self._waits[model_id] = waits + 1
        return self._busy.seconds(waits)

    def _number(self, seen: ReplicaSnapshot) -> ScheduledReplicas | None:
        """The number by the schedule where it says one, else by the column; None = left alone."""
        planned, problems = usable_schedule(seen.scaling_schedule)
        if planned.is_active and seen.roles:
            self._report_bad_row(seen, "scaling_schedule: not supported for models with roles; ignored")
        elif problems:
            self._report_bad_row(seen, "; ".join(str(p) for p in problems[:3]))
        if planned.is_active and not seen.roles:
            return scheduled_replicas(planned, seen.now, self._zone(seen))
        if seen.replicas is not None and seen.replicas > MAX_REPLICAS:
            self._report_bad_row(
                seen, f"replicas: {seen.replicas} is more than {MAX_REPLICAS}, the limit of one model"
            )
            return None
        return None if seen.replicas is None else ScheduledReplicas(seen.replicas, None)

    def _zone(self, seen: ReplicaSnapshot) -> ZoneInfo:
        try:
            return ZoneInfo(self._policy.zone or seen.zone)
        except (KeyError, ValueError, OSError):
            self._report_bad_row(
                seen,
                f"the database's time zone {seen.zone} is not known here; using UTC (set GPUSTACKD_TIMEZONE)",
            )
            return ZoneInfo("UTC")

    async def _steps(self, seen: ReplicaSnapshot, number: int) -> SyncPlan | None:
        """None = the row's roles cannot be used; the model is left alone."""
        try:
            roles = role_numbers(seen.roles)
        except BadRow as error:
            self._report_bad_row(seen, str(error))
            return None
        if len(seen.instances) > number or any(r.draining_for is not None for r in seen.instances):
            await self._fleet_feed.refresh()
        places = PlacementScores(
            self._fleet_feed.fleet, seen.model_id, self._strategy(seen), self._policy.weights.placement
        )

        def rank(candidates: Sequence[Replica]) -> Sequence[Replica]:
            groups = {c.group_id for c in candidates if c.role is not None}
            peers = [r for r in seen.instances if r.group_id in groups] if groups else None
            return deletion_order(candidates, self._policy.weights, places, peers)

        window = self._policy.group_window if roles else self._policy.window
        return _limited(sync_plan(ReplicaTarget(number, roles, window), seen.instances, rank))

    def _strategy(self, seen: ReplicaSnapshot) -> Strategy:
        named = seen.placement_strategy
        return Strategy(named) if named in set(Strategy) else self._policy.strategy

    def _report_bad_row(self, seen: ReplicaSnapshot, problem: str) -> None:
        """Once, not at every look."""
        if self._problems.get(seen.model_id) != problem:
            self._problems[seen.model_id] = problem
            self._reporter.event("warning", "row.bad", model=seen.name, reason=problem)


def _limited(todo: SyncPlan) -> SyncPlan:
    """At most so many rows in one transaction."""
    return replace(
        todo, add=tuple(replace(seat, number=min(seat.number, _ADDED_AT_ONCE)) for seat in todo.add)
    )


def _was_limited(todo: SyncPlan) -> bool:
    return any(seat.number == _ADDED_AT_ONCE for seat in todo.add)


def _seconds(now: datetime, until: datetime | None) -> float | None:
    return None if until is None else (until - now).total_seconds()


def _earliest(*times: float | None) -> float | None:
    return min((t for t in times if t is not None), default=None)
