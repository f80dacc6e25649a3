"""States of instances and workers, and which moves between them are lawful."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """State of a model instance (column `model_instances.state`)."""

    PENDING = "PENDING"
    ANALYZING = "ANALYZING"
    SCHEDULED = "SCHEDULED"
    INITIALIZING = "INITIALIZING"
    DOWNLOADING = "DOWNLOADING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    ERROR = "ERROR"
    UNREACHABLE = "UNREACHABLE"


class WorkerState(StrEnum):
    """State of a worker (column `workers.state`); only READY workers take placements."""

    READY = "READY"
    NOT_READY = "NOT_READY"
    UNREACHABLE = "UNREACHABLE"
    MAINTENANCE = "MAINTENANCE"
    PENDING = "PENDING"
    PROVISIONING = "PROVISIONING"
    INITIALIZING = "INITIALIZING"
    DELETING = "DELETING"
    ERROR = "ERROR"


WAITING = frozenset({State.PENDING, State.ANALYZING})
"""States without a placement, ever."""

TAKEN = (State.INITIALIZING, State.DOWNLOADING, State.STARTING, State.RUNNING)
"""States that a worker reports once it took a SCHEDULED row, in their order."""

PLACED = frozenset({State.SCHEDULED, State.UNREACHABLE, *TAKEN})
"""States that always hold a placement. ERROR holds one or none."""

_ORDER = (State.SCHEDULED, *TAKEN)


def lawful(old: State, new: State, *, placement_cleared: bool = False) -> bool:
    """Whether an instance may move from `old` to `new` (contract section 6, rule 6).

    `placement_cleared` says that the same write clears the placement and raises the epoch, which is
    the only way back to PENDING. Writing the same state again is always lawful.
    """
    if old == new:
        return True
    if new is State.PENDING:
        return old is State.ANALYZING or placement_cleared
    if old is State.PENDING:
        return new is State.ANALYZING
    if old is State.ANALYZING:
        return new in (State.SCHEDULED, State.ERROR)
    if new in (State.ERROR, State.UNREACHABLE):
        return True if new is State.ERROR else old is not State.ERROR
    if old is State.ERROR:
        return new is State.SCHEDULED
    if old is State.UNREACHABLE:
        return new in TAKEN
    return new in _ORDER and _ORDER.index(new) > _ORDER.index(old)
