"""What is missing for a GGUF model: for each step the nearest place, what binds there, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES
from gpustackd.placement.context.cards import Cards
from gpustackd.placement.diagnostics.wording import gib, gib_number, have, some, workers
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


def one_gpu(step: GgufSingleGpuSelector, rows: Ints) -> list[Reason]:
    """The largest free GPU against the whole model."""
    fleet = step.fleet
    found = step.context.cards(rows)
    reasons: list[Reason] = []
    present = np.any(fleet.gpu_id[rows] != 0, axis=1)
    if not present.all():
        count = int(np.count_nonzero(~present))
        reasons.append(_fit("no_gpu", f"{workers(count)} {have(count)} no GPU", workers=count))
    shut = present & ~found.usable.any(axis=1)
    if shut.any():
        count = int(np.count_nonzero(shut))
        text = f"{workers(count)} {have(count)} no usable GPU (closed, of unknown memory, or over-committed)"
        reasons.append(_fit("no_usable_gpu", text, workers=count))
    if not found.usable.any():
        return reasons
    fits, claim, ram = step.fitting(found)
    free = np.where(found.usable, found.free, -1)
    r, s = np.unravel_index(int(np.argmax(free)), free.shape)
    name, need = _gpu(step, rows, int(r), int(s)), int(claim[r, s])
    text = f"one GPU: all {step.asked.total} layers need {gib(need)} and {gib(int(ram[r]))} of RAM; "
    text += (
        f"the largest free GPU is {name}: {gib(int(free[r, s]))} free, with {gib(int(found.ram[r]))} of RAM"
    )
    params: dict[str, Any] = {
        "gpu": name, "need_bytes": need, "free_bytes": int(free[r, s]), "need_ram_bytes": int(ram[r]),
        "free_ram_bytes": int(found.ram[r]), "total_layers": step.asked.total,
    }  # fmt: skip
    large = np.any(found.usable & (claim <= found.free), axis=1)
    if large.any() and not fits.any():
        params["ram_short"] = int(np.count_nonzero(large))
        text += f"; {workers(params['ram_short'])} {have(params['ram_short'])} the GPU but not the RAM"
    return [*reasons, _fit("one_gpu", text, **params)]


def one_worker(step: GgufMultiGpuSelector, rows: Ints) -> list[Reason]:
    """The worker whose GPUs offer most together."""
    found = step.context.cards(rows)
    several = np.count_nonzero(found.usable & (found.free > 0), axis=1) > 1
    sums = np.where(several, found.free.sum(axis=1), -1)
    best: tuple[int, int, list[int]] | None = None
    for r in np.argsort(-sums, kind="stable").tolist():
        if sums[r] <= (best[0] if best else 0):
            break
        for slots in step.groups(found, r):
            offer = int(found.free[r, slots].sum())
            if len(slots) > 1 and (best is None or offer > best[0]):
                best = (offer, r, slots)
    if best is None:
        text = "several GPUs: no worker has two GPUs of one type with memory free"
        return [_fit("no_pair", text), *_not_tried(step)]
    offer, r, slots = best
    need = _need(step, len(slots))
    name, ram = step.fleet.row(int(rows[r])).name, int(found.ram[r])
    text = f"several GPUs of one worker: {gib(need)} are needed on {len(slots)}; the most is free on {name}: "
    text += f"{gib(offer)} on {len(slots)} GPUs, with {gib(ram)} of RAM"
    params: dict[str, Any] = {
        "worker": name, "need_bytes": need, "free_bytes": offer, "gpus": len(slots), "free_ram_bytes": ram,
    }  # fmt: skip
    if offer >= need:
        choosing = step.fewest(found, r, slots)
        if choosing is None:
            text += "; layers are whole, and no division of them fits"
            params["indivisible"] = True
        else:
            level = choosing.plan.level
            ram_need = level.ram_unified if found.unified[r] else level.ram
            text += f"; {gib(ram_need)} of RAM are needed"
            params["need_ram_bytes"] = ram_need
    return [_fit("one_worker", text, **params), *_not_tried(step)]


def _not_tried(step: GgufMultiGpuSelector) -> list[Reason]:
    """Ways that are closed by the model's own settings, or by what it is."""
    shut: list[str] = []
    need = step.context.demand.gguf
    if need is not None and not need.distributable:
        shut.append("over several workers: this model cannot be distributed")
    elif not step.rules.distributed:
        shut.append("over several workers: distributed_inference_across_workers is off")
    if not step.asked.cpu_offloading:
        shut.append("with layers in RAM: cpu_offloading is off")
    if not shut:
        return []
    return [_fit("not_tried", f"not tried: {'; '.join(shut)}", ways=shut)]


def _need(step: GgufMultiGpuSelector, count: int) -> int:
    """VRAM that all layers take together on so many GPUs."""
    count = min(count, MOST_DEVICES, step.asked.total)
    first, inner, last = step.planner.rests(count, step.asked.total, unified=False)
    return step.planner.needed(step.asked.total) + first + last + max(count - 2, 0) * inner


