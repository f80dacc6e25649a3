"""Hand-picked GPUs: the only ones looked at, on one worker or on several.

A candidate is over-committed where it books less than the model needs, or books on a card more than is
free there. That is only ever done when the model asks for it, has one replica, and nothing else fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import UNKNOWN
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import GpuId
from gpustackd.placement.context.gpu_allocation import GpuAllocation
from gpustackd.placement.rules.resource_rules import ClaimPolicy, ResourceRules
from gpustackd.placement.scoring.tie_break import block


@dataclass(frozen=True, slots=True)
class PickedGpu:
    """One selected GPU that may be used, with what would be booked on it. Sizes in bytes."""

    w: int
    slot: int
    index: int
    type: str
    free: int
    total: int
    capacity: int
    claim: int
    satisfied: bool

    @property
    def rate(self) -> float:
        return self.free / self.total if self.total else 0.0


@dataclass(slots=True)
class Selection:
    """The selected GPUs, sorted into those that may be used and those that may not, with the cause."""

    cards: list[PickedGpu] = field(default_factory=list)
    absent: list[GpuId] = field(default_factory=list)
    """No such worker, or no such GPU on it."""
    dropped: dict[int, list[GpuId]] = field(default_factory=dict)
    """By position: the worker is there, but a filter drops it."""
    shut: list[GpuId] = field(default_factory=list)
    """Closed, over-committed, or of unknown memory."""
    foreign: list[GpuId] = field(default_factory=list)
    """The engine does not run on them, though it does on another card of their worker."""


@dataclass(frozen=True, slots=True)
class PickedGpus:
    """One way to use the selection."""

    allocations: tuple[GpuAllocation, ...]
    used: tuple[PickedGpu, ...]
    over: bool
    effective: int
    """Bytes of VRAM that the selection can really book."""


def resolve(fleet: Fleet, ids: Sequence[GpuId], rules: ResourceRules, bits: NDArray[np.uint16]) -> Selection:
    """Look up the selected GPUs; `bits` per position say which workers the filters drop."""
    found = Selection()
    count = max(rules.gpu_count, 1)
    for gpu in ids:
        w = fleet.by_name.get(gpu.worker)
        slot = None if w is None else _slot(fleet, w, gpu)
        if w is None or slot is None:
            found.absent.append(gpu)
        elif bits[w]:
            found.dropped.setdefault(w, []).append(gpu)
        elif not _usable(fleet, w, slot):
            found.shut.append(gpu)
        elif not _runs(fleet, rules, w, slot):
            found.foreign.append(gpu)
        else:
            free = int(fleet.free_vram(np.array([w]))[0, slot])
            total = int(fleet.vram_total[w, slot])
            u = rules.memory_fraction(gpu.type)
            claim = _claim(rules, total, gpu.type, count)
            found.cards.append(
                PickedGpu(w, slot, gpu.index, gpu.type, free, total, int(fleet.vram_capacity[w, slot]), claim,
                     _satisfied(rules, free, total, u, claim))
            )  # fmt: skip
    return found


def _slot(fleet: Fleet, w: int, gpu: GpuId) -> int | None:
    here = np.flatnonzero((fleet.gpu_id[w] != 0) & (fleet.gpu_index[w] == gpu.index))
    return next((s for s in here.tolist() if fleet.types[int(fleet.gpu_type[w, s])] == gpu.type), None)


def _usable(fleet: Fleet, w: int, s: int) -> bool:
    return bool(
        fleet.gpu_open[w, s]
        and not fleet.gpu_over[w, s]
        and fleet.vram_capacity[w, s] != UNKNOWN
        and fleet.vram_total[w, s] > 0
    )


def _runs(fleet: Fleet, rules: ResourceRules, w: int, s: int) -> bool:
    eligible = rules.devices(fleet, np.array([w])) if rules.devices is not None else None
    return eligible is None or bool(eligible[0, s])


def _claim(rules: ResourceRules, total: int, gpu_type: str, count: int) -> int:
    return rules.claim(total, gpu_type, count)


def _satisfied(rules: ResourceRules, free: int, total: int, u: float, claim: int) -> bool:
    if rules.claim_policy is ClaimPolicy.SHARE:
        enough = total > 0 and free / total >= u
        return enough and claim <= free
    return claim <= free


def candidates(
    cards: Sequence[PickedGpu], rules: ResourceRules, fleet: Fleet, busy: Sequence[int], tie_break: int
) -> list[PickedGpus]:
    """Every way to use these cards, in the order in which they are preferred. `busy` are positions of workers
    that may not take part in a placement over several workers."""
    found: list[PickedGpus] = []
    count = max(rules.gpu_count, 1)
    kinds = list(dict.fromkeys(c.type for c in cards))
    by_type = {kind: _by_worker([c for c in cards if c.type == kind]) for kind in kinds}
    for workers in by_type.values():
        for mine in workers:
            if count == 1:
                found.extend(_candidate([[c]], rules, cards) for c in mine)
            elif len(mine) >= count:
                found.append(_candidate([_pick(mine, count, rules, tie_break)], rules, cards))
    if count > 1 and not found and rules.spans:
        for workers in by_type.values():
            parts = _over_workers(workers, count, rules, busy)
            if parts:
                found.append(_candidate(parts, rules, cards))
    return [c for c in found if _ram_holds(c, rules, fleet)]


def _by_worker(cards: Sequence[PickedGpu]) -> list[list[PickedGpu]]:
    """Cards of one type by worker, the worker with most of them first, best free share first."""
    workers: dict[int, list[PickedGpu]] = {}
    for c in cards:
        workers.setdefault(c.w, []).append(c)
    for mine in workers.values():
        mine.sort(key=lambda c: c.index)
        mine.sort(key=lambda c: -c.rate)
    return sorted(workers.values(), key=lambda mine: -len(mine))


def _pick(mine: Sequence[PickedGpu], count: int, rules: ResourceRules, tie_break: int) -> list[PickedGpu]:
    good = [c for c in mine if c.satisfied]
    if len(good) < count:
        return [*good, *(c for c in mine if not c.satisfied)][:count]
    last = good[count - 1]
    same = [n for n, c in enumerate(good) if (c.free, c.claim) == (last.free, last.claim)]
    first = [n for n in range(count) if n not in same]
    chosen = first + block(same, count - len(first), tie_break)
    return sorted((good[n] for n in chosen), key=lambda c: c.index)


def _over_workers(
    workers: Sequence[Sequence[PickedGpu]], count: int, rules: ResourceRules, busy: Sequence[int]
) -> list[list[PickedGpu]]:
    """Main worker with all its cards, then others until there are enough; empty where there are not."""
    if len(workers) < 2:
        return []
    workers = [mine for mine in workers if mine[0].w not in busy]
    if len(workers) < 2:
        return []
    parts = [sorted(workers[0], key=lambda c: c.index)]
    taken = len(parts[0])
    for mine in workers[1:]:
        if taken >= count:
            break
        if mine[0].w in busy:
            continue
        mine = [c for c in mine if c.satisfied] + [c for c in mine if not c.satisfied]
        part = list(mine[: count - taken])
        parts.append(sorted(part, key=lambda c: c.index))
        taken += len(part)
    if len(parts) < 2 or taken != count:
        return []
    return parts


def _candidate(
    parts: Sequence[Sequence[PickedGpu]], rules: ResourceRules, selected: Sequence[PickedGpu]
) -> PickedGpus:
    used = tuple(c for p in parts for c in p)
    distributed = len(parts) > 1
    allocations = tuple(
        GpuAllocation(
            p[0].w,
            tuple(c.slot for c in p),
            tuple(c.claim for c in p),
            sum(c.w == p[0].w for c in selected) if distributed and n else None,
        )
        for n, p in enumerate(parts)
    )
    booked = sum(c.claim for c in used)
    ram = sum(rules.ram_claim(sum(s.claims)) for s in allocations)
    over = booked < rules.vram or (rules.ram > 0 and ram < rules.ram) or not all(c.satisfied for c in used)
    return PickedGpus(allocations, used, over, effective(used, selected, rules))


def effective(used: Sequence[PickedGpu], selected: Sequence[PickedGpu], rules: ResourceRules) -> int:
    """VRAM that the cards really offer: their free memory, or u of it; only cards with room count."""
    counted = selected if len(used) == len(selected) else used
    counted = [c for c in counted if c.satisfied]
    total = 0.0
    for c in counted:
        total += c.free * (rules.memory_fraction(c.type) if rules.claim_policy is ClaimPolicy.SHARE else 1)
    return int(total)


def _ram_holds(candidate: PickedGpus, rules: ResourceRules, fleet: Fleet) -> bool:
    for allocation in candidate.allocations:
        booked = sum(allocation.claims)
        claim = rules.ram_claim(booked)
        free = int(fleet.free_ram(np.array([allocation.position]))[0])
        asked = max(claim, rules.ram)
        if asked and asked > free:
            return False
        if fleet.unified[allocation.position] and not candidate.over and booked + claim > free:
            return False
    return True
