"""Reads what models are made of, from every source: the daemon's `ports.ModelReader`.

Facts that are cached are answered from memory without waiting for anybody (`cached`). Everything else
shares 16 places for each source, goes through one read per model at a time and ends in bounded time. What
was read is cached in memory by model, and on disk by commit, so that a restart asks a hub for its listing
alone."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

import anyio

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.origin import FileOrigin, adapter_origins, draft_origin, origin_of
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.abandonable_threads import AbandonableThreads
from gpustackd.sources.access import ReaderOptions, SourceAccess, within
from gpustackd.sources.cache.memory import FactsCache
from gpustackd.sources.cache.single_flight import SingleFlight, same
from gpustackd.sources.contents import CONFIG, MODEL_INDEX, ModelFiles
from gpustackd.sources.formats.weight_files import is_diffusers_index
from gpustackd.sources.gguf_model import GgufModels
from gpustackd.sources.local_files import PathAbsent
from gpustackd.sources.model_facts import ModelParts, assemble, facts_key, wants_pipeline
from gpustackd.sources.worker_files import Hosts, WorkerFiles

ON_WORKERS = "on workers"
GGUF = "gguf"
TENSOR_BYTES = 512
"""Assumed for one tensor of a GGUF header in memory."""
FAILURES_SWEPT, FAILURES_MOST = 1024, 4096
"""Remembered failures from which on old ones are dropped, and from which on none is added."""


class Reader:
    """One per process. `hosts` names the workers to ask for a path that is not on this host; `known_size`
    tells what a downloaded copy weighs, by `source_index`, in bytes. Blocking reads run in `threads`."""

    def __init__(
        self,
        options: ReaderOptions | None = None,
        *,
        hosts: Callable[[ModelSpec], Hosts] | None = None,
        known_size: Callable[[str], int | None] | None = None,
        threads: AbandonableThreads | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._options = options or ReaderOptions()
        self._hosts = hosts or (lambda _: Hosts())
        self._known_size = known_size or (lambda _: None)
        self._clock = clock
        self._access = SourceAccess(self._options, threads or AbandonableThreads(), wall)
        self._gguf = GgufModels(self._access)
        self._workers = WorkerFiles(
            self._options.worker_token,
            total=self._options.worker_seconds,
            connect=self._options.worker_connect_seconds,
        )
        self._cache = FactsCache(clock)
        self._failures: dict[object, tuple[float, ModelUnreadable]] = {}
        self._flights: SingleFlight[ModelFacts] = SingleFlight()
        # by source: a path on this host is read at once, however many reads a hub keeps waiting
        self._places = {s: anyio.Semaphore(self._options.reads_at_once) for s in Source}

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. Threads that hang in a file system are left behind."""
        await self._access.aclose()
        await self._workers.aclose()

    def cached(self, spec: ModelSpec) -> ModelFacts | None:
        """Cached facts, without any IO, or None."""
        key = facts_key(spec)
        facts = self._cache.fresh(key)
        return None if facts is None else self._with_copy(key, spec, facts)

    def retry_failures(self) -> None:
        """What could not be read before may be there now: read it again when it is next asked for."""
        self._failures.clear()
        self._cache.expire_incomplete()

    async def facts(self, spec: ModelSpec) -> ModelFacts:
        """Facts of one model, read if need be. Raise ModelUnreadable."""
        key = facts_key(spec)
        if (cached := self._cache.fresh(key)) is not None:
            return self._with_copy(key, spec, cached)
        # an edited model is tried at once, however the version before it failed
        failure_key = (key, spec.id, spec.version)
        until, error = self._failures.get(failure_key, (0.0, None))
        if error is not None:
            if until > self._clock():
                raise same(error)
            del self._failures[failure_key]
        try:
            facts = await self._flights.run(key, lambda: self._read_in_place(spec, key))
            return self._with_copy(key, spec, facts)
        except ModelUnreadable as e:
            if spec.source is not Source.LOCAL_PATH:
                self._remember_failure(failure_key, e)
            raise

    def _with_copy(self, key: object, spec: ModelSpec, facts: ModelFacts) -> ModelFacts:
        """A copy may be downloaded at any time: its size is asked for whenever facts are."""
        return self._cache.with_copy(key, facts, self._known_size(spec.source_index))

    async def _read_in_place(self, spec: ModelSpec, key: object) -> ModelFacts:
        async with self._places[spec.source or Source.LOCAL_PATH]:
            return await self._read(spec, key)

    async def _read(self, spec: ModelSpec, key: object) -> ModelFacts:
        origin = origin_of(spec)
        if spec.is_gguf:
            facts = await self._gguf.facts(spec, origin)
            self._cache.put(key, facts, GGUF, self._fresh(spec), TENSOR_BYTES * len(facts.gguf.tensors))
            return facts
        try:
            files = await self._access.open(origin, deep=wants_pipeline(spec))
            if not files.sizes and files.is_local:  # as a mount point looks before its file system is there
                raise PathAbsent("path_empty", f"{files.label} is empty on this host", retryable=True)
        except PathAbsent as e:
            return await self._read_on_workers(spec, key, e)
        except ModelUnreadable as e:
            # enough where the row says how much to claim, or a copy is known
            parts = ModelParts(config_error=e, unknown_because=str(e))
            return self._assemble(spec, key, parts, origin.name, "")
        if (cached := self._cache.unchanged(key, files.key, self._fresh(spec))) is not None:
            return cached
        parts = await self._read_parts(spec, files)
        parts.listed_bytes, parts.on_this_host = sum(files.sizes.values()), files.is_local
        return self._assemble(spec, key, parts, files.label, files.key, files.sizes.get(CONFIG, 0))

    async def _read_parts(self, spec: ModelSpec, files: ModelFiles) -> ModelParts:
        parts = ModelParts()
        index = await self._pipeline(spec, files, parts)

        async def config() -> None:
            parts.config = await self._access.config(files)

        async def weights() -> None:
            sized = await self._access.weights(files, index)
            parts.weight_bytes = sized.total
            parts.warnings += sized.warnings

        errors: list[ModelUnreadable] = []

        async def read_weights() -> None:
            if (e := await _error_of(weights)) is not None:
                if e.retryable:
                    parts.unknown_because = str(e)
                else:
                    errors.append(e)

        await self._together(spec, parts, read_weights, config if index is None else None)
        if errors:
            raise errors[0]
        return parts

    async def _together(
        self,
        spec: ModelSpec,
        parts: ModelParts,
        read_weights: Callable[[], Coroutine[Any, Any, None]],
        config: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Read weights, configuration, adapters and draft model at the same time."""

        async def read_config() -> None:
            if config is not None:
                parts.config_error = await _error_of(config)

        async with anyio.create_task_group() as group:
            group.start_soon(read_weights)
            group.start_soon(read_config)
            group.start_soon(self._read_additions, spec, parts)

    async def _pipeline(self, spec: ModelSpec, files: ModelFiles, parts: ModelParts) -> Any | None:
        """`model_index.json` where its components are what is loaded."""
        if not wants_pipeline(spec):
            return None
        try:
            index = await self._access.model_index(files)
        except ModelUnreadable as e:
            parts.warnings.append(e.problem)  # an index that cannot be read makes no pipeline
            return None
        parts.is_diffusers = is_diffusers_index(index)
        return index if index is not None and (parts.is_diffusers or spec.categories) else None

    async def _read_additions(self, spec: ModelSpec, parts: ModelParts) -> None:
        """Adapters and the draft model: what cannot be sized counts 0, with a warning."""
        for origin in adapter_origins(spec):
            parts.lora_bytes += await self._size_of(spec, "adapter", origin, parts)
        draft = draft_origin(spec) if self._options.size_draft else None
        if draft is not None:
            parts.draft_bytes = await self._size_of(spec, "draft model", draft, parts)

    async def _size_of(self, spec: ModelSpec, what: str, origin: FileOrigin, parts: ModelParts) -> int:
        """Bytes of the weights at an origin: those of a downloaded copy, of the source, or by a worker."""
        copy = self._known_size(origin.index) or 0
        if copy > 0 and origin.path is None:
            return copy

        async def size() -> int:
            files = await self._access.open(origin)
            return (await self._access.weights(files)).total

        try:
            try:
                return await within(self._options.hub_seconds, size, origin.name)
            except PathAbsent:
                if copy > 0:
                    return copy
                by_worker, _ = await self._workers.weight_size(self._hosts(spec), origin.name)
                return by_worker
        except ModelUnreadable as e:
            parts.warnings.append(f"{what} {origin.name} is not counted: {e.problem}")
            return 0

    async def _read_on_workers(self, spec: ModelSpec, key: object, absent: PathAbsent) -> ModelFacts:
        """Facts of a path that this host does not have, from the workers that do."""
        path = (spec.local_path or "").rstrip("/")
        hosts = self._hosts(spec)
        if not hosts.hosts and not hosts.dropped:
            raise absent
        parts = ModelParts()
        if wants_pipeline(spec):
            await self._probe_on_workers(spec, hosts, path, parts)

        async def config() -> None:
            parts.config, _ = await self._workers.json_file(hosts, f"{path}/{CONFIG}")

        async def weights() -> None:
            parts.weight_bytes, _ = await self._workers.weight_size(hosts, path)

        async def read_weights() -> None:
            if (e := await _error_of(weights)) is not None:
                parts.unknown_because = str(e)

        await self._together(spec, parts, read_weights, None if parts.is_diffusers else config)
        return self._assemble(spec, key, parts, path, ON_WORKERS)

    async def _probe_on_workers(self, spec: ModelSpec, hosts: Hosts, path: str, parts: ModelParts) -> None:
        """Whether the path is a pipeline of diffusers, as far as a worker says so in time."""

        async def probe() -> None:
            index, _ = await self._workers.json_file(hosts, f"{path}/{MODEL_INDEX}")
            parts.is_diffusers = is_diffusers_index(index)

        async def probe_in_time() -> None:
            await within(self._options.probe_seconds, probe, path)

        await _error_of(probe_in_time)

    def _assemble(
        self,
        spec: ModelSpec,
        key: object,
        parts: ModelParts,
        label: str,
        files_key: str,
        config_bytes: int = 0,
    ) -> ModelFacts:
        """The facts of the parts, cached: for a short time where some could not be read."""
        facts = assemble(spec, parts, label)
        complete = parts.weight_bytes is not None and parts.config_error is None and bool(files_key)
        seconds = self._fresh(spec) if complete else self._options.failure_fresh
        self._cache.put(key, facts, files_key, seconds, config_bytes, complete=complete)
        return facts

    def _fresh(self, spec: ModelSpec) -> float:
        """Seconds for which what was read is used without a look at its source."""
        local = spec.source is Source.LOCAL_PATH
        return self._options.local_fresh if local else self._options.hub_fresh

    def _remember_failure(self, key: object, e: ModelUnreadable) -> None:
        now = self._clock()
        if len(self._failures) >= FAILURES_SWEPT:
            self._failures = {k: v for k, v in self._failures.items() if v[0] > now}
        if len(self._failures) < FAILURES_MOST:
            self._failures[key] = (now + self._options.failure_fresh, e)


async def _error_of(call: Callable[[], Awaitable[None]]) -> ModelUnreadable | None:
    """Await `call()`; the ModelUnreadable that it raised, if any."""
    try:
        await call()
    except ModelUnreadable as e:
        return e
    return None
