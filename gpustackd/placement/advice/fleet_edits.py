"""Changes of the fleet that could help, tried worker by worker in the order of the nearest miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.fleet.rows import GpuRow
from gpustackd.placement.advice.changes import (
    AddGpu,
    AddWorker,
    Change,
    Holder,
    OpenGpus,
    ReadyWorker,
    StopInstances,
)
from gpustackd.placement.advice.trials import Trials
from gpustackd.placement.search import Search

WORKERS = 16
"""Workers on which a kind of change is tried."""
STOPPED = 8
"""Instances that are stopped together at most."""
STOPS_TRIED = 160
NEW = 2**62
"""Ids of rows that are not there yet."""


def open_gpus(trials: Trials, search: Search, order: Sequence[int]) -> Iterator[Change]:
    """Cordoned GPUs of one worker, as few as do."""
    fleet = search.context.fleet
    rank = {w: n for n, w in enumerate(order)}
    here = [w for w in rank if _closed(fleet, w)]
    for w in sorted(here, key=lambda w: rank[w])[:WORKERS]:
        closed = sorted(_closed(fleet, w), key=lambda g: (g.type, g.index))
        name = fleet.row(w).name
        for n in range(1, len(closed) + 1):
            change = OpenGpus(name, tuple(closed[:n]))
            if trials.alone(change) is not None:
                yield change
                break


def _closed(fleet: Fleet, w: int) -> list[GpuRow]:
    rows = [fleet.gpu_rows[int(g)] for g in fleet.gpu_id[w] if g]
    return [r for r in rows if not r.schedulable]


def ready_workers(trials: Trials, search: Search) -> Iterator[Change]:
    """Workers that are not READY and pass every other filter, those in maintenance first."""
    fleet = search.context.fleet
    status = next((n for n, f in enumerate(search.context.filters) if f.name == "status"), None)
    if status is None:
        return
    rows = np.flatnonzero(search.context.bits[: fleet.count] == (1 << status))
    free = np.maximum(fleet.vram_capacity[rows] - fleet.vram_allocated[rows], 0).sum(axis=1)
    found = [
        (row.state != "MAINTENANCE", -int(free[n]), row.id, row)
        for n, w in enumerate(rows.tolist())
        if (row := fleet.row(w)).state not in ("DELETING", "ERROR")
    ]
    for _, _, _, row in sorted(found, key=lambda f: f[:3])[:WORKERS]:
        change = ReadyWorker(row.name, row.id, row.state)
        if trials.alone(change) is not None:
            yield change


def stops(
    trials: Trials,
    search: Search,
    order: Mapping[int, int],
    holders: Mapping[int, Holder],
    priority: int,
) -> Iterator[Change]:
    """Instances that give way: one where one does, else as few as do on one worker. `order`: the workers to
    look at, with the bytes that each lacks.

    None of a higher priority, and none of the same model: that would gain nothing.
    """
    fleet = search.context.fleet
    tried: set[int] = set()
    several: list[StopInstances] = []
    for w, lacking in islice(order.items(), WORKERS):
        held = _held(fleet, int(fleet.worker_id[w]), holders, search.context.model_id, priority)
        if sum(size for _, size in held) < lacking:
            continue
        found = False
        for holder, size in held:
            if holder.id in tried or len(tried) >= STOPS_TRIED or size < lacking:
                continue
            tried.add(holder.id)
            change = StopInstances((holder,), size)
            if trials.alone(change) is not None:
                found = True
                yield change
        if not found and len(held) > 1 and len(several) < 3:
            more = _several(trials, held)
            if more is not None:
                several.append(more)
    yield from several


def _held(
    fleet: Fleet, worker_id: int, holders: Mapping[int, Holder], model_id: int, priority: int
) -> list[tuple[Holder, int]]:
    """Who could give way on a worker and how much each holds in all: least important, then least first."""
    ids = fleet.occupancy.instances_on_worker.get(worker_id, {})
    found = [
        (holder, sum(b.vram + b.ram for b in fleet.occupancy.by_instance.get(i, ())))
        for i in ids
        if (holder := holders.get(i)) is not None
        and holder.model_id != model_id
        and holder.priority <= priority
    ]
    return sorted(found, key=lambda h: (h[0].priority, h[1], h[0].id))


def _several(trials: Trials, held: Sequence[tuple[Holder, int]]) -> StopInstances | None:
    """The largest ones first until it fits, then whoever need not stop is let go on."""
    chosen: list[tuple[Holder, int]] = []
    for item in sorted(held, key=lambda h: (-h[1], h[0].id)):
        chosen.append(item)
        if len(chosen) > STOPPED:
            return None
        if len(chosen) > 1 and trials.alone(_stop(chosen)) is not None:
            break
    else:
        return None
    for item in sorted(chosen, key=lambda h: (-h[0].priority, -h[1])):
        fewer = [c for c in chosen if c is not item]
        if fewer and trials.alone(_stop(fewer)) is not None:
            chosen = fewer
    return _stop(chosen)


def _stop(chosen: Sequence[tuple[Holder, int]]) -> StopInstances:
    return StopInstances(tuple(h for h, _ in chosen), sum(size for _, size in chosen))


def more_gpus(trials: Trials, search: Search, order: Sequence[int]) -> Iterator[Change]:
    """One more GPU: of the worker's own kind where that does, else of another kind that the fleet has."""
    fleet = search.context.fleet
    kinds = known_kinds(fleet)
    seen: set[tuple[str, str | None, int | None]] = set()
    for w in order[:WORKERS]:
        if fleet.unified[w]:
            continue
        mine = [fleet.gpu_rows[int(g)] for g in fleet.gpu_id[w] if g]
        own = max(mine, key=lambda g: (g.vram_total or 0, -g.index), default=None)
        offered = [own] if own is not None else kinds
        for like in offered:
            key = (like.type, like.name, like.vram_total)
            if key in seen or like.vram_total is None:
                continue
            change = AddGpu(fleet.row(w).name, _new_gpu(fleet, w, like, mine))
            if trials.alone(change) is not None:
                seen.add(key)
                yield change
    for like in kinds:
        key = (like.type, like.name, like.vram_total)
        if key in seen:
            continue
        for w in order[:2]:
            mine = [fleet.gpu_rows[int(g)] for g in fleet.gpu_id[w] if g]
            if fleet.unified[w] or any(g.type != like.type for g in mine):
                continue
            change = AddGpu(fleet.row(w).name, _new_gpu(fleet, w, like, mine))
            if trials.alone(change) is not None:
                seen.add(key)
                yield change
                break


