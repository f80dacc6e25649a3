"""Why an instance failed, by its error message: memory, a GPU, the host, or the configuration.

The patterns are words of engines, drivers and container runtimes, looked up in the message that the worker
wrote. Their order matters: a NCCL error that ran out of memory is an error of memory.
"""

from __future__ import annotations

import re
from enum import StrEnum

from gpustackd.domain.sizes import quantity


class FailureCause(StrEnum):
    """Why an instance failed."""

    VRAM = "vram"
    """Out of GPU memory: a larger claim may help."""
    RAM = "ram"
    """Out of the host's memory."""
    DEVICE = "device"
    """A GPU is broken."""
    NODE = "node"
    """The host is broken: its disk, its network, its container runtime."""
    CONFIG = "config"
    """A wrong flag or image: it fails the same way everywhere."""
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
    r"\D{0,40}?([0-9]+(?:\.[0-9]+)? ?(?:[gmk]i?b|bytes|b))\b",
    re.IGNORECASE,
)
_MAX_TEXT = 8_000
"""Characters of a message that are searched, from its end."""


def failure_cause(message: str | None) -> FailureCause:
    """The first cause whose pattern occurs in the message."""
    text = (message or "")[-_MAX_TEXT:]
    return next((cause for cause, signs in _SIGNS if signs.search(text)), FailureCause.OTHER)


def requested_bytes(message: str | None) -> int:
    """Bytes that the message says could not be allocated; 0 where it names none."""
    match = _AMOUNT.search((message or "")[-_MAX_TEXT:])
    return quantity(match[1]) or 0 if match else 0
