"""The selector for hand-picked GPUs of a GGUF model: only these, and all of them (or as many as a replica
takes).

On one worker they hold all layers, or some where that is allowed; on several, one worker is the main one and
the other GPUs are served to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpustackd.domain.outcome import Cure, Reason
from gpustackd.engines.llama_cpp.devices import MOST_DEVICES, layers_per_device
from gpustackd.errors import BadRow
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation, Offload
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.diagnostics.wording import gib, gib_number, of_needed
from gpustackd.placement.rules.resource_rules import GgufRules
from gpustackd.placement.scoring.ranker import Ranker
from gpustackd.placement.selectors.base.picked_gpus import PickedGpu, Selection, resolve
from gpustackd.placement.selectors.base.selector import Uncached
from gpustackd.placement.selectors.base.unreachable_gpus import gpu_label, picked_reason, unreachable
from gpustackd.placement.selectors.gguf.layer_split import Choosing, LayerSplit, LayerSplitter, Room


class GgufManualSelector(Uncached):
    """Looks at the selected cards only; nothing is kept between decisions, they are few."""

    kind = "manual"

    def __init__(self, context: PlacementContext, ranker: Ranker, splitter: LayerSplitter) -> None:
        asked = context.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.context = context
        self.ranker = ranker
        self.asked: GgufRules = asked
        self.splitter = splitter
        self.spec = context.demand.spec
        self.cut = False
        """Whether the last search ended for its budget."""

    @property
    def count(self) -> int:
        """GPUs that one replica takes."""
        return self.context.rules.gpu_count

    def select(self, tie_break: int) -> Candidate | None:
        self.splitter.begin()
        found = self.choices()
        self.cut = self.splitter.exhausted
        return self.ranker.pick(found, tie_break) if found else None

    def choices(self) -> list[Candidate]:
        """Every use of the selection, the whole model before a part of it; over-committed where nothing else
        is left and that is allowed."""
        cards = self.selection().cards
        levels: list[int | None] = [self.asked.total] if self.asked.whole else []
        if self.asked.partial:
            levels.append(self.asked.layers)  # None: as many as fit
        for level in levels:
            found = self._on_one(cards, level) or self._over_workers(cards, level)
            if found:
                return [Candidate(allocations, self.kind) for allocations in found]
        return self._over_committed(cards)

    def selection(self) -> Selection:
        return resolve(self.context.fleet, self.spec.gpu_ids, self.context.rules, self.context.bits)

    # -- one worker ------------------------------------------------------------------------------------------

    def _on_one(self, cards: Sequence[PickedGpu], level: int | None) -> list[tuple[GpuAllocation, ...]]:
        found: list[tuple[GpuAllocation, ...]] = []
        for mine in by_worker(cards):
            if len(mine) < self.count:
                continue
            if self.count == 1:
                found += [(s,) for c in mine if (s := self._on_card(c, level))]
            else:
                allocation = self._on_cards(mine, level)
                found += [(allocation,)] if allocation else []
        if level is None and found:  # the most layers
            best = max(s[0].offload.layers for s in found if s[0].offload)
            found = [s for s in found if s[0].offload and s[0].offload.layers == best]
        return found

    def _on_card(self, card: PickedGpu, level: int | None) -> GpuAllocation | None:
        pooled, pool = self._host(card.w)
        if level is None:
            level = int(self.splitter.deepest_alone(np.array([card.free]), np.array([pooled]))[0])
        sized = self.splitter.alone(level)
        if not level:
            return None
        claim = sized.devices[0].unified if pooled else sized.devices[0].vram
        ram = sized.ram_unified if pooled else sized.ram
        if claim > card.free or ram + (claim if pooled else 0) > pool:
            return None
        return GpuAllocation(
            card.w, (card.slot,), (claim,), ram=ram, offload=Offload(level, self.asked.total)
        )

    def _on_cards(self, mine: Sequence[PickedGpu], level: int | None) -> GpuAllocation | None:
        pooled, pool = self._host(mine[0].w)
        rooms: list[Room] = [(c.free, pooled) for c in mine]
        order = sorted(range(len(mine)), key=lambda i: (-mine[i].free, i))
        if level is not None:
            choosing = self.splitter.exactly(rooms, order, level, self.count)
        else:
            some = sorted(order[: self.count])
            choosing = self._most([rooms[i] for i in some])
            mine = [mine[i] for i in some]
        if choosing is None:
            return None
        plan = choosing.plan
        ram = plan.level.ram_unified if pooled else plan.level.ram
        if ram + (sum(plan.claims) if pooled else 0) > pool:
            return None
        slots = tuple(mine[i].slot for i in choosing.taken)
        return GpuAllocation(mine[0].w, slots, plan.claims, ram=ram, offload=self._offload(plan))

    def _most(self, rooms: Sequence[Room]) -> Choosing | None:
        """The most layers, not all, that all of these hold together."""
        for level in range(min(self.asked.total - 1, self.splitter.at_most(sum(f for f, _ in rooms))), 0, -1):
            plan = self.splitter.divided(rooms, level)
            if plan is not None:
                return Choosing(tuple(range(len(rooms))), plan)
        return None

    def _host(self, w: int) -> tuple[bool, int]:
        return bool(self.context.fleet.unified[w]), int(self.context.fleet.free_ram(np.array([w]))[0])

    def _offload(self, plan: LayerSplit) -> Offload:
        return Offload(plan.layers, self.asked.total, plan.counts if len(plan.counts) > 1 else None)

    # -- several workers -------------------------------------------------------------------------------------

    def _over_workers(self, cards: Sequence[PickedGpu], level: int | None) -> list[tuple[GpuAllocation, ...]]:
        """Each worker as the main one, the one with the most free first: the first that serves; where only
        some layers lie on GPUs, the one with most of them."""
        groups = by_worker(cards)
        if self.count < 2 or len(groups) < 2 or not self.spans or len(cards) < self.count:
            return []
        found: list[tuple[GpuAllocation, ...]] = []
        for own in groups:
            others = sorted((c for c in cards if c.w != own[0].w), key=lambda c: -c.free)
            missing = self.count - len(own)
            if missing <= 0:
                own, missing = sorted(own, key=lambda c: -c.free)[: self.count - 1], 1
                own.sort(key=lambda c: c.index)
            allocations = self._laid(own, others[:missing], level)
            if allocations is not None:
                found.append(allocations)
                if level is not None:
                    break
        return [max(found, key=_layers)] if found else []

    @property
    def spans(self) -> bool:
        """Selected over workers, a model is spread whatever its flag says, if it can be at all."""
        need = self.context.demand.gguf
        return need is not None and need.distributable and not self.asked.image

    def _laid(
        self, own: Sequence[PickedGpu], remotes: Sequence[PickedGpu], level: int | None
    ) -> tuple[GpuAllocation, ...] | None:
        pooled, pool = self._host(own[0].w)
        devices = [*remotes, *own]
        rooms = [(c.free, bool(self.context.fleet.unified[c.w])) for c in devices]
        if level is not None:
            plan = self.splitter.divided(rooms, level)
        else:
            choosing = self._most(rooms)
            plan = choosing.plan if choosing else None
        if plan is None:
            return None
        ram = plan.level.ram_unified if pooled else plan.level.ram
        claims = plan.claims[len(remotes) :]
        if ram + (sum(claims) if pooled else 0) > pool or not self._remotes_hold(remotes, plan.claims):
            return None
        return self._allocations(own, remotes, plan, ram)

    def _allocations(
        self, own: Sequence[PickedGpu], remotes: Sequence[PickedGpu], plan: LayerSplit, ram: int
    ) -> tuple[GpuAllocation, ...]:
        slots, claims = tuple(c.slot for c in own), plan.claims[len(remotes) :]
        main = GpuAllocation(own[0].w, slots, claims, ram=ram, offload=self._offload(plan))
        floor = self.context.policy.rpc_ram
        return main, *(
            GpuAllocation(c.w, (c.slot,), (claim,), ram=floor, layers=share.layers)
            for c, claim, share in zip(remotes, plan.claims, plan.level.devices, strict=False)
        )

    def _remotes_hold(self, remotes: Sequence[PickedGpu], claims: Sequence[int]) -> bool:
        """Whether the workers of remote cards have the RAM for what serves them."""
        taken: dict[int, int] = {}
        for card, claim in zip(remotes, claims, strict=False):
            pooled = claim if self.context.fleet.unified[card.w] else 0
            taken[card.w] = taken.get(card.w, 0) + self.context.policy.rpc_ram + pooled
        return all(size <= self._host(w)[1] for w, size in taken.items())

    # -- more than there is ----------------------------------------------------------------------------------

    def _over_committed(self, cards: Sequence[PickedGpu]) -> list[Candidate]:
        """All layers by the sizes of the cards, whatever is on them."""
        selector = self.spec.gpu_selector
        may = selector is not None and selector.allow_overcommit and self.context.rules.replicas <= 1
        groups = [mine for mine in by_worker(cards) if len(mine) >= self.count]
        if not may or not groups or not self.asked.whole or self.count > MOST_DEVICES:
            return []
        mine = groups[0]
        some = sorted(sorted(mine, key=lambda c: -c.free)[: self.count], key=lambda c: c.index)
        counts = layers_per_device(self.asked.split or [float(c.capacity) for c in some], self.asked.total)
        if len(counts) != len(some):
            return []
        level = self.splitter.exact(self.asked.total, counts)
        pooled, _ = self._host(some[0].w)
        claims = tuple(s.unified if pooled else s.vram for s in level.devices)
        ram = level.ram_unified if pooled else level.ram
        plan = LayerSplit(level, counts, claims)
        allocations = self._allocations(some, (), plan, ram)
        need, free = sum(claims), sum(c.free for c in some)
        text = f"the selected GPUs are over-committed: {gib(need)} needed, {gib(free)} free"
        params = {
            "need_bytes": need,
            "free_bytes": free,
            "need_gib": gib_number(need),
            "free_gib": gib_number(free),
        }
        warning = Reason("gpu_selector.overcommit", "gpu_selector", text, params, "warning")
        return [Candidate(allocations, self.kind, over_commit=True, warnings=(warning,))]

    def diagnose(self) -> tuple[list[Reason], Cure]:
        """Why the selection does not serve, most telling first."""
        selection = self.selection()
        reasons = unreachable(self.context, selection)
        cards = selection.cards
        if cards:
            reasons += self._short(cards)
        return reasons, Cure.CAPACITY | Cure.WORKER

    def _short(self, cards: Sequence[PickedGpu]) -> list[Reason]:
        if len(cards) < self.count:
            text = f"only {len(cards)} of the selected GPUs can be used; {self.count} needed"
            return [picked_reason("too_few", text, usable=len(cards), needed=self.count)]
        if self.count > MOST_DEVICES:
            text = f"{self.count} GPUs are selected; llama.cpp supports at most {MOST_DEVICES}"
            return [picked_reason("too_many", text, selected=self.count, most=MOST_DEVICES)]
        groups = by_worker(cards)
        if max(map(len, groups)) < self.count and not self.spans:
            text = "the selected GPUs are on several workers, and this model cannot be distributed"
            return [picked_reason("scattered", text, workers=len(groups))]
        if (small := self._too_small(cards)) is not None:
            card, least = small
            name = gpu_label(next(g for g in self.spec.gpu_ids if self._is(card, g.worker, g.type, g.index)))
            text = f"the selected GPU {name} is too small for one layer: {of_needed(card.free, least)}"
            size = {"needs_gib": gib_number(least), "need_bytes": least, "free_bytes": card.free}
            return [picked_reason("too_small", text, gpu_id=name, **size)]
        level = self.asked.total if self.asked.layers is None else self.asked.layers
        sized = self.splitter.alone(level)
        need = sized.devices[0].vram if self.count == 1 else self.splitter.needed(level)
        free = sum(sorted((c.free for c in cards), reverse=True)[: self.count])
        text = f"{level} of {self.asked.total} layers need {gib(need)} and {gib(sized.ram)} of RAM; "
        text += f"the selected GPUs have {gib(free)} free"
        params: dict[str, Any] = {
            "need_bytes": need, "need_gib": gib_number(need), "free_bytes": free,
            "free_gib": gib_number(free), "need_ram_bytes": sized.ram, "layers": level,
            "total_layers": self.asked.total,
        }  # fmt: skip
        code = "memory"
        if sum(sorted((c.capacity for c in cards), reverse=True)[: self.count]) >= need > free:
            code = "in_use"
            text = f"the selected GPUs are in use: {text}"
        elif free >= need:
            text += "; no split into whole layers fits, or the worker has not enough RAM"
        return [picked_reason(code, text, **params)]

    def _too_small(self, cards: Sequence[PickedGpu]) -> tuple[PickedGpu, int] | None:
        """The smallest card that cannot hold one layer, where each has to hold one, and what that needs.

        All layers: the smallest of them. Some: the last ones, one on each card, the output on the smallest.
        """
        if self.count < 2:
            return None
        ordered = sorted(cards, key=lambda c: -c.free)
        if self.asked.partial and len(cards) == self.count < self.asked.total:
            shares = self.splitter.exact(self.count, (1,) * self.count).devices
            needs = [
                s.unified if self._host(c.w)[0] else s.vram for c, s in zip(ordered, shares, strict=True)
            ]
        else:
            level = 0 if self.asked.partial else self.asked.total
            rests = {u: self.splitter.rests(3, level, unified=u) for u in (False, True)}
            needs = [min(rests[self._host(c.w)[0]]) + self.splitter.layers.least for c in ordered]
        small = [(c, need) for c, need in zip(ordered, needs, strict=True) if c.free < need]
        return min(small, key=lambda pair: pair[0].free, default=None)

    def _is(self, card: PickedGpu, worker: str, kind: str, index: int) -> bool:
        return (self.context.fleet.row(card.w).name, card.type, card.index) == (worker, kind, index)


def _layers(allocations: tuple[GpuAllocation, ...]) -> int:
    offload = allocations[0].offload
    return offload.layers if offload else 0


def by_worker(cards: Sequence[PickedGpu]) -> list[list[PickedGpu]]:
    """Cards of one worker and type in the order of their indexes; the group with the most free first."""
    groups: dict[tuple[int, str], list[PickedGpu]] = {}
    for c in cards:
        groups.setdefault((c.w, c.type), []).append(c)
    for mine in groups.values():
        mine.sort(key=lambda c: c.index)
    return sorted(groups.values(), key=lambda mine: -sum(c.free for c in mine))
