"""Hub files through a cache on disk: a revision that is pinned to a commit is read once."""

from __future__ import annotations

from gpustackd.sources.abandonable_threads import AbandonableThreads
from gpustackd.sources.cache.disk import DiskCache
from gpustackd.sources.contents import ModelFiles

GROUP = "disk cache"


class CachedFiles:
    """`contents.ModelFiles` of which small whole files come from the cache where it has them. Ranges pass
    through: whoever asks for them caches their results, in a smaller form."""

    def __init__(
        self, inner: ModelFiles, cache: DiskCache, threads: AbandonableThreads, seconds: float
    ) -> None:
        self._inner = inner
        self._cache = cache
        self._threads = threads
        self._seconds = seconds
        self.key = inner.key
        self.label = inner.label
        self.sizes = inner.sizes
        self.is_local = inner.is_local

    async def read(self, name: str, limit: int) -> bytes:
        """A whole file of at most `limit` bytes."""
        key = f"{self.key}/{name}"
        cached = await self._threads.run(lambda: self._cache.get(key), group=GROUP)
        if cached is not None and len(cached) <= limit:
            return cached
        data = await self._inner.read(name, limit)
        await self._threads.run(lambda: self._cache.put(key, data, self._seconds), group=GROUP)
        return data

    async def read_range(self, name: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start` on."""
        return await self._inner.read_range(name, start, length)
