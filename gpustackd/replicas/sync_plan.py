"""Which instances to add, delete or drain so that a model has the number of replicas it asks for.

Level-triggered: only the target and the present rows count, never what changed. Every row counts as a
replica, whatever its state, except those that drain: they are on their way out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gpustackd.domain.lifecycle import WorkerState
from gpustackd.errors import BadRow
from gpustackd.replicas.replica import Replica

MAX_REPLICAS = 100_000
"""Of one model: as many instances as the queue holds. A larger number is taken for a typing error."""

Ranking = Callable[[Sequence[Replica]], Sequence[Replica]]
"""Orders replicas of one role, the one to delete first in front."""


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """What a model asks for. With `roles` (name -> number), `replicas` is only a switch: 0 = none."""

    replicas: int
    roles: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    drain_window: float = 0.0
    """Seconds that a serving replica drains before it is deleted; 0 or less = it is deleted at once."""


@dataclass(frozen=True, slots=True)
class NewInstances:
    """`number` instances to insert; role and group for members of a group."""

    number: int
    role: str | None = None
    group_id: str | None = None


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """What to write: instances to insert, and ids of instances to delete, to drain or to stop draining."""

    add: tuple[NewInstances, ...] = ()
    delete: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()
    undrain: tuple[int, ...] = ()
    due_in: float | None = None
    """Seconds after which the next draining replica has to be deleted; None = none drains."""

    @property
    def is_empty(self) -> bool:
        """Whether the number is right already."""
        return not (self.add or self.delete or self.drain or self.undrain)


def role_numbers(value: Any) -> dict[str, int]:
    """Read `models.roles`: role name -> number of members; empty for a model without roles. Raises BadRow."""
    if value is None or value == []:
        return {}
    if not isinstance(value, list):
        raise BadRow("roles", "must be a list of roles")
    numbers: dict[str, int] = {}
    for n, role in enumerate(value):
        name = role.get("name") if isinstance(role, Mapping) else None
        if not isinstance(name, str) or not name:
            raise BadRow(f"roles[{n}].name", "is missing")
        number = role.get("replicas", 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise BadRow(f"roles[{n}].replicas", f"must be a whole number (it is {number!r})")
        if name in numbers:
            raise BadRow(f"roles[{n}].name", f"names the role {name} twice")
        numbers[name] = number
    return numbers


def sync_plan(target: ReplicaTarget, replicas: Sequence[Replica], rank: Ranking) -> SyncPlan:
    """What to do for a model with these instances."""
    if target.roles:
        return _group_plan(target, replicas, rank)
    if strays := [r.id for r in replicas if r.role is not None]:
        # The model had roles before; these rows run parts of a group that is no longer asked for.
        return SyncPlan(delete=tuple(sorted(strays)))
    return _plan(target.replicas, replicas, rank, target.drain_window, NewInstances(0))


def _group_plan(target: ReplicaTarget, replicas: Sequence[Replica], rank: Ranking) -> SyncPlan:
    """Each role of the current group on its own; members of other groups are deleted.

    A group is created elsewhere, as a whole; here its roles are kept at their numbers.
    """
    if target.replicas == 0:
        return SyncPlan(delete=tuple(sorted(r.id for r in replicas)))
    current = _current_group(replicas)
    strays = [r.id for r in replicas if r.group_id != current or r.role not in target.roles]
    plans = [SyncPlan(delete=tuple(strays))]
    if current is not None:
        for role, number in target.roles.items():
            members = [r for r in replicas if r.group_id == current and r.role == role]
            plans.append(_plan(number, members, rank, target.drain_window, NewInstances(0, role, current)))
    return SyncPlan(
        tuple(new for p in plans for new in p.add),
        tuple(sorted(i for p in plans for i in p.delete)),
        tuple(i for p in plans for i in p.drain),
        tuple(i for p in plans for i in p.undrain),
        min((p.due_in for p in plans if p.due_in is not None), default=None),
    )


def _current_group(replicas: Sequence[Replica]) -> str | None:
    """The group with most members; of equal ones the newest."""
    members = Counter(r.group_id for r in replicas if r.group_id is not None)
    newest = {r.group_id: r.created for r in sorted(replicas, key=lambda r: r.created)}
    return max(members, key=lambda g: (members[g], newest[g], g), default=None)


def _plan(
    number: int, replicas: Sequence[Replica], rank: Ranking, drain_window: float, new: NewInstances
) -> SyncPlan:
    live = [r for r in replicas if r.draining_for is None]
    draining = [r for r in replicas if r.draining_for is not None]
    # A draining replica still serves: the best of them are kept before anything new is started.
    usable = list(reversed(rank([r for r in draining if _can_be_kept(r)])))
    undrain = usable[: max(number - len(live), 0)]
    excess = max(len(live) - number, 0)
    order = list(rank(live)) if excess or usable else []
    surplus = order[:excess]
    # A healthy replica does not go while an unhealthy one stays: they change places.
    healthy = [r for r in usable[len(undrain) :] if r.healthy]
    unhealthy = [r for r in order[excess:] if not r.healthy]
    swaps = min(len(healthy), len(unhealthy))
    undrain += healthy[:swaps]
    surplus += unhealthy[:swaps]

    leaving = [r for r in draining if r not in undrain]
    delete = [r.id for r in leaving if not r.serving or _seconds_left(r, drain_window) <= 0]
    drain: list[int] = []
    for victim in surplus:
        if drain_window > 0 and victim.serving:
            drain.append(victim.id)
        else:
            delete.append(victim.id)
    missing = number - len(live) - len(undrain) + len(surplus)
    dues = [_seconds_left(r, drain_window) for r in leaving if r.id not in delete]
    return SyncPlan(
        (NewInstances(missing, new.role, new.group_id),) if missing > 0 else (),
        tuple(sorted(delete)),
        tuple(drain),
        tuple(r.id for r in undrain),
        min([*dues, *([drain_window] if drain else [])], default=None),
    )


def _can_be_kept(replica: Replica) -> bool:
    """Not on a worker that is not READY: it may be leaving."""
    return replica.serving and replica.worker_state is WorkerState.READY


def _seconds_left(replica: Replica, drain_window: float) -> float:
    """Seconds that a draining replica still has; none where the window was removed meanwhile."""
    return max(drain_window, 0.0) - (replica.draining_for or 0.0)
