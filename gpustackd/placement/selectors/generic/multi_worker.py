"""The selector for several workers: all GPUs of one type of each.

Workers with as many GPUs of the type, and with as much to book on them, form a class; the members of a class
are alike, so that only its size decides whether it serves. The class that needs the fewest workers is
taken, then the one that books least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Ints
from gpustackd.engines.vllm import Unworkable, layout
from gpustackd.placement.context.cards import Cards, portions, ram_holds, read_cards
from gpustackd.placement.context.distributed_limit import mask
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation
from gpustackd.placement.rules.resource_rules import ClaimPolicy
from gpustackd.placement.scoring.ranker import Floats
from gpustackd.placement.selectors.base.fleet_selector import FleetSelector

MORE_TRIED = 64
"""Workers added beyond the fewest that hold the model, in search of a layout that the executor can run."""


@dataclass(frozen=True, slots=True)
class GpuTypeGroup:
    """A class of workers: GPU type, GPUs of that type, bytes booked on all of them together."""

    code: int
    gpus: int
    booked: int


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """So many of these workers (positions) hold the model."""

    hosts: int
    booked: int
    code: int
    members: Ints


class MultiWorkerSelector(FleetSelector):
    """Several workers with all their GPUs of one type."""

    kind = "many_workers"

    def allocate(self, size: int) -> None:
        self.kinds: list[GpuTypeGroup] = []
        self._kind: dict[GpuTypeGroup, int] = {}
        self.group: dict[int, NDArray[np.int32]] = {}
        """type code -> (W,) index into `kinds`, -1 = may not take part."""
        self.value: dict[int, Floats] = {}
        self.low: dict[int, Ints] = {}
        """type code -> (W,) least free memory of a card."""

    def compute(self, rows: Ints, passing: Ints) -> None:
        for kind in self.group.values():
            kind[rows] = -1
        types = self.fleet.gpu_type[passing]
        for code in np.unique(types[types >= 0]).tolist():
            if code not in self.group:
                self.group[code] = np.full(self.size, -1, np.int32)
                self.value[code] = np.zeros(self.size)
                self.low[code] = np.zeros(self.size, np.int64)
            self._compute(passing, code)

    def _compute(self, passing: Ints, code: int) -> None:
        found, ok, claim, gpus = self._look(passing, code)
        at = np.flatnonzero(ok)
        if not len(at):
            return
        rows, booked, size = passing[at], claim.sum(axis=1)[at], gpus[at]
        for b, g in {(int(b), int(g)) for b, g in zip(booked, size, strict=True)}:
            kind = GpuTypeGroup(code, g, b)
            if kind not in self._kind:
                self._kind[kind] = len(self.kinds)
                self.kinds.append(kind)
            self.group[code][rows[(booked == b) & (size == g)]] = self._kind[kind]
        mine = found.type[at] == code
        low = np.where(mine, found.free[at], np.iinfo(np.int64).max).min(axis=1)
        if found.unified.any():  # all cards of the worker and its RAM come from one pool
            pool = (found.ram[at] - (self.rules.ram_static or 0)) / (1 + (self.rules.ram_ratio or 0))
            low = np.where(found.unified[at], np.minimum(low, (pool // size).astype(np.int64)), low)
        self.low[code][rows] = low
        view = self.ranker.view(found, claim, claim.sum(axis=1)[:, None])
        self.value[code][rows] = self.scorer.taken(view, found.type == code)[at]

    def _look(self, rows: Ints, code: int) -> tuple[Cards, NDArray[np.bool_], Ints, Ints]:
        """Cards, which workers may take part with all of their GPUs of the type, claims, GPU counts."""
        cards = read_cards(self.fleet, rows, self.rules)
        enough, least = portions(cards, self.rules)
        mine = cards.type == code
        gpus = np.count_nonzero(mine, axis=1)
        claim = np.where(mine, least, 0)
        ok = (gpus > 0) & ~np.any(mine & ~enough, axis=1)
        ok &= ram_holds(cards, self.rules, claim.sum(axis=1), cards.ram, cards.unified)
        ok &= mask(self.fleet, rows, self.rules.engine)
        return cards, ok, claim, gpus

    # -- choosing ----------------------------------------------------------------------------------------

    def select(self, tie_break: int) -> Candidate | None:
        self.refresh()
        options = list(self._options())
        if not options:
            return None
        best = min(options, key=lambda o: (o.hosts, o.booked))
        scores, parts = self.ranker.rank(best.members, self._values(best))
        chosen = self.ranker.hosts(best.members, scores, best.hosts, tie_break)
        allocations = tuple(self.allocations(best.members[chosen], best.code))
        positions = [s.position for s in allocations]
        total = self.ranker.together(positions, parts["placement"][chosen].tolist())
        gpus = sum(len(s.slots) for s in allocations)
        also = self.ranker.others(best.members, scores, parts, chosen, gpus)
        records = (self.ranker.record(positions, gpus, total), *also)
        return Candidate(allocations, self.kind, sum(total.values()), total, also=records)

    def _values(self, option: WorkerSet) -> Floats:
        """Card values of the members. Where the need is split, what a card books is known only now."""
        if self.rules.claim_policy is not ClaimPolicy.SPLIT:
            return self.value[option.code][option.members]
        cards = read_cards(self.fleet, option.members, self.rules)
        mine = cards.type == option.code
        gpus = int(np.count_nonzero(mine[0]))
        claim = np.where(mine, option.booked // (option.hosts * gpus), 0)
        return self.scorer.taken(self.ranker.view(cards, claim, claim.sum(axis=1)[:, None]), mine)

    def _options(self) -> Iterator[WorkerSet]:
        """The class of each type and GPU count that serves with the fewest workers."""
        for code, kind in self.group.items():
            counts = np.bincount(kind[kind >= 0], minlength=len(self.kinds))
            by_gpus: dict[int, list[int]] = {}
            for k in np.flatnonzero(counts).tolist():
                by_gpus.setdefault(self.kinds[k].gpus, []).append(k)
            for gpus, kinds in by_gpus.items():
                if not self.rules.fixed_world and not self.rules.divisors.allows(gpus):
                    continue
                if self.rules.claim_policy is ClaimPolicy.SPLIT:
                    yield from self._split(code, gpus, np.flatnonzero(np.isin(kind, kinds)))
                    continue
                alike = list(self._alike(code, gpus, kinds, counts))
                if alike:
                    yield from alike
                elif len(kinds) > 1:
                    yield from self._mixed(code, gpus, self._similar(kinds))

    def _hosts(self, gpus: int, fewest: int, there: int) -> int | None:
        """How many workers to take, at least `fewest`, of `there`; None where that cannot be."""
        if self.rules.gpu_count:
            hosts, rest = divmod(self.rules.gpu_count, gpus)
            tries = [hosts] if not rest and hosts >= fewest else []
        else:
            tries = list(range(fewest, min(there, fewest + MORE_TRIED) + 1))
        for hosts in tries:
            if 2 <= hosts <= there and self.workable(gpus, hosts) is None:
                return hosts
            if self.rules.topology is None and hosts > there:
                return None
        return None

    def workable(self, gpus: int, hosts: int) -> str | None:
        """Why the executor cannot run so many workers with so many GPUs each; None where it can."""
        if self.rules.topology is None:
            return None
        try:
            layout([gpus] * hosts, self.rules.topology)
        except Unworkable as why:
            return str(why)
        return None

    def _similar(self, kinds: list[int]) -> list[int]:
        """Kinds that may be mixed: for SGLang those whose cards are about as large as the largest."""
        if not self.rules.grouped:
            return kinds
        largest = max(self.kinds[k].booked for k in kinds)
        return [k for k in kinds if self.kinds[k].booked >= 0.9 * largest]

    def _alike(self, code: int, gpus: int, kinds: list[int], counts: Ints) -> Iterator[WorkerSet]:
        for k in kinds:
            booked = self.kinds[k].booked
            if booked <= 0:
                continue
            hosts = self._hosts(gpus, max(2, -(-self.rules.vram // booked)), int(counts[k]))
            if hosts is not None:
                yield WorkerSet(hosts, hosts * booked, code, np.flatnonzero(self.group[code] == k))

    def _mixed(self, code: int, gpus: int, kinds: list[int]) -> Iterator[WorkerSet]:
        """Workers with different cards, those with the most memory first."""
        members = np.flatnonzero(np.isin(self.group[code], kinds))
        booked = np.array([self.kinds[k].booked for k in self.group[code][members].tolist()], np.int64)
        order = np.argsort(-booked, kind="stable")
        sums = np.cumsum(booked[order])
        fewest = int(np.searchsorted(sums, self.rules.vram)) + 1
        if fewest > len(members):
            return
        hosts = self._hosts(gpus, max(2, fewest), len(members))
        if hosts is not None:
            yield WorkerSet(hosts, int(sums[hosts - 1]), code, members[order[:hosts]])

    def _split(self, code: int, gpus: int, members: Ints) -> Iterator[WorkerSet]:
        """The need split evenly: every card must have its part free."""
        low = np.sort(self.low[code][members])[::-1]
        for fewest in range(2, len(members) + 1):
            hosts = self._hosts(gpus, fewest, len(members))
            if hosts is None:
                return
            part = -(-self.rules.vram // (hosts * gpus))
            if hosts <= len(members) and low[hosts - 1] >= part:
                holding = members[self.low[code][members] >= part]
                yield WorkerSet(hosts, part * hosts * gpus, code, holding)
                return
            if self.rules.gpu_count:
                return

    def allocations(self, positions: Ints, code: int) -> list[GpuAllocation]:
        """All GPUs of the type on each of these workers."""
        cards = read_cards(self.fleet, positions, self.rules)
        _, least = portions(cards, self.rules)
        mine = cards.type == code
        part = -(-self.rules.vram // max(int(np.count_nonzero(mine)), 1))
        allocations: list[GpuAllocation] = []
        for r, w in enumerate(positions.tolist()):
            slots = np.flatnonzero(mine[r]).tolist()
            slots.sort(key=lambda s: int(self.fleet.gpu_index[w, s]))
            split = self.rules.claim_policy is ClaimPolicy.SPLIT
            claims = tuple(part if split else int(least[r, s]) for s in slots)
            allocations.append(GpuAllocation(w, tuple(slots), claims, len(slots) if allocations else None))
        return allocations
