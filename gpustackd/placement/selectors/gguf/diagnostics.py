"""What is missing for a GGUF model: for each selector the nearest place, what binds there, and by how
much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES
from gpustackd.placement.context.cards import Cards
from gpustackd.placement.diagnostics.wording import cpu_ram, gib, gib_number, have, some, workers
from gpustackd.placement.selectors.base.selector import Selector
from gpustackd.placement.selectors.gguf.manual import GgufManualSelector
from gpustackd.placement.selectors.gguf.multi_gpu import GgufMultiGpuSelector
from gpustackd.placement.selectors.gguf.partial_offload import PartialOffloadSelector
from gpustackd.placement.selectors.gguf.rpc import RpcSelector
from gpustackd.placement.selectors.gguf.single_gpu import GgufCpuSelector, GgufSingleGpuSelector

SHOWN = 3


def diagnose(selector: Selector, rows: Ints) -> tuple[list[Reason], Cure]:
    """What these positions, which passed all filters, lack for one selector, and what could cure it."""
    if isinstance(selector, GgufManualSelector):
        return selector.diagnose()
    for kind, reasons in REASONS.items():
        if isinstance(selector, kind):
            return (reasons(selector, rows) if len(rows) else []), Cure.CAPACITY
    raise TypeError(f"{selector.kind} is no selector for GGUF models")


def one_gpu(selector: GgufSingleGpuSelector, rows: Ints) -> list[Reason]:
    """The largest free GPU against the whole model."""
    fleet = selector.fleet
    cards = selector.context.cards(rows)
    reasons: list[Reason] = []
    present = np.any(fleet.gpu_id[rows] != 0, axis=1)
    if not present.all():
        count = int(np.count_nonzero(~present))
        reasons.append(_fit("no_gpu", f"{workers(count)} {have(count)} no GPU", workers=count))
    shut = present & ~cards.usable.any(axis=1)
    if shut.any():
        count = int(np.count_nonzero(shut))
        text = f"{workers(count)} {have(count)} no usable GPU (closed, unknown memory, or over-committed)"
        reasons.append(_fit("no_usable_gpu", text, workers=count))
    if not cards.usable.any():
        return reasons
    fits, claim, ram = selector.fitting(cards)
    free = np.where(cards.usable, cards.free, -1)
    r, s = np.unravel_index(int(np.argmax(free)), free.shape)
    name, need = _gpu(selector, rows, int(r), int(s)), int(claim[r, s])
    text = f"one GPU: all {selector.asked.total} layers need {gib(need)} and {gib(int(ram[r]))} of RAM; "
    text += f"{name} has the most free, {gib(int(free[r, s]))} and {gib(int(cards.ram[r]))} of RAM"
    params: dict[str, Any] = {
        "gpu": name, "need_bytes": need, "free_bytes": int(free[r, s]), "need_ram_bytes": int(ram[r]),
        "free_ram_bytes": int(cards.ram[r]), "total_layers": selector.asked.total,
    }  # fmt: skip
    large = np.any(cards.usable & (claim <= cards.free), axis=1)
    if large.any() and not fits.any():
        params["ram_short"] = int(np.count_nonzero(large))
        text += f"; {workers(params['ram_short'])} {have(params['ram_short'])} the GPU memory but not the RAM"
    return [*reasons, _fit("one_gpu", text, **params)]


def one_worker(selector: GgufMultiGpuSelector, rows: Ints) -> list[Reason]:
    """The worker whose GPUs offer most together."""
    cards = selector.context.cards(rows)
    several = np.count_nonzero(cards.usable & (cards.free > 0), axis=1) > 1
    sums = np.where(several, cards.free.sum(axis=1), -1)
    best: tuple[int, int, list[int]] | None = None
    for r in np.argsort(-sums, kind="stable").tolist():
        if sums[r] <= (best[0] if best else 0):
            break
        for slots in selector.groups(cards, r):
            offer = int(cards.free[r, slots].sum())
            if len(slots) > 1 and (best is None or offer > best[0]):
                best = (offer, r, slots)
    if best is None:
        text = "several GPUs on one worker: none has two GPUs of one type with free memory"
        return [_fit("no_pair", text), *_not_tried(selector)]
    offer, r, slots = best
    need = _need(selector, len(slots))
    name, ram = selector.fleet.row(int(rows[r])).name, int(cards.ram[r])
    text = f"several GPUs on one worker: {name} has the most free, {gib(offer)} on {len(slots)} GPUs "
    text += f"({gib(need)} needed), and {gib(ram)} of RAM"
    params: dict[str, Any] = {
        "worker": name, "need_bytes": need, "free_bytes": offer, "gpus": len(slots), "free_ram_bytes": ram,
    }  # fmt: skip
    if offer >= need:
        choosing = selector.fewest(cards, r, slots)
        if choosing is None:
            text += "; no split into whole layers fits"
            params["indivisible"] = True
        else:
            level = choosing.plan.level
            ram_need = level.ram_unified if cards.unified[r] else level.ram
            text += f"; {gib(ram_need)} of RAM needed"
            params["need_ram_bytes"] = ram_need
    return [_fit("one_worker", text, **params), *_not_tried(selector)]


def _not_tried(selector: GgufMultiGpuSelector) -> list[Reason]:
    """Ways that are closed by the model's own settings, or by what it is."""
    shut: list[str] = []
    need = selector.context.demand.gguf
    if need is not None and not need.distributable:
        shut.append("over several workers: this model cannot be distributed")
    elif not selector.rules.distributed:
        shut.append("over several workers: distributed_inference_across_workers is off")
    if not selector.asked.cpu_offloading:
        shut.append("with layers in RAM: cpu_offloading is off")
    if not shut:
        return []
    return [_fit("not_tried", f"not tried: {'; '.join(shut)}", ways=shut)]


