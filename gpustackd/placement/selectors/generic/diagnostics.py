"""What is missing on the workers that passed every filter: causes with counts, and the best that is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import UNKNOWN, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Reason
from gpustackd.engines.parallelism import Indivisible
from gpustackd.placement.context.cards import Cards, portions, ram_holds, read_cards
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.diagnostics.wording import (
    cpu_ram,
    gib,
    have,
    not_enough_ram,
    of_needed,
    plural,
    some,
    workers,
)
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.selectors.base import blocked_workers
from gpustackd.placement.selectors.base.needs import needs
from gpustackd.placement.selectors.base.selector import Selector
from gpustackd.placement.selectors.generic.multi_worker import MultiWorkerSelector

SHOWN = 3
BY_HAND = "; you can still select GPUs by hand"


def shortfall(context: PlacementContext, selectors: Sequence[Selector], rows: Ints) -> list[Reason]:
    """Causes on the workers that passed every filter, each with the number of workers it holds for."""
    fleet, rules = context.fleet, context.rules
    cards = read_cards(fleet, rows, rules)
    present = fleet.gpu_id[rows] != 0
    has_gpu = present.any(axis=1)
    usable = cards.usable.any(axis=1)
    short_of_ram = usable & ~ram_holds(cards, rules, np.zeros(len(rows), np.int64), cards.ram, cards.unified)
    blocked, with_it = blocked_workers.blocked_by_ram(context, {s.kind for s in selectors}, rows, cards)
    blocked &= ~short_of_ram
    short = usable & ~short_of_ram & ~blocked
    if rules.cpu_only:
        return [_cpu(context, rows)]
    reasons = [needs(context.demand, rules)]
    if not has_gpu.all():
        count = int(np.count_nonzero(~has_gpu))
        reasons.append(_fit("no_gpu", f"{workers(count)} {have(count)} no GPU", workers=count))
    if (has_gpu & ~usable).any():
        reasons.append(_closed(fleet, rows[has_gpu & ~usable]))
    if short_of_ram.any():
        reasons.append(_ram(fleet, rules, rows, cards, short_of_ram))
    if with_it is not None and blocked.any():
        reasons.append(with_it)
    reasons.extend(_too_small_cards(context))
    if short.any():
        at = np.flatnonzero(short)
        reasons.extend(_vram(context, selectors, _subset(cards, at), rows[at]))
    if rules.cpu:
        reasons.append(_cpu(context, rows))
    return reasons


def _too_small_cards(context: PlacementContext) -> list[Reason]:
    """GPU types on which the engine's own reserve leaves nothing for the model."""
    reasons: list[Reason] = []
    for kind, f in context.fractions.items():
        if f.value <= 0:
            text = (
                f"nothing is left for the model on {kind} GPUs: the engine reserves "
                f"{f.reserved / 1024:.2f} GiB, and the smallest has {f.card / 1024:.2f} GiB"
            )
            reasons.append(_fit("no_fraction", text, type=kind, fraction=f.value, reserved_mib=f.reserved,
                                card_mib=f.card))  # fmt: skip
    return reasons


def _cpu(context: PlacementContext, rows: Ints) -> Reason:
    """CPU inference is possible, and RAM is short for it."""
    need = context.rules.ram_floor
    ram = context.fleet.free_ram(rows)
    at = int(np.argmax(ram))
    name = context.fleet.row(int(rows[at])).name
    text = cpu_ram(name, int(ram[at]), need)
    return _fit("cpu", text, worker=name, free_bytes=int(ram[at]), need_bytes=need)


def _closed(fleet: Fleet, rows: Ints) -> Reason:
    there = fleet.gpu_id[rows] != 0
    over = int(np.count_nonzero(there & fleet.gpu_over[rows]))
    closed = int(np.count_nonzero(there & ~fleet.gpu_open[rows] & ~fleet.gpu_over[rows]))
    unknown = int(
        np.count_nonzero(there & ((fleet.vram_capacity[rows] == UNKNOWN) | (fleet.vram_total[rows] <= 0)))
    )
    causes = [
        f"{n} {word}"
        for n, word in ((closed, "closed"), (unknown, "with unknown memory"), (over, "over-committed"))
        if n
    ]
    count = len(rows)
    text = f"{workers(count)} {have(count)} no usable GPU ({', '.join(causes)})"
    return _fit("no_usable_gpu", text, workers=count, closed=closed, unknown=unknown, over_committed=over)


