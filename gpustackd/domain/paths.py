"""What is known of a model's local path on workers: they were asked, and what they said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Presence(Enum):
    """What a worker's file API said of a path."""

    HERE = "here"
    MISSING = "missing"
    SILENT = "silent"
    """It was asked and did not answer."""


@dataclass(frozen=True, slots=True)
class PathKnowledge:
    """Answers by worker id; workers that cannot be asked, or were not yet, are absent."""

    workers: Mapping[int, Presence] = field(default_factory=lambda: MappingProxyType({}))
    shared: bool = False
    """The path is there on this host too: a file system that several mount, as far as anyone can tell."""


Paths = Mapping[str, PathKnowledge]
"""By path."""