def _need(selector: GgufMultiGpuSelector, count: int) -> int:
    """VRAM that all layers take together on so many GPUs."""
    count = min(count, MOST_DEVICES, selector.asked.total)
    first, inner, last = selector.splitter.rests(count, selector.asked.total, unified=False)
    return selector.splitter.needed(selector.asked.total) + first + last + max(count - 2, 0) * inner


def many_workers(selector: RpcSelector, rows: Ints) -> list[Reason]:
    """What the largest GPUs of all workers offer together."""
    offered = selector.offers.offered(rows)
    least = selector.offers.least_room()
    if not len(offered.mains):
        text = f"several workers: no GPU has {gib(least)} free, which one layer needs"
        return [_fit("no_main", text, need_bytes=least)]
    if not any(c.position != rows[offered.mains[0]] for c in offered.remotes):
        text = "several workers: no other worker has a GPU to serve "
        text += f"(one layer needs {gib(least)}, and {gib(selector.offers.remote_ram)} of RAM)"
        return [_fit("no_remote", text, need_bytes=least, need_ram_bytes=selector.offers.remote_ram)]
    level = selector.asked.total if selector.asked.layers is None else selector.asked.layers
    need = selector.splitter.needed(level)
    shown = offered.mains[:SHOWN]
    names = [selector.context.fleet.row(int(w)).name for w in rows[shown]]
    text = f"several workers: {level} layers need {gib(need)} plus buffers; the largest {MOST_DEVICES} GPUs "
    text += f"({some(names, SHOWN, len(offered.mains))}) offer {gib(offered.bound)}"
    params: dict[str, Any] = {
        "need_bytes": need, "offer_bytes": offered.bound, "most_gpus": MOST_DEVICES,
        "workers": len(offered.mains),
    }  # fmt: skip
    if offered.bound >= need:
        ram = int(offered.cards.ram[offered.mains].max())
        text += f"; no split into whole layers fits, or not enough RAM (at most {gib(ram)} on a main worker)"
        params["free_ram_bytes"] = ram
    return [_fit("many_workers", text, **params)]