def _ram(fleet: Fleet, rules: ResourceRules, rows: Ints, cards: Cards, short: np.ndarray[Any, Any]) -> Reason:
    count = int(np.count_nonzero(short))
    need = max(rules.ram, rules.ram_static or 0)
    ram = np.where(short, cards.ram, -1)
    at = int(np.argmax(ram))
    name = fleet.row(int(rows[at])).name
    text = not_enough_ram(workers(count), name, int(ram[at]), need)
    return _fit("ram", text, workers=count, worker=name, free_bytes=int(ram[at]), need_bytes=need)


def _vram(context: PlacementContext, selectors: Sequence[Selector], cards: Cards, rows: Ints) -> list[Reason]:
    """Too little GPU memory: the best single card, the best worker, in real free bytes."""
    fleet, rules = context.fleet, context.rules
    count = len(rows)
    head = f"not enough free GPU memory on {workers(count)}"
    if rules.gpu_count > most_of_a_type(cards):
        head = f"{workers(count)} {have(count)} fewer than {rules.gpu_count} usable GPUs of one type"
    reasons: list[Reason] = []
    kinds = {t.kind for t in selectors}
    if "one_gpu" in kinds:
        r, s = np.unravel_index(int(np.argmax(cards.free)), cards.free.shape)
        index = int(fleet.gpu_index[rows[r], s])
        name = f"{fleet.row(int(rows[r])).name}:{fleet.types[int(cards.type[r, s])]}:{index}"
        free, total = int(cards.free[r, s]), int(cards.total[r, s])
        percent = int(100 * free / total) if total > 1 else 0
        text = f"{head}; the GPU with the most free is {name}: {gib(free)} of {gib(total)} ({percent} %)"
        text += f", {gib(rules.vram)} needed"
        if rules.claim_policy is ClaimPolicy.EACH:
            text += " on each GPU used"
        reasons.append(
            _fit("one_gpu", text, workers=count, gpu=name, free_bytes=free, total_bytes=total,
                 free_percent=percent, need_bytes=rules.vram)
        )  # fmt: skip
        head = "several GPUs on one worker"
    if "one_worker" in kinds:
        reasons.extend(_one_worker(context, cards, rows, head))
        head = "several workers"
    for selector in selectors:
        if isinstance(selector, MultiWorkerSelector):
            reasons.extend(_over_workers(context, selector, rows, head))
    return reasons


def most_of_a_type(cards: Cards) -> int:
    """Most usable cards of one type that any of the workers has."""
    kinds = np.unique(cards.type[cards.usable]).tolist()
    return max((int(((cards.type == k) & cards.usable).sum(axis=1).max()) for k in kinds), default=0)


def _one_worker(context: PlacementContext, cards: Cards, rows: Ints, head: str) -> list[Reason]:
    fleet, rules = context.fleet, context.rules
    enough, least = portions(cards, rules)
    best: tuple[int, int, int, int, int] | None = None
    for code in np.unique(cards.type[cards.usable]).tolist():
        mine = cards.usable & (cards.type == code)
        size = np.count_nonzero(mine, axis=1)
        sums = np.where(mine, cards.free, 0).sum(axis=1)
        sums[size < 2] = -1
        at = int(np.argmax(sums))
        if sums[at] >= 0 and (best is None or sums[at] > best[0]):
            good = mine[at] & enough[at]
            booked = cards.free if rules.claim_policy is ClaimPolicy.SPLIT else least
            best = (
                int(sums[at]),
                at,
                int(size[at]),
                int(np.count_nonzero(good)),
                int(booked[at][good].sum()),
            )
    if best is None:
        text = f"{head}: no worker has two usable GPUs of one type"
        return [_fit("no_pair", text, workers=len(rows))]
    free, at, size, good, effective = best
    name = fleet.row(int(rows[at])).name
    text = f"{head}: {name} has the most free, {gib(free)} on {size} GPUs"
    params = {"worker": name, "free_bytes": free, "gpus": size, "gpus_ok": good, "effective_bytes": effective}
    if rules.claim_policy is ClaimPolicy.SHARE and good:
        text += f"; {good} of its {size} GPUs {have(good)} {'its' if good == 1 else 'their'} full share free"
        text += f" ({of_needed(effective, rules.vram)})"
    elif rules.claim_policy is ClaimPolicy.SHARE:
        text += f"; none of them has its full share free, {gib(rules.vram)} needed"
    elif rules.claim_policy is ClaimPolicy.EACH:
        text += f"; {gib(rules.vram)} needed on each GPU used"
    else:
        text += f"; {gib(rules.vram)} needed"
    if rules.gpu_count > 1:
        text += f"; the model needs {rules.gpu_count} GPUs"
    reasons = [_fit("one_worker", text, need_bytes=rules.vram, **params)]
    complaint = None if rules.fixed_world else rules.divisors.complaint(good)
    if complaint is not None and good > 1:
        reasons.insert(0, _fit("not_divisible", str(complaint), **complaint.as_params()))
    return reasons


