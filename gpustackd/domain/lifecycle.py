"""States of instances and workers, and which moves between them are lawful."""

from __future__ import annotations

from enum import StrEnum


class InstanceState(StrEnum):
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


WAITING = frozenset({InstanceState.PENDING, InstanceState.ANALYZING})
"""States that never hold a placement."""

TAKEN = (InstanceState.INITIALIZING, InstanceState.DOWNLOADING, InstanceState.STARTING, InstanceState.RUNNING)
"""States that a worker reports after taking a SCHEDULED row, in order."""

PLACED = frozenset({InstanceState.SCHEDULED, InstanceState.UNREACHABLE, *TAKEN})
"""States that always hold a placement. ERROR holds one or none."""

_ORDER = (InstanceState.SCHEDULED, *TAKEN)


def lawful(old: InstanceState, new: InstanceState, *, placement_cleared: bool = False) -> bool:
    """Whether an instance may move from `old` to `new`; the trigger on `model_instances` holds the same.

    `placement_cleared` says that the same write clears the placement and raises the epoch, which is
    the only way back to PENDING. Writing the same state again is always lawful.
    """
    if old == new:
        return True
    if new is InstanceState.PENDING:
        return old is InstanceState.ANALYZING or placement_cleared
    if old is InstanceState.PENDING:
        return new is InstanceState.ANALYZING
    if old is InstanceState.ANALYZING:
        return new in (InstanceState.SCHEDULED, InstanceState.ERROR)
    if new in (InstanceState.ERROR, InstanceState.UNREACHABLE):
        return True if new is InstanceState.ERROR else old is not InstanceState.ERROR
    if old is InstanceState.ERROR:
        return new is InstanceState.SCHEDULED
    if old is InstanceState.UNREACHABLE:
        return new in TAKEN
    return new in _ORDER and _ORDER.index(new) > _ORDER.index(old)