def partial(selector: PartialOffloadSelector, rows: Ints) -> list[Reason]:
    """The most layers that GPUs of one worker would hold, and the RAM that is short for the rest."""
    cards = selector.context.cards(rows)
    free = np.where(cards.usable, cards.free, 0)
    if not free.any():
        return []
    r = int(np.argmax(free.sum(axis=1)))
    level, vram, need_ram, where = _nearest(selector, cards, r, free[r])
    total, have, most = selector.asked.total, int(cards.ram[r]), int(cards.ram.max())
    text = f"some layers on GPUs: with {level} of {total} on {where} ({gib(vram)}), the rest need "
    text += f"{gib(need_ram)} of RAM{' including GPU memory' if cards.unified[r] else ''}; {gib(have)} free "
    text += f"there, at most {gib(most)} on any worker with a GPU"
    if selector.asked.layers is not None:
        text += "; fewer layers on GPUs need less GPU memory"
    return [
        _fit("partial", text, layers=level, total_layers=total, need_bytes=vram, need_ram_bytes=need_ram,
             free_bytes=int(free[r].sum()), free_ram_bytes=have, worker=selector.fleet.row(int(rows[r])).name)
    ]  # fmt: skip


def _nearest(selector: PartialOffloadSelector, cards: Cards, r: int, free: Ints) -> tuple[int, int, int, str]:
    """Layers, VRAM and RAM of the most that a worker's GPUs hold, whatever its RAM, and on which they are."""
    unified = bool(cards.unified[r])
    slots = max(selector.groups(cards, r), key=lambda some: int(cards.free[r, some].sum()))
    name = selector.fleet.row(int(cards.positions[r])).name
    if len(slots) > 1:
        rooms, order = selector.rooms(cards, r, slots), selector.order(cards, r, slots)
        asked = selector.asked.layers
        choosing = (
            selector.splitter.deepest(rooms, order)
            if asked is None
            else selector.splitter.fewest(rooms, order, asked)
        )
        if choosing is not None:
            plan = choosing.plan
            ram, claimed = plan.level.ram_unified if unified else plan.level.ram, sum(plan.claims)
            where = f"{len(plan.counts)} GPUs of {name}"
            return plan.layers, claimed, ram + (claimed if unified else 0), where
    slot = int(np.argmax(free))
    alone = selector.splitter.deepest_alone(free[[slot]], cards.unified[[r]])
    level = int(alone[0]) if selector.asked.layers is None else selector.asked.layers
    sized = selector.splitter.alone(level)
    claim = (sized.devices[0].unified if unified else sized.devices[0].vram) if level else 0
    ram = sized.ram_unified + claim if unified else sized.ram
    return level, claim, ram, _gpu(selector, cards.positions, r, slot)


def cpu(selector: GgufCpuSelector, rows: Ints) -> list[Reason]:
    """The worker with the most RAM."""
    ram = selector.fleet.free_ram(rows)
    at = int(np.argmax(ram))
    need, name = int(selector.need(rows)[at]), selector.fleet.row(int(rows[at])).name
    text = cpu_ram(name, int(ram[at]), need)
    return [_fit("cpu", text, worker=name, need_bytes=need, free_bytes=int(ram[at]))]


def _gpu(selector: GgufSingleGpuSelector | PartialOffloadSelector, rows: Ints, r: int, s: int) -> str:
    fleet, w = selector.fleet, int(rows[r])
    return f"{fleet.row(w).name}:{fleet.types[int(fleet.gpu_type[w, s])]}:{int(fleet.gpu_index[w, s])}"


def _fit(code: str, text: str, **params: Any) -> Reason:
    for name in [n for n in params if n.endswith("_bytes")]:
        params[name.removesuffix("_bytes") + "_gib"] = gib_number(params[name])
    return Reason(f"fit.{code}", "fit", text, params)


REASONS: Mapping[type, Callable[[Any, Ints], list[Reason]]] = {
    GgufSingleGpuSelector: one_gpu,
    GgufMultiGpuSelector: one_worker,
    RpcSelector: many_workers,
    PartialOffloadSelector: partial,
    GgufCpuSelector: cpu,
}
