"""The placement score in scale-down: what a replica's place is worth to the fleet.

Binpack keeps the replica that sits tightest, spread the one that is loneliest. The whole fleet is looked at,
other models included. Whatever is not known of a replica's place counts as nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.replicas.replica import Hold, Replica

_OTHERS = 0.2
"""Weight of other models' instances on a card, next to one of ours."""


@dataclass(frozen=True)
class PlacementScores:
    """Scores places of one model's replicas on a fleet; `maximum` is what a perfect place scores."""

    fleet: Fleet
    model_id: int
    strategy: Strategy = Strategy.SPREAD
    maximum: float = 1.0

    def score(self, replica: Replica) -> float:
        """0 for a replica without a place, and for one whose claim does not tell what it holds there."""
        if not replica.placed or not _told(replica.main):
            return 0.0
        if self.strategy is Strategy.SPREAD:
            score = self._spread(replica.main)
        else:
            main = self._packed(replica.main)
            parts = [self._packed(hold) for hold in replica.subordinates]
            score = (5 * main + sum(parts)) / (5 + len(parts))
        return min(max(score, 0.0), self.maximum)

    # -- binpack ----------------------------------------------------------------------------------------

    def _packed(self, hold: Hold) -> float:
        """The fullest card decides: `M (RAM share + 2 VRAM share) / 3`, own claims counted as free."""
        w = self.fleet.position.get(hold.worker_id or 0)
        if w is None:
            return 0.0
        where = np.array([w])
        ram_free = int(self.fleet.free_ram(where)[0])
        ram = hold.ram or 0
        r = _share(ram, ram_free + ram)
        if not hold.gpu_indexes:
            return self.maximum * r
        free = self.fleet.free_vram(where)[0]
        best = 0.0
        for index in hold.gpu_indexes:
            slot = self._slot(w, hold.gpu_type, index)
            own = (hold.vram or {}).get(index, 0)
            if slot is None or not own:
                v = 0.0
            else:
                v = _share(own, int(free[slot]) + own)
            best = max(best, self.maximum * (r + 2 * v) / 3)
        return best

    # -- spread -----------------------------------------------------------------------------------------

    def _spread(self, hold: Hold) -> float:
        """How empty its worker is of this model, then of others, and how empty its cards are."""
        fleet = self.fleet
        w = fleet.position.get(hold.worker_id or 0)
        if w is None:
            return 0.0
        mine, others = self._crowds
        room = others.emptiness(w)
        if mine.low > 0:
            worker = 0.50 + 0.25 * mine.emptiness(w) + 0.15 * room
        elif mine.counts[w] == 0:
            worker = 0.85 + 0.15 * room
        else:
            worker = 0.45 + 0.35 * mine.emptiness(w) + 0.20 * room
        if not hold.gpu_indexes:
            return self.maximum * worker
        on_cards = fleet.occupancy.model_on_gpu.get(self.model_id, {}).get(w, {})
        values = []
        for index in hold.gpu_indexes:
            slot = self._slot(w, hold.gpu_type, index)
            ours = on_cards.get(slot, 0) if slot is not None else 0
            everybody = int(fleet.occupancy.gpu_occupants[w, slot]) if slot is not None else 0
            values.append(1.0 / (1.0 + ours + _OTHERS * max(everybody - ours, 0)))
        return self.maximum * (0.85 * worker + 0.15 * sum(values) / len(values))

    @cached_property
    def _crowds(self) -> tuple[_Crowd, _Crowd]:
        """Instances of this model and of others on every worker: one look serves all replicas."""
        fleet = self.fleet
        mine: Ints = np.zeros(fleet.count, np.int64)
        for w, number in fleet.occupancy.model_on_worker.get(self.model_id, {}).items():
            mine[w] = number
        others: Ints = fleet.occupancy.occupants[: fleet.count] - mine
        live = fleet.alive[: fleet.count]
        return _Crowd.of(mine, live), _Crowd.of(others, live)

    def _slot(self, w: int, gpu_type: str | None, index: int) -> int | None:
        fleet = self.fleet
        for slot in np.flatnonzero((fleet.gpu_id[w] != 0) & (fleet.gpu_index[w] == index)):
            if gpu_type is None or fleet.types[int(fleet.gpu_type[w, slot])] == gpu_type:
                return int(slot)
        return None


def _told(hold: Hold) -> bool:
    """A claim that says of no card what it holds there is broken, unless it holds no card."""
    return hold.vram is not None if hold.gpu_indexes else hold.ram is not None


def _share(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Crowd:
    """Counts by worker position, with the least and the most of any worker."""

    counts: Ints
    low: int
    high: int

    @classmethod
    def of(cls, counts: Ints, live: Bools) -> _Crowd:
        found = counts[live]
        return cls(counts, int(found.min(initial=2**62)), int(found.max(initial=0)))

    def emptiness(self, w: int) -> float:
        """1 where it is emptiest, 0 where it is most crowded."""
        if self.high <= self.low:
            return 1.0
        return 1.0 - (int(self.counts[w]) - self.low) / (self.high - self.low)
