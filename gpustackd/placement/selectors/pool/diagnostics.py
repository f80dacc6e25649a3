"""Why a pool does not serve: exactly one cause, the first that applies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.context.cards import ram_holds, read_cards
from gpustackd.placement.diagnostics.wording import gib, gib_number, not_enough_ram, workers
from gpustackd.placement.selectors.pool.inventory import pool_reason
from gpustackd.placement.selectors.pool.search import PoolSelector

MOST_TP = 1024


def diagnose(selector: PoolSelector, rows: Ints) -> tuple[list[Reason], Cure]:
    """The first cause that applies on workers that passed every filter; each names the pool."""
    selector.refresh()
    found, cures = _causes(selector, rows)
    return [replace(r, params={"type": selector.ask.type[:80], **r.params}) for r in found], cures


def _causes(selector: PoolSelector, rows: Ints) -> tuple[list[Reason], Cure]:
    if selector.pool.problem is not None:
        return [selector.pool.problem], Cure.BACKENDS | Cure.MODEL
    if not len(rows):
        return [], Cure.NONE
    pool = selector.pool.type
    label = pool.label[:80] if pool else selector.ask.type
    n = selector.ask.cards
    matching = np.count_nonzero(selector.matching(rows), axis=1)
    members = rows[matching >= n]
    if not len(members):
        most = int(matching.max(initial=0))
        wanted = f"{n} cards" if n > 1 else "a card"
        text = f"no worker has {wanted} of {label}"
        text += f"; the most on one is {most}" if most else ""
        return [pool_reason("no_worker", text, label=label, cards=n, most=most)], Cure.WORKER | Cure.BACKENDS
    serving = members[selector.report.open(selector.fleet, members).any(axis=1)]
    if not len(serving):
        return [_incapable(selector, label, len(members))], Cure.BACKENDS | Cure.WORKER
    cards = read_cards(selector.fleet, serving, selector.rules)
    holding = ram_holds(cards, selector.rules, np.zeros(len(serving), np.int64), cards.ram, cards.unified)
    if not holding.any():
        return [_ram(selector, serving, cards.ram)], Cure.CAPACITY
    serving = serving[holding]
    short = _too_large(selector, label, serving)
    if short is not None:
        return [short], Cure.MODEL | Cure.WORKER | Cure.BACKENDS
    return [_in_use(selector, label, serving)], Cure.CAPACITY | Cure.WORKER | Cure.BACKENDS


def _incapable(selector: PoolSelector, label: str, count: int) -> Reason:
    ask = selector.ask
    if ask.profile:
        mode, what = "partition", f"partition {ask.profile[:60]!r}"
    elif ask.whole:
        mode, what = "whole", f"{ask.cards} untouched card{'s' if ask.cards > 1 else ''}"
    else:
        mode, what = "slice", f"software slices with {ask.memory:g} % of a card left"
    text = (
        f"{workers(count)} with {label}, but the cluster reports none that offers {what}: "
        "that mode is missing or full"
    )
    return pool_reason(
        "no_capable_node", text, label=label, mode=mode, workers=count, profile=ask.profile[:60]
    )


def _ram(selector: PoolSelector, rows: Ints, ram: Ints) -> Reason:
    at = int(np.argmax(ram))
    name, need = selector.fleet.row(int(rows[at])).name, selector.rules.ram_floor
    where = "the worker of the pool" if len(rows) == 1 else f"all {workers(len(rows))} of the pool"
    text = not_enough_ram(where, name, int(ram[at]), need)
    return pool_reason("ram", text, workers=len(rows), worker=name, free_bytes=int(ram[at]), need_bytes=need)


def _too_large(selector: PoolSelector, label: str, rows: Ints) -> Reason | None:
    """The need exceeds what the pool gives at most, even empty."""
    ask, rules, size = selector.ask, selector.rules, selector.pool.size
    v, members = rules.vram, len(rows)
    params: dict[str, Any] = {
        "label": label, "need_bytes": v, "need_gib": gib_number(v), "part_bytes": size,
        "part_gib": gib_number(size), "workers": members,
    }  # fmt: skip
    if ask.whole:
        capacity = selector.claim(rows)
        offered = np.where(selector.matching(rows), capacity, 0)
        best = int(np.sort(offered, axis=1)[:, -ask.cards :].sum(axis=1).max())
        return None if v <= best else _whole(selector, label, best, params)
    parts = selector.parts
    if parts == 1:
        return None
    fewest = -(-v // size)
    params |= {"parts": parts or fewest}
    head = f"the model needs {gib(v)}, one part of {label} is {gib(size)}"
    if parts is None:
        if ask.world:
            text = f"{head}: the model's flags ask for {ask.world}, but it needs {fewest}"
            return pool_reason("world", text, world=ask.world, **params)
        complaint = rules.divisors.complaint(fewest)
        return pool_reason("not_divisible", f"{head}: {complaint}, and more of them do not help", **params)
    if not rules.distributed:
        text = f"{head}; distributed inference across workers is off for this model"
        if ask.world > 1:
            text += f", and its flags ask for {ask.world} parts"
        return pool_reason("part_too_small", text, **params)
    if parts > members:
        text = f"{head}: {parts} parts needed, one per worker; {workers(members)} of the pool can give one"
        return pool_reason("too_few_workers", text, **params)
    return None


def _whole(selector: PoolSelector, label: str, best: int, params: dict[str, Any]) -> Reason:
    ask, v, size = selector.ask, selector.rules.vram, selector.pool.size
    tp = 1
    while tp * size < v and tp < MOST_TP:
        tp *= 2
    n = f"{ask.cards} cards give" if ask.cards > 1 else "one card gives"
    text = f"the model needs {gib(v)}, {n} {gib(ask.cards * size)} ({label}, {gib(size)} each)"
    if best < ask.cards * size:  # reserved, or smaller than the pool says
        text += f", of which {gib(best)} can be booked on one worker"
        params = params | {"bookable_bytes": best}
    if tp * size >= v and tp > ask.cards:
        text += f"; a tensor-parallel size of {tp} would make it fit on one worker"
        params = params | {"suggested_tp": tp}
    return pool_reason("cards_too_small", text, cards=ask.cards, **params)


def _in_use(selector: PoolSelector, label: str, rows: Ints) -> Reason:
    """There are such cards, but none (or too few) with room now."""
    ask, fleet = selector.ask, selector.fleet
    cards = read_cards(fleet, rows, selector.rules)
    matching = selector.matching(rows)
    free = np.where(matching & cards.usable, cards.free, -1)
    r, s = np.unravel_index(int(np.argmax(free)), free.shape)
    name = f"{fleet.row(int(rows[r])).name}:{int(fleet.gpu_index[rows[r], s])}"
    params: dict[str, Any] = {"label": label, "workers": len(rows), "cards": ask.cards}
    if free[r, s] >= 0:
        params |= {"gpu": name, "free_bytes": int(free[r, s]), "part_bytes": selector.pool.size}
    if ask.whole:
        open_ = np.count_nonzero(selector.eligible(cards, rows), axis=1)
        at = int(np.argmax(open_))
        text = (
            f"cards of {label} are in use: {fleet.row(int(rows[at])).name} has the most untouched ones, "
            f"{int(open_[at])} of the {ask.cards} needed on one worker"
        )
        return pool_reason("in_use", text, untouched=int(open_[at]), **params)
    parts = selector.parts or 1
    open_workers = int(np.count_nonzero(selector.count[rows]))
    text = f"cards of {label} are in use: {open_workers} of {workers(len(rows))} can give a part of "
    text += f"{gib(selector.pool.size)} now; {parts} needed"
    if free[r, s] >= 0:
        text += f"; {name} has the most free, {gib(int(free[r, s]))}"
    return pool_reason("in_use", text, open_workers=open_workers, parts=parts, **params)
