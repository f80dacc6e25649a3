"""Facts in memory: by model, for a time, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gpustackd.domain.facts import ModelFacts
from gpustackd.sources.copies import settled

BUDGET = 64 * 1024**2
ENTRY = 4096
"""Bytes that an entry is taken to need besides its configuration."""


@dataclass(slots=True)
class BoundedCache:
    """Facts, the identity of the files they came from, and when to look again."""

    facts: ModelFacts
    files_key: str
    until: float
    weight: int
    copy: int | None = None
    settled: ModelFacts | None = None
    """The facts with a downloaded copy of that size."""


class FactsCache:
    """The least recently used go first. `clock` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float], budget: int = BUDGET) -> None:
        self._clock = clock
        self._budget = budget
        self._entries: OrderedDict[object, BoundedCache] = OrderedDict()
        self._doubtful: set[object] = set()
        self._held = 0

    def fresh(self, key: object) -> ModelFacts | None:
        """Facts that need no look at their source."""
        entry = self._entries.get(key)
        if entry is None or entry.until <= self._clock():
            return None
        self._entries.move_to_end(key)
        return entry.facts

    def settled(self, key: object, facts: ModelFacts, copy: int | None) -> ModelFacts:
        """Facts with what a downloaded copy weighs; the same object as long as nothing changes."""
        entry = self._entries.get(key)
        if entry is None or entry.facts is not facts:
            return settled(facts, copy)
        if entry.settled is None or entry.copy != copy:
            entry.copy, entry.settled = copy, settled(facts, copy)
        return entry.settled

    def unchanged(self, key: object, files_key: str, seconds: float) -> ModelFacts | None:
        """Facts of the same files, kept for so long again: their source was looked at and is as it was."""
        entry = self._entries.get(key)
        if entry is None or entry.files_key != files_key or entry.facts.weight_bytes is None:
            return None
        entry.until = self._clock() + seconds
        self._entries.move_to_end(key)
        return entry.facts

    def doubt(self) -> None:
        """Facts that are not whole need a look at their source."""
        for key in self._doubtful:
            if (entry := self._entries.get(key)) is not None:
                entry.until = self._clock()
        self._doubtful.clear()

    def keep(
        self,
        key: object,
        facts: ModelFacts,
        files_key: str,
        seconds: float,
        config_bytes: int,
        *,
        whole: bool = True,
    ) -> None:
        """Remember facts for so long; `config_bytes` is about what they weigh, `whole` whether all of them
        could be read."""
        (self._doubtful.discard if whole else self._doubtful.add)(key)
        if (old := self._entries.pop(key, None)) is not None:
            self._held -= old.weight
        entry = BoundedCache(facts, files_key, self._clock() + seconds, config_bytes + ENTRY)
        self._entries[key] = entry
        self._held += entry.weight
        while self._held > self._budget and len(self._entries) > 1:
            key, gone = self._entries.popitem(last=False)
            self._doubtful.discard(key)
            self._held -= gone.weight
