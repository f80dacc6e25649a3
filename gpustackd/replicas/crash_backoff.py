"""What to do about an instance in ERROR: restart in place, move it, book more memory, or give up.

The delay doubles from one restart to the next, up to a limit. The counters are columns of the instance, so a
daemon's restart forgets nothing, and they return to 0 after the instance ran stably for a while. Sizes in
bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from hashlib import md5

from gpustackd.domain.placement_hints import ClaimRaise
from gpustackd.replicas.failure_causes import FailureCause, failure_cause, requested_bytes

FIRST_DELAY = 10.0
_MAX_DELAY = 30
"""Times the first delay."""
_JITTER = 0.1
"""At most this share of the delay is added, so that instances that failed together come back apart."""

GIVE_UP_AFTER = 3
"""Failures of an instance with a wrong configuration; it fails the same way everywhere."""
MOVE_AFTER = {FailureCause.DEVICE: 2, FailureCause.NODE: 2}
MOVE_AFTER_OTHERS = 5
"""Failures in one place after which another place is sought, by cause and for all other causes."""

MAX_RAISES = 3
RAISE_SHARE = 0.1
"""Share of the claim that is added where the report names no amount."""
MAX_RAISE_FACTOR = 1.5
"""A claim never grows beyond this multiple of the first one."""
_RAM_STEP = 2**30
_MIN_RAM_BOUND = 4 * 2**30
"""RAM may always grow by this much, since many models book none at first."""


@dataclass(frozen=True, slots=True)
class FailedInstance:
    """An instance in ERROR that holds a placement."""

    id: int
    restart_count: int
    """Restarts since it last ran stably."""
    failures: int
    """Failures in its present place."""
    since: float
    """Seconds since its last restart, or since its failure where it was never restarted."""
    message: str | None = None
    vram: int = 0
    """Booked over all GPUs."""
    ram: int = 0
    """Booked on the worker where most is booked."""
    gpus: int = 1
    model_version: int = 0
    edited: bool = False
    """Whether its model was edited after it failed."""
    claim_raise: ClaimRaise | None = None
    first_delay: float = FIRST_DELAY
    """Seconds before the second restart; the first one is immediate."""


class RestartAction(Enum):
    """What to do about a failed instance."""

    WAIT = "wait"
    RESTART = "restart"
    """In place."""
    MOVE = "move"
    """Release the place and avoid it for a while."""
    RAISE_CLAIM = "raise_claim"
    """Place it anew with a larger claim."""
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """An action. `whole_worker`: avoid the whole worker, not only the GPUs. `claim_raise`: the least to book
    from now on."""

    action: RestartAction
    cause: FailureCause = FailureCause.OTHER
    whole_worker: bool = True
    claim_raise: ClaimRaise | None = None


def restart_delay(attempt: int, first_delay: float = FIRST_DELAY) -> float:
    """Seconds before restart number `attempt` (from 1): 0, 10, 20, 40, 80, 160, 300, 300, …"""
    return 0.0 if attempt <= 1 else first_delay * min(2 ** min(attempt - 2, 10), _MAX_DELAY)


def jittered_delay(instance_id: int, attempt: int, first_delay: float = FIRST_DELAY) -> float:
    """`restart_delay` with a jitter by instance and attempt, so that all daemons agree when it is due."""
    digest = md5(f"{instance_id}/{attempt}".encode(), usedforsecurity=False).digest()
    return restart_delay(attempt, first_delay) * (1 + _JITTER * digest[0] / 255)


def decide_restart(failed: FailedInstance) -> RestartDecision:
    """What to do now. Where `MOVE` or `RAISE_CLAIM` finds no place, the caller restarts it in place."""
    cause = failure_cause(failed.message)
    if cause is FailureCause.CONFIG and failed.failures >= GIVE_UP_AFTER and not failed.edited:
        return RestartDecision(RestartAction.GIVE_UP, cause)
    if failed.since < jittered_delay(failed.id, failed.restart_count + 1, failed.first_delay):
        return RestartDecision(RestartAction.WAIT, cause)
    if cause in (FailureCause.VRAM, FailureCause.RAM):
        raised = raise_claim(failed, cause)
        if raised is not None:
            return RestartDecision(RestartAction.RAISE_CLAIM, cause, claim_raise=raised)
    if failed.failures >= MOVE_AFTER.get(cause, MOVE_AFTER_OTHERS) and cause is not FailureCause.CONFIG:
        return RestartDecision(RestartAction.MOVE, cause, whole_worker=cause is not FailureCause.DEVICE)
    return RestartDecision(RestartAction.RESTART, cause)


def raise_claim(failed: FailedInstance, cause: FailureCause) -> ClaimRaise | None:
    """The least to book after an out-of-memory failure; None where the limits are reached."""
    old = failed.claim_raise
    if old is None or old.model_version != failed.model_version:
        old = ClaimRaise(first_vram=failed.vram, first_ram=failed.ram, model_version=failed.model_version)
    if old.times >= MAX_RAISES:
        return None
    requested = requested_bytes(failed.message)
    if cause is FailureCause.VRAM:
        vram = _grown(failed.vram, old.first_vram, requested * max(failed.gpus, 1), 0)
        return replace(old, vram=vram, times=old.times + 1) if failed.vram and vram > failed.vram else None
    ram = _grown(failed.ram, old.first_ram, max(requested, _RAM_STEP), _MIN_RAM_BOUND)
    return replace(old, ram=ram, times=old.times + 1) if ram > failed.ram else None


def _grown(booked: int, first: int, requested: int, min_bound: int) -> int:
    bound = max(int(first * MAX_RAISE_FACTOR), first + min_bound)
    return min(booked + max(int(requested * (1 + RAISE_SHARE)), int(booked * RAISE_SHARE)), bound)
