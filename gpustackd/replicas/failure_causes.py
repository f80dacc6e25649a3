"""What an instance's last words say of why it failed: memory, a device, its host, or what it was told to do.

The words are those of engines, drivers and container runtimes; they are looked for in the message that the
worker wrote. Order matters: a NCCL error that ran out of memory is one of memory.
"""

from __future__ import annotations

import re
from enum import StrEnum


class FailureCause(StrEnum):
    """Why an instance failed, as far as its message tells."""

    VRAM = "vram"
    """Out of GPU memory: more of it may help."""
    RAM = "ram"
    """Out of the host's memory."""
    DEVICE = "device"
    """A GPU is broken."""
    NODE = "node"
    """The host is: its disk, its network, its runtime."""
    CONFIG = "config"
    """What it was told: a flag, an image. It fails alike everywhere."""
    OTHER = "other"


_SIGNS: tuple[tuple[FailureCause, re.Pattern[str]], ...] = tuple(
    (cause, re.compile("|".join(signs), re.IGNORECASE))
    for cause, signs in (
        (
            FailureCause.RAM,
            (
                r"oom-?killed", r"\bexit(ed)?( with)?( code| status)?:? 137\b", r"cannot allocate memory",
                r"std::bad_alloc", r"\bout of memory: killed", r"\bhost out of memory",
                r"defaultcpuallocator", r"\bMemoryError\b",
            ),
        ),
        (
            FailureCause.VRAM,
            (
                r"out of memory", r"outofmemory", r"cublas_status_alloc_failed",
                r"no available memory for the cache blocks",
                r"free memory on device .{0,120} is less than desired",
                r"larger than the maximum number of tokens that can be stored in kv cache",
                r"not enough (gpu |device |video )?memory", r"unable to allocate .{0,80}buffer",
            ),
        ),
        (
            FailureCause.DEVICE,
            (
                r"\becc\b", r"\bxid\b", r"fallen off the bus", r"uncorrectable", r"no cuda-capable device",
                r"cuda error: unknown error", r"cuda error: device (is|not|kernel)", r"hardware error",
                r"device-side assert", r"no hip gpus", r"device (is )?lost", r"nvml: ",
            ),
        ),
        (
            FailureCause.NODE,
            (
                r"\bnccl", r"\brccl", r"\bhccl", r"no space left on device", r"disk quota",
                r"read-only file system", r"input/output error", r"\bi/o error",
                r"cannot connect to the docker daemon", r"driver version",
                r"no route to host", r"network is unreachable", r"failed to create (shim|containerd) ?task",
            ),
        ),
        (
            FailureCause.CONFIG,
            (
                r"unrecognized arguments?", r"unknown (argument|option|flag)", r"error: argument",
                r"invalid (choice|argument|option|value)", r"no such image", r"manifest unknown",
                r"pull access denied", r"errimagepull|imagepullbackoff", r"image .{0,200}not found",
                r"unknown model architecture", r"unsupported (model|architecture|quantization)",
            ),
        ),
    )
)  # fmt: skip

_AMOUNT = re.compile(
    r"(?:tried to allocate|allocating|failed to allocate|unable to allocate|allocate|requires?|need(?:ed|s)?)"
    r"\D{0,40}?([0-9]+(?:\.[0-9]+)?) ?(gib|mib|kib|gb|mb|kb|bytes|b)\b",
    re.IGNORECASE,
)
_UNIT = {"gib": 2**30, "mib": 2**20, "kib": 2**10, "gb": 10**9, "mb": 10**6, "kb": 10**3, "bytes": 1, "b": 1}
_LONGEST = 8_000
"""Characters of a message that are looked at, from its end: the last words count."""


def failure_cause(message: str | None) -> FailureCause:
    """What a message tells."""
    text = (message or "")[-_LONGEST:]
    return next((cause for cause, signs in _SIGNS if signs.search(text)), FailureCause.OTHER)


def requested_bytes(message: str | None) -> int:
    """Bytes that the message says were asked for in vain; 0 where it names none."""
    found = _AMOUNT.search((message or "")[-_LONGEST:])
    return int(float(found[1]) * _UNIT[found[2].lower()]) if found else 0
