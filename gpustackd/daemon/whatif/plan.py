"""What would happen if documents were applied now: every instance decided in memory, in the queue's order.

The library function behind `gpustackd plan`. It takes a copy of the database on which the documents are
already written (`store.memory.overlay`) and decides as a session does: the same catalog, decider and policy,
one instance after the other, each seeing what those before it took. Nothing is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, tzinfo
from types import MappingProxyType
from zoneinfo import ZoneInfo

from gpustackd.daemon.whatif.snapshot import Snapshot
from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import NoFit, Outcome
from gpustackd.domain.placement_hints import NO_HINTS, PlacementHints, with_claim_raise
from gpustackd.ports import WaitingInstance
from gpustackd.replicas.names import free_names
from gpustackd.replicas.schedule import ScalingSchedule, scheduled_replicas, usable_schedule
from gpustackd.replicas.sync_plan import MAX_REPLICAS
from gpustackd.store.memory.overlay import Overlay, OverlayResult
from gpustackd.store.memory.store import MemoryStore

READ_OTHERS_WITHIN = 5.0
"""Seconds for the models of instances that wait too, but are no part of the plan."""
_NOT_YET = -1
"""Where an instance would come from that a schedule asks for at its peak."""


@dataclass(frozen=True, slots=True)
class PlannedDecision:
    """One instance and what was decided for it."""

    id: int
    name: str
    model_id: int
    model: str
    outcome: Outcome
    new: bool
    """Not in the database yet."""
    asked: bool = True
    """Part of the plan; False = it waits already and would be tried too."""

    @property
    def placed(self) -> bool:
        return not isinstance(self.outcome, NoFit)


@dataclass(frozen=True, slots=True)
class Peak:
    """What a model's scaling schedule asks for at most, and how many of these have or would find a place."""

    replicas: int
    placed: int


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """One model of the plan: `placed` of `instances` have a place afterwards."""

    id: int
    name: str
    new: bool
    instances: int
    placed: int
    added: int
    """Of these new."""
    peak: Peak | None = None
    impossible: bool = False
    """Its number is one that no daemon brings about."""

    @property
    def fits(self) -> bool:
        return self.placed == self.instances and not self.impossible


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `snapshot` holds the fleet as it would be, for whoever wants to show it."""

    models: tuple[PlannedInstance, ...]
    trials: tuple[PlannedDecision, ...]
    """In the order in which they were decided."""
    warnings: tuple[str, ...]
    snapshot: Snapshot = field(compare=False)

    @property
    def fits(self) -> bool:
        """Whether everything that the documents ask for has a place."""
        return all(m.fits for m in self.models)


class Planner:
    """Makes one plan on one copy."""

    def __init__(
        self,
        store: MemoryStore,
        overlay: Overlay,
        snapshot: Snapshot,
        hints: Mapping[int, PlacementHints] = MappingProxyType({}),
    ) -> None:
        """`hints` of instances that wait, by id: what their failures elsewhere taught."""
        self._store = store
        self._hints = hints
        self._overlay = overlay
        self._snapshot = snapshot
        self._warnings: list[str] = []
        self._impossible: set[int] = set()
        """Models whose number no daemon brings about."""

    async def plan(
        self,
        before: Iterable[int],
        *,
        decreasing: bool = False,
        zone: str = "UTC",
        now: datetime | None = None,
    ) -> Plan:
        """Decide for everything that the documents ask for. `before`: ids of instances that were there
        already; `zone` is the calendar of scaling windows. Raises DatabaseUnavailable."""
        done = self._overlay.done
        there = set(before)
        schedules = {m: self._schedule(m) for m in done.models}
        for model_id in sorted(done.models):
            self._add_replicas(model_id, schedules[model_id], now or datetime.now(UTC), zone)
        queue = await self._queue(done)
        await self._read({w.model_id for w in queue}, set(done.models))
        self._snapshot.expect(Counter(w.model_id for w in queue))
        trials = [self._trial(w, w.id not in there) for w in self._snapshot.in_order(queue)]
        placed = {t.id for t in trials if t.placed}
        models = [self._of(m, placed, there, schedules[m]) for m in done.models]
        self._warnings += self._snapshot.remarks
        return Plan(tuple(models), tuple(trials), tuple(self._warnings), self._snapshot)

    # -- who is tried ---------------------------------------------------------------------------------

    def _schedule(self, model_id: int) -> ScalingSchedule:
        row = self._store.database.models[model_id]
        planned, problems = usable_schedule(row.columns.get("scaling_schedule"))
        self._warnings += [f"model {row.name}: {problem}" for problem in problems]
        return planned

    def _add_replicas(self, model_id: int, planned: ScalingSchedule, now: datetime, zone: str) -> None:
        """Instances that the daemon would add so that the model has its number."""
        row = self._store.database.models[model_id]
        number = (
            scheduled_replicas(planned, now, _calendar(zone)).replicas
            if planned.is_active
            else row.columns.get("replicas")
        )
        there = [i for i in self._store.database.model_instances.values() if i.model_id == model_id]
        if number is None:
            if not there:
                self._warnings.append(
                    f"model {row.name} says no replicas and has no instances: nothing is planned for it"
                )
            return
        if number > MAX_REPLICAS:
            self._warnings.append(
                f"model {row.name} asks for {number} replicas; the limit of one model is {MAX_REPLICAS}:"
                " daemons leave it as it is"
            )
            self._impossible.add(model_id)
            return
        if number < len(there):
            self._warnings.append(
                f"model {row.name} has {len(there)} instances and asks for {number}: the daemon takes"
                f" {len(there) - number} away, which is not part of the plan"
            )
        self._insert(model_id, number - len(there))

    def _insert(self, model_id: int, number: int) -> list[int]:
        row = self._store.database.models[model_id]
        taken = {i.name for i in self._store.database.model_instances.values()}
        names = free_names(row.name, max(number, 0), taken)
        return self._overlay.insert_named(names, model_id=model_id)

    async def _queue(self, done: OverlayResult) -> list[WaitingInstance]:
        """Who waits and would be tried: everything of these models, what nobody has looked at yet, and where
        the fleet changes everybody."""
        rows = await self._store.waiting(None)
        ours = set(done.models)
        return [w for w in rows if done.fleet or w.model_id in ours or w.signature is None]

    async def _read(self, models: set[int], ours: set[int]) -> None:
        await self._snapshot.read(models & ours)
        if models - ours:
            await self._snapshot.read(models - ours, within=READ_OTHERS_WITHIN)

    # -- deciding -------------------------------------------------------------------------------------

    def _trial(self, w: WaitingInstance, new: bool) -> PlannedDecision:
        name = self._store.database.models[w.model_id].name
        asked = w.model_id in self._overlay.done.models
        return PlannedDecision(w.id, w.name, w.model_id, name, self._decide(w), new, asked)

    def _decide(self, w: WaitingInstance) -> Outcome:
        snapshot = self._snapshot
        demand = snapshot.demand(w.model_id)
        if isinstance(demand, NoFit):
            return demand
        hints = self._hints.get(w.id, NO_HINTS)
        outcome, _ = snapshot.decider.decide(
            with_claim_raise(demand, hints.claim_raise), w.id, w.name, hints.avoid
        )
        if not isinstance(outcome, NoFit):
            backend = demand.spec.effective_backend
            snapshot.fleet.assume(outcome.placement, w.id, w.model_id, backend)
        return outcome

    def _of(
        self, model_id: int, placed: set[int], there: set[int], planned: ScalingSchedule
    ) -> PlannedInstance:
        row = self._store.database.models[model_id]
        mine = [i for i in self._store.database.model_instances.values() if i.model_id == model_id]
        have = [i for i in mine if i.id in placed or i.worker_id is not None]
        added = sum(i.id not in there for i in mine)
        new = model_id in self._overlay.done.new_models
        peak = self._peak(model_id, planned, len(mine), len(have))
        impossible = model_id in self._impossible
        return PlannedInstance(model_id, row.name, new, len(mine), len(have), added, peak, impossible)

    def _peak(self, model_id: int, planned: ScalingSchedule, instances: int, placed: int) -> Peak | None:
        """The largest number that a schedule asks for, tried after everything else, and then given back."""
        if not planned.is_active or planned.peak <= instances:
            return Peak(planned.peak, min(planned.peak, placed)) if planned.is_active else None
        name = self._store.database.models[model_id].name
        taken = {i.name for i in self._store.database.model_instances.values()}
        demand = self._snapshot.demand(model_id)
        tried: list[int] = []
        if isinstance(demand, Demand) and placed == instances:
            fleet = self._snapshot.fleet
            for n, more in enumerate(free_names(name, planned.peak - instances, taken)):
                outcome, _ = self._snapshot.decider.decide(demand, _NOT_YET - n, more)
                if isinstance(outcome, NoFit):
                    break
                fleet.assume(outcome.placement, _NOT_YET - n, model_id, demand.spec.effective_backend)
                tried.append(_NOT_YET - n)
            for instance_id in tried:
                fleet.forget(instance_id)
        found = Peak(planned.peak, placed + len(tried))
        if found.placed < found.replicas:
            self._warnings.append(
                f"model {name}: its scaling schedule asks for {found.replicas} replicas at its peak, of which"
                f" {found.placed} would have a place"
            )
        return found


def _calendar(zone: str) -> tzinfo:
    """A zone by its name; servers may be set to one that only they know."""
    try:
        return ZoneInfo(zone)
    except (ValueError, OSError):
        return UTC
