"""Whether workers have a model's local path, as their file API answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Presence(Enum):
    """A worker's answer about a path."""

    HERE = "here"
    MISSING = "missing"
    SILENT = "silent"
    """It did not answer."""


@dataclass(frozen=True, slots=True)
class PathKnowledge:
    """Answers by worker id; workers that were not or cannot be asked are absent."""

    workers: Mapping[int, Presence] = field(default_factory=lambda: MappingProxyType({}))
    shared: bool = False
    """The path exists on this host too, so it may be on a file system that workers share."""


Paths = Mapping[str, PathKnowledge]
"""By path."""