def known_kinds(fleet: Fleet) -> list[GpuRow]:
    """One GPU of each kind in the fleet whose size is known, the largest first. Not those that share their
    memory with a host: they are no cards, and go into no other worker."""
    kinds: dict[tuple[str, str | None, int | None], GpuRow] = {}
    built_in = set(fleet.worker_id[fleet.unified].tolist())
    for row in fleet.gpu_rows.values():
        if row.worker_id in built_in:
            continue
        kinds.setdefault((row.type, row.name, row.vram_total), row)
    known = [r for r in kinds.values() if r.vram_total]
    return sorted(known, key=lambda r: (-(r.vram_total or 0), r.type, r.name or ""))[:12]


def _new_gpu(fleet: Fleet, w: int, like: GpuRow, mine: Sequence[GpuRow]) -> GpuRow:
    """An empty card of a kind, as a worker would report it besides its own."""
    host = fleet.row(w)
    index = 1 + max((g.index for g in mine if g.type == like.type), default=-1)
    return _empty(like, NEW + 1, host.id, index, host.vram_reserved)


def _empty(like: GpuRow, gpu_id: int, worker_id: int, index: int, reserved: int) -> GpuRow:
    total = like.vram_total or 0
    return replace(
        like, id=gpu_id, worker_id=worker_id, index=index, version=0, uuid=None, vram_allocated=0,
        over_committed=False, schedulable=True, open=True, vram_used=None, links=None, network=None,
        capacity=max(total - reserved, 0),
    )  # fmt: skip


def more_workers(trials: Trials, search: Search, order: Sequence[int]) -> Iterator[Change]:
    """One more worker like one that passed every filter, the smallest kind that does."""
    fleet = search.context.fleet
    kinds: dict[tuple[object, ...], int] = {}
    for w in order:
        gpus = [fleet.gpu_rows[int(g)] for g in fleet.gpu_id[w] if g]
        key = (
            tuple(sorted((g.type, g.name or "", g.vram_total or 0) for g in gpus)),
            int(fleet.ram_capacity[w]),
        )
        kinds.setdefault(key, w)
        if len(kinds) >= WORKERS:
            break
    for w in sorted(kinds.values(), key=lambda w: int(np.maximum(fleet.vram_capacity[w], 0).sum())):
        change = _another(fleet, w)
        if change is not None and trials.alone(change) is not None:
            yield change
            return


def _another(fleet: Fleet, w: int) -> AddWorker | None:
    host = fleet.row(w)
    gpus = [fleet.gpu_rows[int(g)] for g in fleet.gpu_id[w] if g]
    if host.ram_capacity is None or any(g.vram_total is None for g in gpus):
        return None
    name = next(n for k in range(2, 10_000) if (n := f"{host.name}-{k}") not in fleet.by_name)
    row = replace(host, id=NEW, name=name, version=0, ram_allocated=0, over_committed=False, ip=None,
                  advertise_address=None, ifname=None, port=None)  # fmt: skip
    columns = {
        "state": "READY", "cluster_id": host.cluster_id, "labels": dict(host.labels) or None,
        "ram_total": host.ram_capacity + (host.vram_reserved if host.unified_memory else 0),
        "vram_reserved": host.vram_reserved, "unified_memory": host.unified_memory, "cpu_arch": host.cpu_arch,
    }  # fmt: skip
    cards = tuple(
        _empty(g, NEW + 1 + n, NEW, g.index, host.vram_reserved)
        for n, g in enumerate(sorted(gpus, key=lambda g: (g.type, g.index)))
    )
    return AddWorker(host.name, row, cards, {k: v for k, v in columns.items() if v is not None})
