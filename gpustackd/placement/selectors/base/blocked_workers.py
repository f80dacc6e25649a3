"""Workers whose cards would do, and which something else keeps out: RAM that goes with what is booked on the
cards, or a part of another distributed instance of the same engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Reason
from gpustackd.placement.context.cards import Cards, ram_holds, single_card_fits
from gpustackd.placement.context.distributed_limit import mask, occupant
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.diagnostics.wording import gib, have, of_needed, some, workers
from gpustackd.placement.rules.resource_rules import ResourceRules
from gpustackd.placement.selectors.base.gpu_sets import several

SHOWN = 3


def blocked_by_ram(
    context: PlacementContext, kinds: Collection[str], rows: Ints, cards: Cards
) -> tuple[Bools, Reason | None]:
    """(R,) workers whose cards hold the model by themselves, but not with the RAM that then is needed: a
    ratio of what is booked, or all of it from one pool. And the nearest of them, in words."""
    rules = context.rules
    nobody: Bools = np.zeros(len(rows), np.bool_)
    if not rules.ram_ratio and not cards.unified.any():
        return nobody, None
    booked = _booked(context, kinds, cards)
    short: Bools = (booked >= 0) & ~ram_holds(cards, rules, booked, cards.ram, cards.unified)
    if not short.any():
        return nobody, None
    need = np.array([_need(rules, int(b), bool(u)) for b, u in zip(booked, cards.unified, strict=True)])
    at = int(np.argmin(np.where(short, need - cards.ram, np.iinfo(np.int64).max)))
    count, name = int(np.count_nonzero(short)), context.fleet.row(int(rows[at])).name
    nearest = _words(rules, name, int(cards.ram[at]), int(booked[at]), bool(cards.unified[at]))
    text = f"{workers(count)} {have(count)} the GPU memory but not enough RAM; the nearest is {nearest}"
    return short, _ram(text, name, int(cards.ram[at]), int(need[at]), int(booked[at]), workers=count)


def _booked(context: PlacementContext, kinds: Collection[str], cards: Cards) -> Ints:
    """(R,) least VRAM that a placement on that worker books where RAM is no matter; -1 = none is possible."""
    rules = replace(context.rules, ram=0, ram_static=None, ram_ratio=None)
    most = np.iinfo(np.int64).max
    booked: Ints = np.full(len(cards.positions), -1, np.int64)
    if "one_gpu" in kinds:
        fits, claim = single_card_fits(cards, rules)
        any_ = fits.any(axis=1)
        booked[any_] = np.where(fits, claim, most).min(axis=1)[any_]
    if "one_worker" in kinds:
        for code in np.unique(cards.type[cards.usable]).tolist():
            offer = several(cards, rules, code)
            new = (offer.count > 0) & (booked < 0)
            booked[new] = offer.booked[new]
    return booked


def busy_elsewhere(context: PlacementContext, rows: Ints) -> tuple[str, dict[str, Any]]:
    """Workers that may not take part in another distributed instance, for the end of a line; and as data."""
    fleet, engine = context.fleet, context.rules.engine
    taken = rows[~mask(fleet, rows, engine)].tolist()
    if not taken:
        return "", {}
    names = [fleet.row(w).name for w in taken[:SHOWN]]
    holders = list(dict.fromkeys(occupant(fleet, w, engine) for w in taken[:SHOWN]))
    run = "runs" if len(taken) == 1 else "run"
    text = f"; {some(names, SHOWN, len(taken))} already {run} part of another distributed instance"
    text += f" ({some([str(h) for h in holders], SHOWN)})"
    return text, {"taken": len(taken), "taken_workers": names, "instances": holders}


def picked(
    fleet: Fleet, rules: ResourceRules, booked: Mapping[int, int], full: Sequence[int]
) -> Reason | None:
    """What keeps hand-picked cards out. `booked`: VRAM that would be booked, by worker position; `full`: the
    positions that hold a part of another distributed instance, where one over workers is needed."""
    if full:
        name, holder = fleet.row(full[0]).name, occupant(fleet, full[0], rules.engine)
        text = f"worker {name} already runs part of another distributed instance ({holder})"
        params = {"worker": name, "instance": holder, "workers": [fleet.row(w).name for w in full[:SHOWN]]}
        return Reason("gpu_selector.taken", "gpu_selector", text, params)
    free = {w: int(fleet.free_ram(np.array([w]))[0]) for w in booked}
    short = {
        w: need - free[w]
        for w, b in booked.items()
        if (need := _need(rules, b, bool(fleet.unified[w]))) > free[w]
    }
    if not short:
        return None
    w = max(short, key=lambda w: short[w])
    name, unified = fleet.row(w).name, bool(fleet.unified[w])
    text = f"not enough RAM beside the selected GPUs: {_words(rules, name, free[w], booked[w], unified)}"
    return _ram(text, name, free[w], _need(rules, booked[w], unified), booked[w], stage="gpu_selector")


def _need(rules: ResourceRules, booked: int, unified: bool) -> int:
    """Bytes that a worker must have free: RAM, and on unified memory what its cards book as well."""
    claim = rules.ram_claim(booked)
    return max(claim + booked if unified else claim, rules.ram)


def _words(rules: ResourceRules, name: str, free: int, booked: int, unified: bool) -> str:
    needed = of_needed(free, _need(rules, booked, unified))
    if unified:
        return f"{name} with {needed} for GPU and RAM together (unified memory)"
    text = f"{name} with {needed}"
    if rules.ram_ratio and not rules.ram_static:
        text += f" ({rules.ram_ratio:g} times the {gib(booked)} booked on its GPUs)"
    return text


def _ram(
    text: str, name: str, free: int, need: int, booked: int, *, stage: str = "fit", **more: Any
) -> Reason:
    params = {"worker": name, "free_bytes": free, "need_bytes": need, "booked_bytes": booked, **more}
    return Reason(f"{stage}.ram", stage, text, params)
