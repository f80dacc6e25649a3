"""Engines that a user brings, VoxBox and omni models: what their command lines tell, and their host RAM."""

from __future__ import annotations

import shlex

from gpustackd.domain.model_spec import ModelSpec
from gpustackd.engines.flags import parse_flags
from gpustackd.errors import BadRow

FRACTIONS = ("gpu-memory-utilization", "mem-fraction-static")
RAM_SHARE = 0.1
RAM_LEAST = 2 * 1024**3
"""Bytes."""


def card_fraction(spec: ModelSpec) -> float | None:
    """The share of every card that the engine takes, from its command line: the last occurrence of either
    flag decides; None where none is given, or it is no number in (0, 1]."""
    try:
        words = shlex.split(spec.run_command or "")
        command = parse_flags(words)
    except (ValueError, BadRow):
        command = parse_flags(())
    flags = [*command.flags, *parse_flags(spec.backend_parameters).flags]
    given = [f.value for f in flags if f.name in FRACTIONS]
    if not given or given[-1] is None:
        return None
    try:
        value = float(given[-1])
    except ValueError:
        return None
    return value if 0 < value <= 1 else None


def host_ram(vram: int | None) -> int:
    """Host RAM of a custom engine: a tenth of its VRAM claim, at least 2 GiB."""
    return max(int(RAM_SHARE * (vram or 0)), RAM_LEAST)
