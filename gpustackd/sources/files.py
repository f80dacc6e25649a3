"""One model's files at one revision, as every source offers them: names, sizes, and the beginning of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class ModelFiles(Protocol):
    """What was listed once; reads are bounded and raise ModelUnreadable, retryable where a later try may
    succeed. Names are relative paths with `/`, always out of `sizes`."""

    @property
    def key(self) -> str:
        """Identity for caches: source, name and resolved revision (a fingerprint for a local path)."""

    @property
    def label(self) -> str:
        """How messages call the model: a path or a repository."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Relative path -> bytes on disk."""

    @property
    def cheap(self) -> bool:
        """Whether many small reads cost little (a file system, not a hub)."""

    async def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""
