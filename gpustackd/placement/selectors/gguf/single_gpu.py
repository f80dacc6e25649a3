"""Selectors for GGUF models that stay on one worker and divide nothing: one GPU, or none.

Each keeps the best offer of every worker and looks again only at those that changed, as all selectors do.
GPUs of one worker are used in the order of their indexes, so that it is the same whatever the runtime makes
of a list of visible devices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.errors import BadRow
from gpustackd.placement.context.cards import Cards
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation, Offload
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.rules.resource_rules import GgufRules
from gpustackd.placement.scoring.ranker import EPSILON, Floats, Ranker
from gpustackd.placement.scoring.soft_scores import Part
from gpustackd.placement.selectors.base.fleet_selector import SingleWorkerSelector
from gpustackd.placement.selectors.gguf.layer_split import LayerSplitter


class LayeredSelector(SingleWorkerSelector):
    """What the selectors share: the offer of a worker is kept as an allocation."""

    def __init__(self, context: PlacementContext, ranker: Ranker, splitter: LayerSplitter) -> None:
        super().__init__(context, ranker)
        asked = context.rules.gguf
        if asked is None:
            raise BadRow("source", "is no GGUF model")
        self.asked: GgufRules = asked
        self.splitter = splitter
        self.offers: dict[int, GpuAllocation] = {}
        self.cut = False
        """Whether the last search ended for its budget."""

    def allocate(self, size: int) -> None:
        super().allocate(size)
        self.offers.clear()

    def select(self, tie_break: int) -> Candidate | None:
        self.splitter.begin()
        found = super().select(tie_break)
        self.cut = self.splitter.exhausted
        if self.cut:  # what was not looked at is, next time; what was is known
            self.tick = -1
        return found

    def compute(self, rows: Ints, passing: Ints) -> None:
        for w in rows.tolist():
            self.offers.pop(w, None)
        super().compute(rows, passing)

    def keep(self, cards: Cards, offers: Mapping[int, GpuAllocation]) -> None:
        """Write down offers by row of `found`, with what the strategy thinks of their cards."""
        if not offers:
            return
        rows = np.array(list(offers), np.int64)
        claim = np.zeros((len(cards.positions), self.fleet.slots), np.int64)
        ram = np.zeros((len(cards.positions), 1), np.int64)
        taken: Bools = np.zeros(claim.shape, np.bool_)
        for r, allocation in offers.items():
            slots = list(allocation.slots)
            claim[r, slots] = allocation.claims
            taken[r, slots] = True
            ram[r] = allocation.ram or 0
        view = self.ranker.view(cards, claim, claim)
        view.ram_claim = ram
        value = self.scorer.taken(view, taken)
        at = cards.positions[rows]
        self.count[at] = [len(s.slots) for s in offers.values()]
        self.value[at] = value[rows]
        self.booked[at] = claim[rows].sum(axis=1)
        self.offers.update(zip(at.tolist(), offers.values(), strict=True))

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        return self.offers[w]


class GgufSingleGpuSelector(LayeredSelector):
    """One GPU that holds every layer."""

    kind = "one_gpu"

    def is_hopeless(self) -> bool:
        share = self.splitter.alone(self.asked.total).devices[0]
        return min(share.vram, share.unified) > self.fleet.largest[0]

    def look(self, rows: Ints) -> None:
        cards = self.context.cards(rows)
        fits, claim, ram = self.fitting(cards)
        if not fits.any():
            return
        view = self.ranker.view(cards, claim, claim)
        view.ram_claim = ram[:, None]
        values = self.scorer.cards(view)
        np.copyto(values, -np.inf, where=~fits)
        top = values.max(axis=1)
        self.count[rows] = top > -np.inf
        self.value[rows] = top
        self.booked[rows] = claim[:, 0]

    def fitting(self, cards: Cards) -> tuple[Bools, Ints, Ints]:
        """(R, S) which cards hold the model, (R, S) what it books there, (R,) its RAM."""
        level = self.splitter.alone(self.asked.total)
        claim = np.where(cards.unified, level.devices[0].unified, level.devices[0].vram)
        ram = np.where(cards.unified, level.ram_unified, level.ram)
        held = np.where(cards.unified, ram + claim, ram) <= cards.ram
        fits = cards.usable & (claim[:, None] <= cards.free) & held[:, None]
        return fits, np.broadcast_to(claim[:, None], fits.shape), ram

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        cards = self.context.cards(np.array([w]))
        fits, claim, ram = self.fitting(cards)
        view = self.ranker.view(cards, claim, claim)
        view.ram_claim = ram[:, None]
        values = np.where(fits, self.scorer.cards(view), -np.inf)[0]
        good = np.flatnonzero(values >= values.max() - EPSILON).tolist()
        return self._allocation(w, good[tie_break % len(good)], int(claim[0, 0]), int(ram[0]))

    def _allocation(self, w: int, slot: int, claim: int, ram: int) -> GpuAllocation:
        return GpuAllocation(
            w, (slot,), (claim,), ram=ram, offload=Offload(self.asked.total, self.asked.total)
        )


class GgufCpuSelector(LayeredSelector):
    """No GPU: a worker with RAM for everything, of equal ones one that has no GPUs."""

    kind = "cpu"

    def look(self, rows: Ints) -> None:
        self.fleet.renew()
        ram = self.need(rows)
        serves = ram <= self.fleet.ram_free[rows]
        if self.rules.by_cpu is not None:
            serves &= self.rules.by_cpu(self.fleet, rows)
        self.count[rows] = serves
        self.booked[rows] = np.count_nonzero(self.fleet.gpu_id[rows] != 0, axis=1)

    def need(self, rows: Ints) -> Ints:
        """(R,) RAM of a model without GPUs."""
        level = self.splitter.alone(0)
        need: Ints = np.where(self.fleet.unified[rows], level.ram_unified, level.ram)
        return need

    def rank(self, idx: Ints) -> tuple[Floats, Mapping[str, Part]]:
        return self.ranker.rank(idx, self.value[idx], bare=True, ram_claim=self.splitter.alone(0).ram)

    def allocation(self, w: int, tie_break: int) -> GpuAllocation:
        return GpuAllocation(w, ram=int(self.need(np.array([w]))[0]), offload=Offload(0, self.asked.total))
