"""Facts in memory: by model, for a time, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gpustackd.domain.facts import ModelFacts
from gpustackd.sources.model_facts import with_copy_size

MAX_BYTES = 64 * 1024**2
ENTRY_BYTES = 4096
"""Assumed for an entry besides its configuration."""


@dataclass(slots=True)
class _Entry:
    """Facts, the identity of the files they came from, when to look again, and bytes they take."""

    facts: ModelFacts
    files_key: str
    until: float
    size: int
    copy: int | None = None
    with_copy: ModelFacts | None = None
    """The facts with a downloaded copy of that size."""


class FactsCache:
    """The least recently used are dropped first. `clock` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[object, _Entry] = OrderedDict()
        self._incomplete: set[object] = set()
        self._bytes = 0

    def fresh(self, key: object) -> ModelFacts | None:
        """Facts that need no look at their source."""
        entry = self._entries.get(key)
        if entry is None or entry.until <= self._clock():
            return None
        self._entries.move_to_end(key)
        return entry.facts

    def with_copy(self, key: object, facts: ModelFacts, copy: int | None) -> ModelFacts:
        """Facts with what a downloaded copy weighs (bytes); the same object as long as nothing changes."""
        entry = self._entries.get(key)
        if entry is None or entry.facts is not facts:
            return with_copy_size(facts, copy)
        if entry.with_copy is None or entry.copy != copy:
            entry.copy, entry.with_copy = copy, with_copy_size(facts, copy)
        return entry.with_copy

    def unchanged(self, key: object, files_key: str, seconds: float) -> ModelFacts | None:
        """Facts of the same files, used for so long again: their source was looked at and has not changed."""
        entry = self._entries.get(key)
        if entry is None or entry.files_key != files_key or entry.facts.weight_bytes is None:
            return None
        entry.until = self._clock() + seconds
        self._entries.move_to_end(key)
        return entry.facts

    def expire_incomplete(self) -> None:
        """Facts of which parts could not be read need a look at their source now."""
        for key in self._incomplete:
            if (entry := self._entries.get(key)) is not None:
                entry.until = self._clock()
        self._incomplete.clear()

    def put(
        self,
        key: object,
        facts: ModelFacts,
        files_key: str,
        seconds: float,
        config_bytes: int,
        *,
        complete: bool = True,
    ) -> None:
        """Remember facts for so long. `config_bytes` is about what they take, `complete` says that every
        part could be read."""
        (self._incomplete.discard if complete else self._incomplete.add)(key)
        if (old := self._entries.pop(key, None)) is not None:
            self._bytes -= old.size
        entry = _Entry(facts, files_key, self._clock() + seconds, config_bytes + ENTRY_BYTES)
        self._entries[key] = entry
        self._bytes += entry.size
        while self._bytes > MAX_BYTES and len(self._entries) > 1:
            key, gone = self._entries.popitem(last=False)
            self._incomplete.discard(key)
            self._bytes -= gone.size