def many_workers(step: RpcSelector, rows: Ints) -> list[Reason]:
    """What the largest GPUs of all workers offer together."""
    there = step.offers.offered(rows)
    least = step.offers.least_room()
    if not len(there.mains):
        text = f"several workers: no GPU has the {gib(least)} free that one layer needs"
        return [_fit("no_main", text, need_bytes=least)]
    if not any(c.w != rows[there.mains[0]] for c in there.remotes):
        text = "several workers: there is no other worker with a GPU that could serve "
        text += f"({gib(least)} for one layer, and {gib(step.offers.remote_ram)} of RAM)"
        return [_fit("no_remote", text, need_bytes=least, need_ram_bytes=step.offers.remote_ram)]
    level = step.asked.total if step.asked.layers is None else step.asked.layers
    need = step.planner.needed(level)
    shown = there.mains[:SHOWN]
    names = [step.context.fleet.row(int(w)).name for w in rows[shown]]
    text = f"several workers: {level} layers need {gib(need)} and buffers; the largest {MOST_DEVICES} GPUs "
    text += f"that an instance can use offer {gib(there.bound)} ({some(names, SHOWN, len(there.mains))})"
    params: dict[str, Any] = {
        "need_bytes": need, "offer_bytes": there.bound, "most_gpus": MOST_DEVICES,
        "workers": len(there.mains),
    }  # fmt: skip
    if there.bound >= need:
        ram = int(there.cards.ram[there.mains].max())
        text += f"; layers are whole and do not fit, or RAM is short (at most {gib(ram)} on a main worker)"
        params["free_ram_bytes"] = ram
    return [_fit("many_workers", text, **params)]


def partial(step: PartialOffloadSelector, rows: Ints) -> list[Reason]:
    """The most layers that GPUs of one worker would hold, and the RAM that is short for the rest."""
    found = step.context.cards(rows)
    free = np.where(found.usable, found.free, 0)
    if not free.any():
        return []
    r = int(np.argmax(free.sum(axis=1)))
    level, vram, need_ram, where = _nearest(step, found, r, free[r])
    total, have, most = step.asked.total, int(found.ram[r]), int(found.ram.max())
    text = f"some layers on GPUs: with {level} of {total} on {where} ({gib(vram)}) the others need "
    text += (
        f"{gib(need_ram)} of RAM{', GPU memory included' if found.unified[r] else ''}; {gib(have)} are free "
    )
    text += f"there, at most {gib(most)} on any worker with a GPU"
    if step.asked.layers is not None:
        text += "; fewer layers on GPUs need less there"
    return [
        _fit("partial", text, layers=level, total_layers=total, need_bytes=vram, need_ram_bytes=need_ram,
             free_bytes=int(free[r].sum()), free_ram_bytes=have, worker=step.fleet.row(int(rows[r])).name)
    ]  # fmt: skip


def _nearest(step: PartialOffloadSelector, found: Cards, r: int, free: Ints) -> tuple[int, int, int, str]:
    """Layers, VRAM and RAM of the most that a worker's GPUs hold, whatever its RAM, and on which they are."""
    unified = bool(found.unified[r])
    slots = max(step.groups(found, r), key=lambda some: int(found.free[r, some].sum()))
    name = step.fleet.row(int(found.w[r])).name
    if len(slots) > 1:
        rooms, order = step.rooms(found, r, slots), step.order(found, r, slots)
        asked = step.asked.layers
        choosing = (
            step.planner.deepest(rooms, order) if asked is None else step.planner.fewest(rooms, order, asked)
        )
        if choosing is not None:
            plan = choosing.plan
            ram, claimed = plan.level.ram_unified if unified else plan.level.ram, sum(plan.claims)
            where = f"{len(plan.counts)} GPUs of {name}"
            return plan.layers, claimed, ram + (claimed if unified else 0), where
    slot = int(np.argmax(free))
    alone = step.planner.deepest_alone(free[[slot]], found.unified[[r]])
    level = int(alone[0]) if step.asked.layers is None else step.asked.layers
    sized = step.planner.alone(level)
    claim = (sized.devices[0].unified if unified else sized.devices[0].vram) if level else 0
    ram = sized.ram_unified + claim if unified else sized.ram
    return level, claim, ram, _gpu(step, found.w, r, slot)


def cpu(step: GgufCpuSelector, rows: Ints) -> list[Reason]:
    """The worker with the most RAM."""
    ram = step.fleet.free_ram(rows)
    at = int(np.argmax(ram))
    need, name = int(step.need(rows)[at]), step.fleet.row(int(rows[at])).name
    text = f"without a GPU {gib(need)} of RAM are needed; the most is free on {name}: {gib(int(ram[at]))}"
    return [_fit("cpu", text, worker=name, need_bytes=need, free_bytes=int(ram[at]))]


def _gpu(step: GgufSingleGpuSelector | PartialOffloadSelector, rows: Ints, r: int, s: int) -> str:
    fleet, w = step.fleet, int(rows[r])
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
