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

from gpustackd.daemon.queue.key_queue import KeyQueue
from gpustackd.daemon.scheduling.backoff import Backoff
from gpustackd.daemon.scheduling.fleet_feed import FleetFeed
from gpustackd.daemon.surface.reporter import Reporter
from gpustackd.domain.model_spec import Strategy
from gpustackd.errors import BadRow, Contended, DatabaseUnavailable
from gpustackd.ports import ReplicaSnapshot, ReplicaStore, SyncResult, Wake
from gpustackd.replicas.names import free_names
from gpustackd.replicas.placement_score import PlacementScores
from gpustackd.replicas.ranking import ranked
from gpustackd.replicas.replica import Replica
from gpustackd.replicas.retention_score import RetentionWeights
from gpustackd.replicas.roles import role_numbers
from gpustackd.replicas.schedule import ScheduledReplicas, scheduled_replicas, usable_schedule
from gpustackd.replicas.sync_plan import MAX_REPLICAS, ReplicaTarget, SyncPlan, sync_plan

AT_ONCE = 8
"""Models brought to their number at the same time, at most."""
_TRIES = 4
_MOST_AT_ONCE = 2000
"""Instances added in one transaction; a larger number takes several."""
_SPARE = 8
_LONGEST_WAIT = 86_400.0
_FEW = 16
"""Models that are brought to their numbers one after another, so that their instances come in their order; of
more, several at once."""
_WORD = 0.005
"""Seconds in which the word of a commit is heard."""
_HAIR = 0.002
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


class Numbers:
    """What was heard of models' numbers, gathered until somebody looks. Outlives sessions."""

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._full = True
        self._event = anyio.Event()

    def tell(self, wake: Wake) -> None:
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
        found = None if self._full else sorted(self._ids)
        self._full, self._ids = False, set()
        return found


