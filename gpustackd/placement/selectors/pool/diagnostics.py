"""Why a pool does not serve: exactly one cause, the first that applies (vGPU spec B.5, whole-card spec)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.domain.pools import InstanceType, Pools
from gpustackd.placement.context.cards import cards, ram_holds
from gpustackd.placement.diagnostics.wording import gib, gib_number, some
from gpustackd.placement.filters.cluster import workers
from gpustackd.placement.selectors.pool.rules import PoolRequest

if TYPE_CHECKING:
    from gpustackd.placement.selectors.pool.search import PoolSelector

SHOWN = 5
MOST_TP = 1024


def problem(
    ask: PoolRequest, found: InstanceType | None, size: int, pools: Pools, spec: ModelSpec
) -> Reason | None:
    """What is wrong with the pool itself, whatever the workers."""
    name = ask.type[:80]
    if found is None:
        others = pools.names_in(spec.cluster_id)
        if not others:
            text = f"instance type {name!r} is not known: the model's cluster has no instance types at all"
            return _pool("no_types", text, type=name, cluster_id=spec.cluster_id)
        text = f"the model's cluster has no instance type {name!r}; it has {some(others, SHOWN)}"
        return _pool("unknown_type", text, type=name, cluster_id=spec.cluster_id, known=others[:SHOWN])
    if not found.described:
        return _pool("no_detail", f"instance type {name!r} has no detail yet", type=name)
    label = found.label[:80]
    if not found.manufacturer or not found.product:
        text = f"instance type {name!r} is no kind of accelerator: it names no manufacturer and product"
        return _pool("no_accelerator", text, type=name, label=label)
    if not found.memory and not ask.profile:
        return _pool("no_memory", f"{label} reports no card memory yet", type=name, label=label)
    if ask.profile and not size:
        offered = sorted(n for n, memory in found.profiles.items() if memory)
        text = f"{label} offers no partition {ask.profile[:60]!r}"
        text += f"; it offers {some(offered, SHOWN)}" if offered else "; it offers none"
        return _pool("unknown_profile", text, type=name, label=label, profile=ask.profile[:60],
                     offered=offered[:SHOWN])  # fmt: skip
    return None


def lacking(step: PoolSelector, rows: Ints) -> tuple[list[Reason], Cure]:
    """The first cause that applies on workers that passed every filter; each names the pool."""
    found, cures = _causes(step, rows)
    return [replace(r, params={"type": step.ask.type[:80], **r.params}) for r in found], cures


def _causes(step: PoolSelector, rows: Ints) -> tuple[list[Reason], Cure]:
    if step.pool.problem is not None:
        return [step.pool.problem], Cure.BACKENDS | Cure.MODEL
    if not len(rows):
        return [], Cure.NONE
    pool = step.pool.type
    label = pool.label[:80] if pool else step.ask.type
    n = step.ask.cards
    matching = np.count_nonzero(step.matching(rows), axis=1)
    members = rows[matching >= n]
    if not len(members):
        most = int(matching.max(initial=0))
        wanted = f"{n} cards" if n > 1 else "a card"
        text = f"no worker has {wanted} of {label}"
        text += f", the most on one is {most}" if most else ""
        return [_pool("no_worker", text, label=label, cards=n, most=most)], Cure.WORKER | Cure.BACKENDS
    serving = members[step.report.open(step.fleet, members).any(axis=1)]
    if not len(serving):
        return [_incapable(step, label, len(members))], Cure.BACKENDS | Cure.WORKER
    found = cards(step.fleet, serving, step.rules)
    holding = ram_holds(found, step.rules, np.zeros(len(serving), np.int64), found.ram, found.unified)
    if not holding.any():
        return [_ram(step, serving, found.ram)], Cure.CAPACITY
    serving = serving[holding]
    short = _too_large(step, label, serving)
    if short is not None:
        return [short], Cure.MODEL | Cure.WORKER | Cure.BACKENDS
    return [_in_use(step, label, serving)], Cure.CAPACITY | Cure.WORKER | Cure.BACKENDS


def _incapable(step: PoolSelector, label: str, count: int) -> Reason:
    ask = step.ask
    if ask.profile:
        mode, what = "partition", f"partition {ask.profile[:60]!r}"
    elif ask.whole:
        mode, what = "whole", f"{ask.cards} untouched card{'s' if ask.cards > 1 else ''}"
    else:
        mode, what = "slice", f"slices by software with {ask.memory:g} % of a card left"
    text = (
        f"{workers(count)} of {label}, but the cluster reports none that offers {what}: "
        "what is missing there is that mode, or room in it"
    )
    return _pool("no_capable_node", text, label=label, mode=mode, workers=count, profile=ask.profile[:60])


def _ram(step: PoolSelector, rows: Ints, ram: Ints) -> Reason:
    at = int(np.argmax(ram))
    name, need = step.fleet.row(int(rows[at])).name, step.rules.ram_floor
    text = (
        f"{workers(len(rows))} of the pool, but too little RAM on each; the most is free on {name}: "
        f"{gib(int(ram[at]))} of the {gib(need)} needed"
    )
    return _pool("ram", text, workers=len(rows), worker=name, free_bytes=int(ram[at]), need_bytes=need)


def _too_large(step: PoolSelector, label: str, rows: Ints) -> Reason | None:
    """The need exceeds what the pool gives at most, even empty."""
    ask, rules, size = step.ask, step.rules, step.pool.size
    v, members = rules.vram, len(rows)
    params: dict[str, Any] = {
        "label": label, "need_bytes": v, "need_gib": gib_number(v), "part_bytes": size,
        "part_gib": gib_number(size), "workers": members,
    }  # fmt: skip
    if ask.whole:
        capacity = step.claim(rows)
        offered = np.where(step.matching(rows), capacity, 0)
        best = int(np.sort(offered, axis=1)[:, -ask.cards :].sum(axis=1).max())
        return None if v <= best else _whole(step, label, best, params)
    parts = step.parts
    if parts == 1:
        return None
    fewest = -(-v // size)
    params |= {"parts": parts or fewest}
    head = f"the model needs {gib(v)}, one part of {label} is {gib(size)}"
    if parts is None:
        if ask.world:
            text = f"{head}: the model's flags ask for {ask.world}, it takes {fewest}"
            return _pool("world", text, world=ask.world, **params)
        complaint = rules.divisors.complaint(fewest)
        return _pool("not_divisible", f"{head}: {complaint}, nor does more of them serve", **params)
    if not rules.distributed:
        text = f"{head}; distributed inference across workers is off for this model"
        if ask.world > 1:
            text += f", and its flags ask for {ask.world} parts"
        return _pool("part_too_small", text, **params)
    if parts > members:
        text = (
            f"{head}: {parts} parts are needed, one on each worker; {workers(members)} of the pool can serve"
        )
        return _pool("too_few_workers", text, **params)
    return None


def _whole(step: PoolSelector, label: str, best: int, params: dict[str, Any]) -> Reason:
    ask, v, size = step.ask, step.rules.vram, step.pool.size
    tp = 1
    while tp * size < v and tp < MOST_TP:
        tp *= 2
    n = f"{ask.cards} cards give" if ask.cards > 1 else "one card gives"
    text = f"the model needs {gib(v)}, {n} {gib(ask.cards * size)} ({label}, {gib(size)} each)"
    if best < ask.cards * size:  # reserved, or smaller than the pool says
        text += f", of which {gib(best)} can be booked on one worker"
        params = params | {"bookable_bytes": best}
    if tp * size >= v and tp > ask.cards:
        text += f"; a tensor-parallel size of {tp} would hold it on one worker"
        params = params | {"suggested_tp": tp}
    return _pool("cards_too_small", text, cards=ask.cards, **params)


def _in_use(step: PoolSelector, label: str, rows: Ints) -> Reason:
    """There are such cards, but none (or too few) with room now."""
    ask, fleet = step.ask, step.fleet
    found = cards(fleet, rows, step.rules)
    matching = step.matching(rows)
    free = np.where(matching & found.usable, found.free, -1)
    r, s = np.unravel_index(int(np.argmax(free)), free.shape)
    name = f"{fleet.row(int(rows[r])).name}:{int(fleet.gpu_index[rows[r], s])}"
    params: dict[str, Any] = {"label": label, "workers": len(rows), "cards": ask.cards}
    if free[r, s] >= 0:
        params |= {"gpu": name, "free_bytes": int(free[r, s]), "part_bytes": step.pool.size}
    if ask.whole:
        open_ = np.count_nonzero(step.eligible(found, rows), axis=1)
        at = int(np.argmax(open_))
        text = (
            f"cards of {label} are in use: {fleet.row(int(rows[at])).name} has most untouched ones, "
            f"{int(open_[at])}, needed {ask.cards} on one worker"
        )
        return _pool("in_use", text, untouched=int(open_[at]), **params)
    parts = step.parts or 1
    open_workers = int(np.count_nonzero(step.count[rows]))
    text = f"cards of {label} are in use: {workers(open_workers)} of {len(rows)} can give a part of "
    text += f"{gib(step.pool.size)} now, needed {parts}"
    if free[r, s] >= 0:
        text += f"; the most is free on {name}, {gib(int(free[r, s]))}"
    return _pool("in_use", text, open_workers=open_workers, parts=parts, **params)


def _pool(code: str, text: str, **params: Any) -> Reason:
    return Reason(f"pool.{code}", "pool", text, params)
