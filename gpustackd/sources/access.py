"""Access to models wherever they are: opens an origin and reads its parts, in bounded time and through the
cache on disk."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import anyio

from gpustackd.domain.model_spec import Source
from gpustackd.domain.origin import FileOrigin
from gpustackd.errors import ModelUnreadable
from gpustackd.sources import contents
from gpustackd.sources.abandonable_threads import AbandonableThreads
from gpustackd.sources.cache.disk import DiskCache
from gpustackd.sources.cache.hub_files import GROUP, CachedFiles
from gpustackd.sources.contents import ModelFiles
from gpustackd.sources.hubs.http import hub_client
from gpustackd.sources.hubs.huggingface import HuggingFace
from gpustackd.sources.hubs.model_scope import ModelScope
from gpustackd.sources.local_files import LocalFiles

T = TypeVar("T")

_COMMIT = re.compile(r"[0-9a-f]{40}")
PINNED_SECONDS = 30 * 24 * 3600.0
"""How long the cache on disk has what belongs to a commit. It never changes, but is forgotten in the end."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Endpoints (None = the public ones), tokens and limits. Seconds and bytes."""

    huggingface_endpoint: str | None = None
    huggingface_token: str | None = None
    modelscope_endpoint: str | None = None
    worker_token: str | None = None
    cache_dir: Path | None = None
    """None = no cache on disk."""
    reads_at_once: int = 16
    hub_seconds: float = 15.0
    """Each step: listing, configuration, sizing, adapters."""
    probe_seconds: float = 10.0
    local_seconds: float = 15.0
    worker_seconds: float = 15.0
    worker_connect_seconds: float = 5.0
    local_fresh: float = 60.0
    """How long facts of a path are used before the directory is looked at again."""
    hub_fresh: float = 3600.0
    """How long a branch is assumed to stay at the commit that was seen."""
    failure_fresh: float = 10.0
    """How long a failure answers for further instances of the same model."""
    size_draft: bool = False
    """Whether the draft model of a speculative configuration is sized too."""
    eager: bool = True
    """Whether the hub's library is loaded at once. That takes a while, and a command may never need it."""


class SourceAccess:
    """One per process, over local paths and hubs. `wall` is the wall clock in seconds, for the cache on disk;
    paths of this host are read in `threads`."""

    def __init__(
        self, options: ReaderOptions, threads: AbandonableThreads, wall: Callable[[], float]
    ) -> None:
        self._options = options
        self._client = hub_client(options.hub_seconds)
        if options.eager:
            _ = self._hub
        self._scope = ModelScope(self._client, options.modelscope_endpoint)
        self._threads = threads
        self._disk = DiskCache(options.cache_dir, wall) if options.cache_dir else None
        self._large_headers = anyio.Semaphore(1)

    @cached_property
    def _hub(self) -> HuggingFace:
        options = self._options
        return HuggingFace(self._client, options.huggingface_endpoint, options.huggingface_token)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def open(self, origin: FileOrigin, *, deep: bool = False) -> ModelFiles:
        """List the files of an origin. `deep`: directories of a local path too (hubs always list them). Raise
        ModelUnreadable, PathAbsent where a path is not on this host."""
        if origin.source is Source.LOCAL_PATH:
            return await LocalFiles.open(origin.name, self._threads, self._options.local_seconds, deep=deep)
        return await within(self._options.hub_seconds, lambda: self._open_hub(origin), origin.name)

    async def config(self, files: ModelFiles) -> Mapping[str, Any] | None:
        """`config.json`; None where the model has none."""
        return await self.timed(files, lambda: contents.read_config(files))

    async def model_index(self, files: ModelFiles) -> Any | None:
        """`model_index.json` of a pipeline; None where there is none."""
        return await within(
            self._options.probe_seconds, lambda: contents.read_model_index(files), files.label
        )

    async def weights(self, files: ModelFiles, model_index: Any | None = None) -> contents.Weights:
        """Sizes and types of the weights, once per commit or fingerprint."""
        key = f"{files.key}/@weights{'' if model_index is None else ':pipeline'}"
        if (cached := await self.cached(key)) is not None:
            with suppress(ValueError, KeyError, TypeError):
                return contents.from_json(cached)
        weights = await self.timed(
            files, lambda: contents.read_weights(files, model_index, large_headers=self._large_headers)
        )
        await self.cache(key, contents.as_json(weights), PINNED_SECONDS)
        return weights

    async def timed(self, files: ModelFiles, call: Callable[[], Awaitable[T]]) -> T:
        """Await one step of reading these files. Raise ModelUnreadable (`timeout`) where it takes too
        long."""
        return await within(self._seconds(files), call, files.label)

    async def cached(self, key: str) -> bytes | None:
        """What the cache on disk has under this key."""
        disk = self._disk
        return await self._threads.run(lambda: disk.get(key), group=GROUP) if disk else None

    async def cache(self, key: str, body: bytes, seconds: float) -> None:
        """Put it there for so long, where there is a cache on disk."""
        if (disk := self._disk) is not None:
            await self._threads.run(lambda: disk.put(key, body, seconds), group=GROUP)

    async def _open_hub(self, origin: FileOrigin) -> ModelFiles:
        hub = self._scope if origin.source is Source.MODEL_SCOPE else self._hub
        key = f"{origin.source}:{hub.endpoint}:{origin.name}@{origin.revision or ''}/@listing"
        listing = await self.cached(key)
        fresh = listing is None
        if listing is None:
            listing = await hub.listing(origin.name, origin.revision)
        files = hub.files(origin.name, origin.revision, listing)
        if fresh:
            pinned = bool(origin.revision and _COMMIT.fullmatch(origin.revision))
            await self.cache(key, listing, PINNED_SECONDS if pinned else self._options.hub_fresh)
        if self._disk is None:
            return files
        return CachedFiles(files, self._disk, self._threads, PINNED_SECONDS)

    def _seconds(self, files: ModelFiles) -> float:
        return self._options.local_seconds if files.is_local else self._options.hub_seconds


async def within(seconds: float, call: Callable[[], Awaitable[T]], label: str) -> T:
    """Await `call()` for so long; raise ModelUnreadable (`timeout`, retryable) afterwards."""
    try:
        with anyio.fail_after(seconds):
            return await call()
    except TimeoutError:
        problem = f"{label} was not read within {seconds:g} s"
        raise ModelUnreadable("timeout", problem, "check the hub and the network", retryable=True) from None
