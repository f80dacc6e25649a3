"""What the workers lack for a MindIE model: why each was passed over, and the best that there is."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.context.cards import Cards, ram_holds
from gpustackd.placement.context.distributed_limit import mask
from gpustackd.placement.diagnostics.wording import (
    gib_number,
    have,
    not_enough_ram,
    of_needed,
    plural,
    some,
    workers,
)
from gpustackd.placement.rules.resource_rules import ResourceRules
from gpustackd.placement.selectors.ascend.npus import Npus, linked
from gpustackd.placement.selectors.ascend.search import MultiWorkerNpuSelector, SingleWorkerNpuSelector

SHOWN = 3


def diagnose(
    selector: SingleWorkerNpuSelector | MultiWorkerNpuSelector, rows: Ints
) -> tuple[list[Reason], Cure]:
    """What these positions, which passed all filters, lack for one selector, and what could cure it."""
    cures = Cure.CAPACITY | Cure.WORKER
    if not len(rows):
        return [], cures
    if isinstance(selector, SingleWorkerNpuSelector):
        return one_worker(selector, rows), cures
    return many_workers(selector, rows), cures


def one_worker(selector: SingleWorkerNpuSelector, rows: Ints) -> list[Reason]:
    """Causes by worker, then the worker that offers most."""
    fleet, rules = selector.fleet, selector.rules
    found, offer = selector.offer(rows)
    has = offer.mine.any(axis=1)
    short = has & ~ram_holds(found, rules, np.zeros(len(rows), np.int64), found.ram, found.unified)
    full = has & ~short & (offer.have == 0)
    reasons: list[Reason] = []
    if not has.all():
        count = int(np.count_nonzero(~has))
        reasons.append(_fit("no_npu", f"{workers(count)} {have(count)} no NPU", workers=count))
    if short.any():
        reasons.append(_ram(fleet, rules, rows, found, short))
    if full.any():
        reasons.append(_fraction(fleet, rules, rows, found, offer, full))
    good = has & ~short & ~full
    if good.any():
        reasons.extend(_largest(selector, rows, offer, good))
    return reasons


def _ram(fleet: Fleet, rules: ResourceRules, rows: Ints, cards: Cards, short: Bools) -> Reason:
    count = int(np.count_nonzero(short))
    need = rules.ram_floor
    at = int(np.argmax(np.where(short, cards.ram, -1)))
    name, free = fleet.row(int(rows[at])).name, int(cards.ram[at])
    text = not_enough_ram(workers(count), name, free, need)
    return _fit("ram", text, workers=count, worker=name, free_bytes=free, need_bytes=need)


def _fraction(
    fleet: Fleet, rules: ResourceRules, rows: Ints, cards: Cards, offer: Npus, full: Bools
) -> Reason:
    count = int(np.count_nonzero(full))
    free = np.where(offer.mine & cards.usable & full[:, None], cards.free, -1)
    r, s = np.unravel_index(int(np.argmax(free)), free.shape)
    text = f"{workers(count)} {have(count)} no NPU with {rules.share:g} of its memory free"
    params: dict[str, Any] = {"workers": count, "fraction": rules.share}
    if free[r, s] >= 0:
        npu = f"{fleet.row(int(rows[r])).name}:{int(fleet.gpu_index[rows[r], s])}"
        text += f"; {npu} has the most free, {of_needed(int(free[r, s]), int(offer.claim[r, s]))}"
        params |= {"npu": npu, "free_bytes": int(free[r, s]), "need_bytes": int(offer.claim[r, s])}
    return _fit("fraction", text, **params)


def _largest(selector: SingleWorkerNpuSelector, rows: Ints, offer: Npus, good: Bools) -> list[Reason]:
    """The worker whose NPUs book most together; on even terms the one with fewer of them."""
    fleet, rules = selector.fleet, selector.rules
    total = np.where(good, offer.sums[:, -1], -1)
    r = int(np.argmax(total))
    name = fleet.row(int(rows[r])).name
    have, there = int(offer.have[r]), int(np.count_nonzero(offer.mine[r]))
    text = (
        f"one worker: {name} offers the most with {have} of its {there} NPUs: "
        f"{of_needed(int(total[r]), rules.vram)}"
    )
    params: dict[str, Any] = {
        "worker": name, "offer_bytes": int(total[r]), "offer_gib": gib_number(int(total[r])),
        "npus_ok": have, "npus": there, "need_bytes": rules.vram,
    }  # fmt: skip
    most = int(offer.have.max())
    if rules.gpu_count and most < rules.gpu_count:
        text += f"; the model needs {plural(rules.gpu_count, 'NPU')}, and no worker has more than {most} free"
        params |= {"asked": rules.gpu_count, "most": most}
    elif not rules.gpu_count and total[r] >= rules.vram:
        fewest = int(np.searchsorted(offer.sums[r, :have], rules.vram)) + 1
        complaint = rules.divisors.complaint(fewest)
        if complaint is not None:
            text += f"; {fewest} NPUs would hold it, but {complaint}, and no other number works"
            params |= {"indivisible": complaint.as_params()}
    if not rules.distributed:
        text += "; distributed inference across workers is off for this model"
    return [_fit("one_worker", text, **params)]


def many_workers(selector: MultiWorkerNpuSelector, rows: Ints) -> list[Reason]:
    """The combination that offers most, and how many other workers could not take part in it."""
    fleet, rules = selector.fleet, selector.rules
    selector.refresh()
    best: tuple[int, int, int] | None = None
    for n, each in reversed(list(enumerate(selector.levels))):
        booked = selector.booked[n]
        members = int(np.count_nonzero(booked > 0))
        offer = int(booked[booked > 0].sum())
        if members >= 2 and (best is None or offer > best[0]):
            best = (offer, n, each)
    aside = "you can still select GPUs by hand"
    there = np.count_nonzero(fleet.gpu_id[rows] != 0, axis=1)
    if best is None:
        text = "several workers: no two have the same number of NPUs to offer"
        params: dict[str, Any] = {}
        if rules.gpu_count and rules.per_worker:
            text += f" ({rules.per_worker} each, {rules.gpu_count} in all)"
            params = {"each": rules.per_worker, "asked": rules.gpu_count}
        return [_fit("no_combination", f"{text}{_others(selector, rows, params)}; {aside}", **params)]
    offer, n, each = best
    givers = np.flatnonzero(selector.booked[n] > 0)
    names = [fleet.row(w).name for w in givers[:SHOWN].tolist()]
    text = (
        f"several workers: {some(names, SHOWN, len(givers))} ({plural(each, 'NPU')} each) "
        f"together offer {of_needed(offer, rules.vram)}"
    )
    params = {
        "names": names, "workers": len(givers), "each": each, "offer_bytes": offer,
        "offer_gib": gib_number(offer), "need_bytes": rules.vram,
    }  # fmt: skip
    failing = int(np.count_nonzero(there >= each)) - len(givers)
    if failing > 0:
        text += f"; {plural(failing, 'more worker')} with as many NPUs cannot offer them"
        params["failing"] = failing
    if rules.gpu_count and rules.gpu_count > each * len(givers):
        text += f"; the model needs {plural(rules.gpu_count, 'NPU')}, and these are {each * len(givers)}"
        params["asked"] = rules.gpu_count
    elif not rules.gpu_count and offer >= rules.vram:
        complaint = rules.divisors.complaint(each * len(givers))
        text += f"; {complaint or 'the model cannot be split evenly over any number of them'}"
    return [_fit("many_workers", f"{text}{_others(selector, rows, params)}; {aside}", **params)]


def _others(selector: MultiWorkerNpuSelector, rows: Ints, params: dict[str, Any]) -> str:
    """Workers that are kept from a placement over several workers by something else than memory."""
    fleet = selector.fleet
    found, offer = selector.offer(rows)
    taken = int(np.count_nonzero(offer.mine.any(axis=1) & ~mask(fleet, rows, selector.rules.engine)))
    own = offer.mine & found.usable
    unlinked = int(np.count_nonzero(own.any(axis=1) & ~linked(fleet, rows, own).any(axis=1)))
    text = ""
    if taken:
        text += f"; {workers(taken)} already {'runs' if taken == 1 else 'run'} another distributed instance"
        params["taken"] = taken
    if unlinked:
        text += f"; {workers(unlinked)} {have(unlinked)} no NPU with a working network link"
        params["unlinked"] = unlinked
    return text


def _fit(code: str, text: str, **params: Any) -> Reason:
    return Reason(f"fit.{code}", "fit", text, params)