def _over_workers(
    context: PlacementContext, selector: MultiWorkerSelector, rows: Ints, head: str
) -> list[Reason]:
    """The combination that offers most, and what else kept it from serving."""
    fleet, rules = context.fleet, context.rules
    selector.refresh()
    barring, barred_params = blocked_workers.busy_elsewhere(context, rows)
    best: tuple[int, int, Ints] | None = None
    indivisible: Indivisible | None = None
    for code, kind in selector.group.items():
        members = np.flatnonzero(kind >= 0)
        sizes = np.array([selector.kinds[k].gpus for k in kind[members].tolist()], np.int64)
        for gpus in np.unique(sizes).tolist():
            complaint = None if rules.fixed_world else rules.divisors.complaint(gpus)
            mine = members[sizes == gpus]
            if complaint is not None:
                indivisible = indivisible or complaint
            elif len(mine) > 1:
                offer = sum(selector.kinds[k].booked for k in kind[mine].tolist())
                if rules.claim_policy is ClaimPolicy.SPLIT:
                    offer = int(selector.low[code][mine].sum()) * gpus
                if best is None or offer > best[0]:
                    best = (offer, gpus, mine)
    if best is None:
        text = f"{head}: no two workers have all their GPUs of one type free"
        if indivisible is not None:
            text += f", or {indivisible}"
        return [_fit("no_combination", f"{text}{barring}{BY_HAND}", **barred_params)]
    offer, gpus, mine = best
    names = [fleet.row(w).name for w in mine[:SHOWN].tolist()]
    each = f"{gpus} GPU{'s' if gpus > 1 else ''} each"
    text = f"{head}: {some(names, SHOWN, len(mine))} ({each}) together offer {of_needed(offer, rules.vram)}"
    params: dict[str, Any] = {
        "workers": len(mine),
        "names": names,
        "gpus_each": gpus,
        "effective_bytes": offer,
        "need_bytes": rules.vram,
    }
    count = np.count_nonzero(fleet.gpu_id[context.bits == 0] != 0, axis=1)
    failing = int(np.count_nonzero(count == gpus)) - len(mine)
    if failing > 0:
        text += f"; {plural(failing, 'more worker')} of the same size {have(failing)} too little free"
        params["failing"] = failing
    if rules.gpu_count and (rules.gpu_count % gpus or rules.gpu_count // gpus > len(mine)):
        text += f"; the model needs {rules.gpu_count} GPUs on whole workers"
        params["gpu_count"] = rules.gpu_count
    why = next((w for n in range(2, len(mine) + 1) if (w := selector.workable(gpus, n)) is not None), None)
    if why is not None:
        text += f"; the executor refuses: {why}"
        params["topology"] = why
    return [_fit("many_workers", f"{text}{barring}{BY_HAND}", **params, **barred_params)]


def _subset(cards: Cards, at: Ints) -> Cards:
    share = cards.share[at] if cards.share.ndim else cards.share
    return Cards(cards.positions[at], cards.free[at], cards.total[at], share, cards.type[at],
                 cards.usable[at], cards.ram[at], cards.unified[at], cards.ratio[at])  # fmt: skip


def _fit(code: str, text: str, **params: Any) -> Reason:
    return Reason(f"fit.{code}", "fit", text, params)