class ReplicaSync:
    """One per session; `run` until cancelled."""

    def __init__(
        self,
        *,
        store: ReplicaStore,
        view: FleetFeed,
        numbers: Numbers,
        policy: ReplicaPolicy,
        reports: Reporter,
        clock: Callable[[], float],
        chance: Random,
    ) -> None:
        self._store = store
        self._view = view
        self._numbers = numbers
        self._policy = policy
        self._reports = reports
        self._busy = Backoff(chance, first=0.1, ceiling=5.0, spread=0.5)
        self._waits: dict[int, int] = {}
        """Model id -> how often in a row somebody else was at it."""
        self._told: dict[int, str] = {}
        """Model id -> what was last said of its row."""
        self._in_turn = anyio.Lock()
        self._even = anyio.Event()
        self.queue: KeyQueue[int] = KeyQueue(clock, Backoff(chance, first=1.0, ceiling=300.0))

    async def run(self) -> None:
        self._numbers.rescan()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear)
            for _ in range(self._policy.at_once):
                tasks.start_soon(self._work)

    async def _hear(self) -> None:
        while True:
            ids = await self._numbers.next()
            try:
                found = await self._store.out_of_sync(ids)
            except Contended:
                self._reports.contended("replicas")
                await anyio.sleep(1)
                self._numbers.rescan()
                continue
            for model_id in found:
                self.queue.add(model_id)

    async def settled(self, patience: float) -> bool:
        """Wait until no model waits for its number, `patience` seconds at most, so that what is asked for
        together stands in the queue together. Returns whether there was anything to wait for."""
        if not self.queue.busy:
            return False
        with anyio.move_on_after(patience):
            while self.queue.busy:
                await self._even.wait()
            await anyio.sleep(_WORD)
        return True

    async def _work(self) -> None:
        while True:
            item = await self.queue.get()
            assert item is not None
            try:
                if self.queue.busy <= _FEW:
                    async with self._in_turn:
                        await self._attend(item.key)
                else:
                    await self._attend(item.key)
            finally:
                self.queue.done(item.key)
                if not self.queue.busy:
                    self._even.set()
                    self._even = anyio.Event()

    async def _attend(self, model_id: int) -> None:
        try:
            again = await self.bring(model_id)
        except DatabaseUnavailable:
            raise
        except Contended:
            self._reports.contended("replicas")
            again = self.queue.backoff(model_id)
        except Exception as error:
            self._reports.unexpected("replicas", error, model=model_id)
            again = self.queue.backoff(model_id)
        else:
            self.queue.forget(model_id)
        if again is not None:
            self.queue.add_after(model_id, min(again, _LONGEST_WAIT) + _HAIR)

    # -- one model ------------------------------------------------------------------------------------------

    async def bring(self, model_id: int) -> float | None:
        """Bring one model to its number; seconds until it has to be looked at again by itself."""
        spare = _SPARE
        for _ in range(_TRIES):
            seen = await self._store.replicas(model_id)
            if seen is None:
                self._told.pop(model_id, None)
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
            again = _sooner(todo.due_in, _seconds(seen.now, number.until))
            if todo.is_empty:
                self._waits.pop(model_id, None)
                return again
            names = [free_names(seen.name, s.number + spare, seen.names, s.role) for s in todo.add]
            outcome = await self._store.sync(seen, number.replicas, todo, names)
            self._reports.replicas_tried(str(outcome))
            if outcome is SyncResult.DONE:
                self._waits.pop(model_id, None)
                self._reports.replicas_synced(seen, number.replicas, todo)
                return 0.0 if _cut(todo) else again
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
            self._bad(seen, "scaling_schedule: is not for models with roles; it is passed over")
        elif problems:
            self._bad(seen, "; ".join(str(p) for p in problems[:3]))
        if planned.is_active and not seen.roles:
            return scheduled_replicas(planned, seen.now, self._zone(seen))
        if seen.replicas is not None and seen.replicas > MAX_REPLICAS:
            self._bad(seen, f"replicas: {seen.replicas} is more than {MAX_REPLICAS}, the limit of one model")
            return None
        return None if seen.replicas is None else ScheduledReplicas(seen.replicas, None)

    def _zone(self, seen: ReplicaSnapshot) -> ZoneInfo:
        try:
            return ZoneInfo(self._policy.zone or seen.zone)
        except (KeyError, ValueError, OSError):
            self._bad(seen, f"the database's time zone {seen.zone} is not known here: UTC is used; set one")
            return ZoneInfo("UTC")

    async def _steps(self, seen: ReplicaSnapshot, number: int) -> SyncPlan | None:
        """None = the row says of its roles what cannot be used; it is left alone."""
        try:
            roles = role_numbers(seen.roles)
        except BadRow as error:
            self._bad(seen, str(error))
            return None
        if len(seen.instances) > number or any(r.draining_for is not None for r in seen.instances):
            await self._view.refresh()
        places = PlacementScores(
            self._view.fleet, seen.model_id, self._strategy(seen), self._policy.weights.placement
        )

        def rank(candidates: Sequence[Replica]) -> Sequence[Replica]:
            groups = {c.group_id for c in candidates if c.role is not None}
            peers = [r for r in seen.instances if r.group_id in groups] if groups else None
            return ranked(candidates, self._policy.weights, places, peers)

        window = self._policy.group_window if roles else self._policy.window
        return _bounded(sync_plan(ReplicaTarget(number, roles, window), seen.instances, rank))

    def _strategy(self, seen: ReplicaSnapshot) -> Strategy:
        named = seen.placement_strategy
        return Strategy(named) if named in set(Strategy) else self._policy.strategy

    def _bad(self, seen: ReplicaSnapshot, problem: str) -> None:
        """Say it once, not at every look."""
        if self._told.get(seen.model_id) != problem:
            self._told[seen.model_id] = problem
            self._reports.event("warning", "row.bad", model=seen.name, reason=problem)


def _bounded(todo: SyncPlan) -> SyncPlan:
    """At most so many rows in one transaction."""
    return replace(
        todo, add=tuple(replace(seat, number=min(seat.number, _MOST_AT_ONCE)) for seat in todo.add)
    )


def _cut(todo: SyncPlan) -> bool:
    return any(seat.number == _MOST_AT_ONCE for seat in todo.add)


def _seconds(now: datetime, until: datetime | None) -> float | None:
    return None if until is None else (until - now).total_seconds()


def _sooner(*times: float | None) -> float | None:
    return min((t for t in times if t is not None), default=None)
