"""Reads what models are made of, from every source: the daemon's `ports.ModelReader`.

A model whose facts are at hand is answered from memory without waiting for anybody (`cached`). Everything
else shares 16 places, goes through one read per model at a time and ends in bounded time. What was read is
kept in memory by model, and on disk by commit, so that a restart asks a hub for its listing alone.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol

import anyio

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.errors import ModelUnreadable
from gpustackd.sources.cache.memory import FactsCache
from gpustackd.sources.cache.single_flight import SingleFlight, same
from gpustackd.sources.contents import CONFIG
from gpustackd.sources.facts_of import Parts, assemble, facts_key, wants_pipeline
from gpustackd.sources.files import ModelFiles
from gpustackd.sources.formats.weight_files import is_diffusers_index
from gpustackd.sources.gguf_model import GgufModels
from gpustackd.sources.library import Library, ReaderOptions, within
from gpustackd.sources.local.directory import PathAbsent
from gpustackd.sources.origin import FileOrigin, adapter_origins, draft_origin, origin_of
from gpustackd.sources.workers.file_api import Hosts, WorkerFiles

ON_WORKERS = "on workers"
HEADER_ENTRY = 512
"""Bytes that one tensor of a GGUF header is taken to need in memory."""


class GgufHeaders(Protocol):
    """Reads the facts of a GGUF model, whose estimate stands on its header alone."""

    async def __call__(self, spec: ModelSpec, origin: FileOrigin, library: Library) -> ModelFacts: ...


class Reader:
    """One per process. `hosts` names the workers to ask for a path that is not on this host; `known_size`
    tells what a downloaded copy weighs (by `source_index`)."""

    def __init__(
        self,
        options: ReaderOptions | None = None,
        *,
        hosts: Callable[[ModelSpec], Hosts] | None = None,
        known_size: Callable[[str], int | None] | None = None,
        gguf: GgufHeaders | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._options = options or ReaderOptions()
        self._hosts = hosts or (lambda _: Hosts())
        self._known_size = known_size or (lambda _: None)
        self._gguf = gguf or GgufModels()
        self._clock = clock
        self._library = Library(self._options, wall)
        self._workers = WorkerFiles(
            self._options.worker_token,
            total=self._options.worker_seconds,
            connect=self._options.worker_connect_seconds,
        )
        self._kept = FactsCache(clock)
        self._failed: dict[object, tuple[float, ModelUnreadable]] = {}
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
        await self._library.aclose()
        await self._workers.aclose()

    def cached(self, spec: ModelSpec) -> ModelFacts | None:
        """Facts at hand without any IO, or None."""
        key = facts_key(spec)
        found = self._kept.fresh(key)
        return None if found is None else self._settled(key, spec, found)

    def doubt(self) -> None:
        """What could not be read before may be there now: read it anew when it is next asked for."""
        self._failed.clear()
        self._kept.doubt()

    async def facts(self, spec: ModelSpec) -> ModelFacts:
        """Facts of one model, read if need be. Raise ModelUnreadable."""
        key = facts_key(spec)
        if (kept := self._kept.fresh(key)) is not None:
            return self._settled(key, spec, kept)
        # an edited model is tried at once, whatever was found before the edit
        failure_key = (key, spec.id, spec.version)
        until, error = self._failed.get(failure_key, (0.0, None))
        if error is not None:
            if until > self._clock():
                raise same(error)
            del self._failed[failure_key]
        try:
            found = await self._flights.run(key, lambda: self._in_place(spec, key))
            return self._settled(key, spec, found)
        except ModelUnreadable as e:
            if spec.source is not Source.LOCAL_PATH:
                self._remember_failure(failure_key, e)
            raise

    def _settled(self, key: object, spec: ModelSpec, facts: ModelFacts) -> ModelFacts:
        """A copy may be downloaded at any time: it is asked for whenever facts are."""
        return self._kept.settled(key, facts, self._known_size(spec.source_index))

    async def _in_place(self, spec: ModelSpec, key: object) -> ModelFacts:
        async with self._places[spec.source or Source.LOCAL_PATH]:
            return await self._read(spec, key)

    async def _read(self, spec: ModelSpec, key: object) -> ModelFacts:
        origin = origin_of(spec)
        if spec.is_gguf:
            return await self._read_gguf(spec, key, origin)
        try:
            files = await self._library.open(origin, deep=wants_pipeline(spec))
            if not files.sizes and files.cheap:  # as a mount point looks before its file system is there
                raise PathAbsent("path_empty", f"{files.label} is empty on this host", retryable=True)
        except PathAbsent as e:
            return await self._read_on_workers(spec, key, e)
        except ModelUnreadable as e:
            # good enough where the row says how much to claim, or a copy is known
            return self._keep(spec, key, Parts(config_error=e, unknown_because=str(e)), origin.name, "")
        local = origin.source is Source.LOCAL_PATH
        fresh = self._options.local_fresh if local else self._options.hub_fresh
        if (kept := self._kept.unchanged(key, files.key, fresh)) is not None:
            return kept
        parts = await self._read_parts(spec, files)
        parts.listed_bytes, parts.on_this_host = sum(files.sizes.values()), local
        return self._keep(spec, key, parts, files.label, files.key, files.sizes.get(CONFIG, 0))

    async def _read_parts(self, spec: ModelSpec, files: ModelFiles) -> Parts:
        parts = Parts()
        index = await self._pipeline(spec, files, parts)

        async def config() -> None:
            parts.config = await self._library.config(files)

        async def weights() -> None:
            found = await self._library.weights(files, index)
            parts.weight_bytes = found.total
            parts.warnings += found.warnings

        wrong: list[ModelUnreadable] = []

        async def sized() -> None:
            if (e := await _caught(weights)) is not None:
                if e.retryable:
                    parts.unknown_because = str(e)
                else:
                    wrong.append(e)

        async def configured() -> None:
            parts.config_error = await _caught(config)

        async with anyio.create_task_group() as group:
            group.start_soon(sized)
            if index is None:
                group.start_soon(configured)
            group.start_soon(self._add_ons, spec, parts)
        if wrong:
            raise wrong[0]
        return parts

    async def _pipeline(self, spec: ModelSpec, files: ModelFiles, parts: Parts) -> Any | None:
        """`model_index.json` where its components are what is loaded."""
        if not wants_pipeline(spec):
            return None
        try:
            index = await self._library.model_index(files)
        except ModelUnreadable as e:
            parts.warnings.append(e.problem)  # any failure means "no pipeline" (section 11 step 1)
            return None
        parts.is_diffusers = is_diffusers_index(index)
        return index if index is not None and (parts.is_diffusers or spec.categories) else None

    async def _add_ons(self, spec: ModelSpec, parts: Parts) -> None:
        """Adapters and the draft model: what cannot be sized counts 0 and is said."""

        async def size(origin: FileOrigin) -> int:
            files = await self._library.open(origin)
            return (await self._library.weights(files)).total

        for origin in adapter_origins(spec):
            parts.lora_bytes += await self._add_on(spec, "adapter", origin, size, parts)
        draft = draft_origin(spec) if self._options.size_draft else None
        if draft is not None:
            parts.draft_bytes = await self._add_on(spec, "draft model", draft, size, parts)

    async def _add_on(
        self,
        spec: ModelSpec,
        what: str,
        origin: FileOrigin,
        size: Callable[[FileOrigin], Awaitable[int]],
        parts: Parts,
    ) -> int:
        copy = self._known_size(origin.index) or 0
        if copy > 0 and origin.path is None:
            return copy
        try:
            try:
                return await within(self._options.hub_seconds, lambda: size(origin), origin.name)
            except PathAbsent:
                if copy > 0:
                    return copy
                found, _ = await self._workers.weight_size(self._hosts(spec), origin.name, spec.name)
                return found
        except ModelUnreadable as e:
            parts.warnings.append(f"{what} {origin.name} is not counted: {e.problem}")
            return 0

    async def _read_on_workers(self, spec: ModelSpec, key: object, absent: PathAbsent) -> ModelFacts:
        """A path that this host does not have: the workers' word for it (sections 2.2, 6.3)."""
        path = (spec.local_path or "").rstrip("/")
        hosts = self._hosts(spec)
        if not hosts.hosts and not hosts.dropped:
            raise absent
        parts = Parts()
        if wants_pipeline(spec):
            await self._probe_on_workers(spec, hosts, path, parts)

        async def config() -> None:
            parts.config, _ = await self._workers.json_file(hosts, f"{path}/{CONFIG}", spec.name)

        async def weights() -> None:
            parts.weight_bytes, _ = await self._workers.weight_size(hosts, path, spec.name)

        async def configured() -> None:
            parts.config_error = await _caught(config)

        async def sized() -> None:
            if (e := await _caught(weights)) is not None:
                parts.unknown_because = str(e)

        async with anyio.create_task_group() as group:
            group.start_soon(sized)
            if not parts.is_diffusers:
                group.start_soon(configured)
            group.start_soon(self._add_ons, spec, parts)
        return self._keep(spec, key, parts, path, ON_WORKERS)

    async def _probe_on_workers(self, spec: ModelSpec, hosts: Hosts, path: str, parts: Parts) -> None:
        async def probe() -> None:
            index, _ = await self._workers.json_file(hosts, f"{path}/model_index.json", spec.name)
            parts.is_diffusers = is_diffusers_index(index)

        async def in_time() -> None:
            await within(self._options.probe_seconds, probe, path)

        await _caught(in_time)

    async def _read_gguf(self, spec: ModelSpec, key: object, origin: FileOrigin) -> ModelFacts:
        facts = await self._gguf(spec, origin, self._library)
        local = spec.source is Source.LOCAL_PATH
        fresh = self._options.local_fresh if local else self._options.hub_fresh
        self._kept.keep(key, facts, "gguf", fresh, HEADER_ENTRY * len(facts.gguf.tensors))
        return facts

    def _keep(
        self, spec: ModelSpec, key: object, parts: Parts, label: str, files_key: str, config_bytes: int = 0
    ) -> ModelFacts:
        facts = assemble(spec, parts, label)
        seconds = self._options.hub_fresh
        whole = parts.weight_bytes is not None and parts.config_error is None and bool(files_key)
        if not whole:
            seconds = self._options.failure_fresh
        elif spec.source is Source.LOCAL_PATH:
            seconds = self._options.local_fresh
        self._kept.keep(key, facts, files_key, seconds, config_bytes, whole=whole)
        return facts

    def _remember_failure(self, key: object, e: ModelUnreadable) -> None:
        now = self._clock()
        if len(self._failed) >= 1024:
            self._failed = {k: v for k, v in self._failed.items() if v[0] > now}
        if len(self._failed) < 4096:
            self._failed[key] = (now + self._options.failure_fresh, e)


async def _caught(call: Callable[[], Awaitable[None]]) -> ModelUnreadable | None:
    try:
        await call()
    except ModelUnreadable as e:
        return e
    return None
