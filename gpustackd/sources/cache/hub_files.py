"""Hub files through a cache on disk: a revision that is pinned to a commit is read once."""

from __future__ import annotations

from collections.abc import Mapping

from gpustackd.sources.cache.disk import DiskCache
from gpustackd.sources.files import ModelFiles
from gpustackd.sources.local.abandonable_threads import AbandonableThreads

GROUP = "disk cache"


class CachedFiles:
    """Small whole files come from the cache where it has them; ranges pass through (their results are kept
    by whoever asked for them, in a smaller form). A `files.Files` itself."""

    def __init__(
        self, inner: ModelFiles, cache: DiskCache, threads: AbandonableThreads, seconds: float
    ) -> None:
        self._inner = inner
        self._cache = cache
        self._threads = threads
        self._seconds = seconds

    @property
    def key(self) -> str:
        return self._inner.key

    @property
    def label(self) -> str:
        return self._inner.label

    @property
    def sizes(self) -> Mapping[str, int]:
        return self._inner.sizes

    @property
    def cheap(self) -> bool:
        return self._inner.cheap

    async def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        key = f"{self.key}/{name}"
        kept = await self._threads.run(lambda: self._cache.get(key), group=GROUP)
        if kept is not None and len(kept) <= limit:
            return kept
        data = await self._inner.read(name, limit)
        await self._threads.run(lambda: self._cache.put(key, data, self._seconds), group=GROUP)
        return data

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""
        return await self._inner.read_range(name, start, length)
