"""Composition of what asks "what if": the real reader of models and prober of paths, around one moment."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from time import monotonic

from gpustackd.daemon.configure import policy, reader_options, usage_fresh, worker_token
from gpustackd.daemon.queue.ordering import QueueOrder
from gpustackd.daemon.scheduling.file_locations import FileLocations
from gpustackd.daemon.scheduling.path_probe import PROBE_CONNECT, PROBE_TOTAL, PathProbe
from gpustackd.daemon.whatif.plan import Plan, Planner
from gpustackd.daemon.whatif.snapshot import Snapshot
from gpustackd.ports import Store
from gpustackd.settings import Settings
from gpustackd.sources.reader import Reader
from gpustackd.sources.worker_files import WorkerFiles
from gpustackd.store.documents.reading import Document
from gpustackd.store.memory.overlay import Overlay
from gpustackd.store.memory.whole_copy import whole
from gpustackd.store.postgres.snapshot import snapshot


@asynccontextmanager
async def standing_on(
    store: Store, settings: Settings, foreign: Mapping[int, int] | None = None
) -> AsyncIterator[Snapshot]:
    """What a daemon with these settings would know of a store; `foreign` is what `held_by_others` said.
    Raises DatabaseUnavailable."""
    async with AsyncExitStack() as stack:
        around = FileLocations()
        models = await stack.enter_async_context(
            Reader(
                replace(reader_options(settings), eager=False),
                hosts=around.hosts,
                known_size=around.known_size,
            )
        )
        files = WorkerFiles(worker_token(settings), total=PROBE_TOTAL, connect=PROBE_CONNECT)
        stack.push_async_callback(files.aclose)
        paths = PathProbe(files, around, monotonic)
        yield await Snapshot.of(
            store,
            models,
            policy(settings),
            around,
            paths,
            order=QueueOrder(settings.queue_order),
            foreign=foreign,
        )


async def held_by_others(store: Store, settings: Settings) -> Mapping[int, int] | None:
    """Bytes that others hold, by GPU id; None where the settings pass over that."""
    fresh = usage_fresh(settings)
    return None if fresh is None else await store.foreign_memory(fresh)


@asynccontextmanager
async def planned(
    url: str, settings: Settings, files: Sequence[Sequence[Document]]
) -> AsyncIterator[tuple[Plan, Mapping[int, tuple[str, str]]]]:
    """What would become of documents, each inner sequence a file of them; and (instance, model) by the id of
    every instance there would be. Raises Refused as `apply` would, DatabaseUnavailable or WrongRevision."""
    async with snapshot(url, "gpustackd plan") as (source, connection):
        store = await whole(source, connection)
        zone = settings.timezone or await connection.fetchval("SHOW timezone")
        hints = {w.id: w.hints for w in await source.waiting(None)}
        foreign = await held_by_others(source, settings)
    # The database is let go: a hub may take its time, and a large plan does.
    before = list(store.model_instances)
    overlay = Overlay(store)
    for documents in files:
        await overlay.write(documents)
    async with standing_on(store, settings, foreign) as standing:
        planner = Planner(store, overlay, standing, hints)
        made = await planner.plan(before, zone=zone)
        models = store.models_by_id
        yield made, {i.id: (i.name, models[i.model_id].name) for i in store.model_instances.values()}


@asynccontextmanager
async def uncollected() -> AsyncIterator[None]:
    """No garbage is looked for meanwhile: what is known of a large fleet holds no cycles, and to look through
    it again and again while it is read takes longer than to read it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
