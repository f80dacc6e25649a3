"""What has to happen so that a model has as many replicas as it asks for.

Level-triggered: it looks at what is asked and what is there, never at what changed. Every row counts in
whatever state it is; only replicas that drain do not, since they are on their way out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gpustackd.domain.lifecycle import WorkerState
from gpustackd.replicas.replica import Replica

MOST = 100_000
"""Instances of one model, as many as the queue holds in all. A number beyond is a slip of the hand."""

Rank = Callable[[Sequence[Replica]], Sequence[Replica]]
"""Orders replicas of one role, the one to delete first in front."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a model asks for. With `roles`, `replicas` is a switch (0 = none) and roles have numbers."""

    replicas: int
    roles: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    window: float = 0.0
    """Seconds that a serving replica drains before it is deleted; 0 or less = at once."""


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """Instances to add: their number, and of members of a group the role and the group."""

    number: int
    role: str | None = None
    group_id: str | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSteps:
    """Ids to write on. Nothing in it = the number is right."""

    add: tuple[ReplicaSlot, ...] = ()
    delete: tuple[int, ...] = ()
    drain: tuple[int, ...] = ()
    take_back: tuple[int, ...] = ()
    """Ids that stop draining."""
    due_in: float | None = None
    """Seconds until the next draining replica has to go, after these steps; None = none drains."""

    @property
    def anything(self) -> bool:
        return bool(self.add or self.delete or self.drain or self.take_back)


def steps(asked: Asked, there: Sequence[Replica], rank: Rank) -> ReplicaSteps:
    """What has to be done for a model with these rows."""
    if asked.roles:
        return _of_group(asked, there, rank)
    if strays := [r.id for r in there if r.role is not None]:
        # The model had roles once: those rows run parts of something that is no more.
        return ReplicaSteps(delete=tuple(sorted(strays)))
    return _of_one(asked.replicas, there, rank, asked.window, ReplicaSlot(0))


def _of_group(asked: Asked, there: Sequence[Replica], rank: Rank) -> ReplicaSteps:
    """Each role of the current generation by itself; what belongs to no generation goes.

    A generation is formed as a whole elsewhere; here its members are kept at their numbers.
    """
    if asked.replicas == 0:
        return ReplicaSteps(delete=tuple(sorted(r.id for r in there)))
    current = _current(there)
    strays = [r.id for r in there if r.group_id != current or r.role not in asked.roles]
    found = [ReplicaSteps(delete=tuple(strays))]
    if current is not None:
        for role, number in asked.roles.items():
            members = [r for r in there if r.group_id == current and r.role == role]
            found.append(_of_one(number, members, rank, asked.window, ReplicaSlot(0, role, current)))
    dues = [s.due_in for s in found if s.due_in is not None]
    return ReplicaSteps(
        tuple(seat for s in found for seat in s.add),
        tuple(sorted(i for s in found for i in s.delete)),
        tuple(i for s in found for i in s.drain),
        tuple(i for s in found for i in s.take_back),
        min(dues, default=None),
    )


def _current(there: Sequence[Replica]) -> str | None:
    """The generation with most members, then the newest."""
    members = Counter(r.group_id for r in there if r.group_id is not None)
    newest = {r.group_id: r.created for r in sorted(there, key=lambda r: r.created)}
    return max(members, key=lambda g: (members[g], newest[g], g), default=None)


def _of_one(
    number: int, there: Sequence[Replica], rank: Rank, window: float, seat: ReplicaSlot
) -> ReplicaSteps:
    live = [r for r in there if r.draining_for is None]
    draining = [r for r in there if r.draining_for is not None]
    # Whoever drains serves still: the best of them come back before anything new is started.
    able = list(reversed(rank([r for r in draining if _may_come_back(r)])))
    back = able[: max(number - len(live), 0)]
    excess = max(len(live) - number, 0)
    order = list(rank(live)) if excess or able else []
    surplus = order[:excess]
    # Nor does one that is well go while one that is not stays: they change places.
    well = [r for r in able[len(back) :] if r.healthy]
    ill = [r for r in order[excess:] if not r.healthy]
    changes = min(len(well), len(ill))
    back += well[:changes]
    surplus += ill[:changes]

    leaving = [r for r in draining if r not in back]
    delete = [r.id for r in leaving if not r.serving or _left(r, window) <= 0]
    drain: list[int] = []
    for victim in surplus:
        if window > 0 and victim.serving:
            drain.append(victim.id)
        else:
            delete.append(victim.id)
    missing = number - len(live) - len(back) + len(surplus)
    dues = [_left(r, window) for r in leaving if r.id not in delete]
    return ReplicaSteps(
        (ReplicaSlot(missing, seat.role, seat.group_id),) if missing > 0 else (),
        tuple(sorted(delete)),
        tuple(drain),
        tuple(r.id for r in back),
        min([*dues, *([window] if drain else [])], default=None),
    )


def _may_come_back(replica: Replica) -> bool:
    """Not from a worker that is to be left."""
    return replica.serving and replica.worker_state is WorkerState.READY


def _left(replica: Replica, window: float) -> float:
    """Seconds that a draining replica still has. A window that was taken away ends at once."""
    return max(window, 0.0) - (replica.draining_for or 0.0)
