"""What is done about an instance in ERROR: again in place, elsewhere, with more memory, or nothing more.

Delays double from one restart to the next, up to a limit; counters are in the row, so that no restart of a
daemon forgets them, and go back to nothing after a time of stable running. Sizes in bytes, times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from hashlib import md5

from gpustackd.domain.placement_hints import Raise
from gpustackd.replicas.failure_causes import FailureCause, cause_of, observed

FIRST_STEP = 10.0
_LONGEST = 30
"""Times the first step."""
_JITTER = 0.1
"""Part of the delay that is added at most: instances that failed together do not all come back together."""

HOPELESS_AFTER = 3
"""Failures of an instance that was told something wrong; more of them would not teach more."""
ELSEWHERE_AFTER = {FailureCause.DEVICE: 2, FailureCause.NODE: 2}
ELSEWHERE_AFTER_ANY = 5
"""Failures in one place after which another one is sought, by cause and for all others."""

RAISES_MOST = 3
RAISE_PART = 0.1
"""Part of what is booked that is added where the report names no amount."""
RAISE_BOUND = 1.5
"""Never more than so many times what was booked first."""
_RAM_STEP = 2**30
_RAM_BOUND = 4 * 2**30
"""RAM may grow by this much at least: often none was booked."""


@dataclass(frozen=True, slots=True)
class FailedInstance:
    """An instance in ERROR that holds a place."""

    id: int
    restart_count: int
    """Restarts since it last ran stably."""
    failures: int
    """Times that it failed where it is."""
    since: float
    """Seconds since its last restart, or since it failed where there was none."""
    message: str | None = None
    vram: int = 0
    """Booked over all GPUs."""
    ram: int = 0
    """Booked on the worker where most is."""
    gpus: int = 1
    model_version: int = 0
    edited: bool = False
    """Its model was edited after it failed."""
    more: Raise | None = None
    first_step: float = FIRST_STEP
    """Seconds before the second restart."""


class RestartAction(Enum):
    """What to do."""

    WAIT = "wait"
    RESTART = "restart"
    ELSEWHERE = "elsewhere"
    MORE = "more"
    HOPELESS = "hopeless"


@dataclass(frozen=True, slots=True)
class RestartStep:
    """`whole_worker`: avoid all of it, not only the GPUs. `more`: what to book at least from now on."""

    kind: RestartAction
    cause: FailureCause = FailureCause.OTHER
    whole_worker: bool = True
    more: Raise | None = None


def delay(attempt: int, first_step: float = FIRST_STEP) -> float:
    """Seconds before restart number `attempt` (from 1): 0, 10, 20, 40, 80, 160, 300, 300, …"""
    return 0.0 if attempt <= 1 else first_step * min(2 ** min(attempt - 2, 10), _LONGEST)


def due_after(instance_id: int, attempt: int, first_step: float = FIRST_STEP) -> float:
    """The same with its jitter, which is the same whoever asks: daemons agree when it is time."""
    digest = md5(f"{instance_id}/{attempt}".encode(), usedforsecurity=False).digest()
    return delay(attempt, first_step) * (1 + _JITTER * digest[0] / 255)


def next_step(failed: FailedInstance) -> RestartStep:
    """What to do about it now. Where `ELSEWHERE` or `MORE` finds no place, it is restarted in place."""
    cause = cause_of(failed.message)
    if cause is FailureCause.CONFIG and failed.failures >= HOPELESS_AFTER and not failed.edited:
        return RestartStep(RestartAction.HOPELESS, cause)
    if failed.since < due_after(failed.id, failed.restart_count + 1, failed.first_step):
        return RestartStep(RestartAction.WAIT, cause)
    if cause in (FailureCause.VRAM, FailureCause.RAM):
        more = raised(failed, cause)
        if more is not None:
            return RestartStep(RestartAction.MORE, cause, more=more)
    if (
        failed.failures >= ELSEWHERE_AFTER.get(cause, ELSEWHERE_AFTER_ANY)
        and cause is not FailureCause.CONFIG
    ):
        return RestartStep(RestartAction.ELSEWHERE, cause, whole_worker=cause is not FailureCause.DEVICE)
    return RestartStep(RestartAction.RESTART, cause)


def raised(failed: FailedInstance, cause: FailureCause) -> Raise | None:
    """What to book at least after a report of too little memory; None where the bounds are reached."""
    old = failed.more if failed.more and failed.more.model_version == failed.model_version else None
    base = old or Raise(first_vram=failed.vram, first_ram=failed.ram, model_version=failed.model_version)
    if base.times >= RAISES_MOST:
        return None
    wanted = observed(failed.message)
    if cause is FailureCause.VRAM:
        vram = _grown(failed.vram, base.first_vram, wanted * max(failed.gpus, 1), 0)
        found = replace(base, vram=vram, times=base.times + 1)
        return found if failed.vram and vram > failed.vram else None
    ram = _grown(failed.ram, base.first_ram, max(wanted, _RAM_STEP), _RAM_BOUND)
    return replace(base, ram=ram, times=base.times + 1) if ram > failed.ram else None


def _grown(booked: int, first: int, wanted: int, least_bound: int) -> int:
    bound = max(int(first * RAISE_BOUND), first + least_bound)
    return min(booked + max(int(wanted * (1 + RAISE_PART)), int(booked * RAISE_PART)), bound)
