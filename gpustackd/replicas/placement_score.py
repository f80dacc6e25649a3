"""The placement score in scale-down: what a replica's place is worth to the fleet.

Binpack keeps the replica on the fullest cards, spread the one with fewest neighbours. Instances of other
models count too. What is unknown of a replica's place scores 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Strategy
from gpustackd.replicas.replica import Replica, ReplicaPart

_OTHERS = 0.2
"""Weight of other models' instances on a card; one of this model counts 1."""


@dataclass(frozen=True)
class PlacementScores:
    """Scores the places of one model's replicas on a fleet, from 0 to `maximum`."""

    fleet: Fleet
    model_id: int
    strategy: Strategy = Strategy.SPREAD
    maximum: float = 1.0

    def score(self, replica: Replica) -> float:
        """From 0 to `maximum`; 0 without a place, and where the claim does not state what is held there."""
        if not replica.placed or not _is_stated(replica.main):
            return 0.0
        if self.strategy is Strategy.SPREAD:
            score = self._spread(replica.main)
        else:
            main = self._packed(replica.main)
            parts = [self._packed(part) for part in replica.subordinates]
            score = (5 * main + sum(parts)) / (5 + len(parts))
        return min(max(score, 0.0), self.maximum)

    # -- binpack ----------------------------------------------------------------------------------------

    def _packed(self, part: ReplicaPart) -> float:
        """`maximum * (RAM share + 2 * VRAM share) / 3` of the card where that is most. A share is the claim
        divided by what would be free without it."""
        w = self.fleet.position.get(part.worker_id or 0)
        if w is None:
            return 0.0
        where = np.array([w])
        ram_free = int(self.fleet.free_ram(where)[0])
        ram = part.ram or 0
        r = _share(ram, ram_free + ram)
        if not part.gpu_indexes:
            return self.maximum * r
        free = self.fleet.free_vram(where)[0]
        best = 0.0
        for index in part.gpu_indexes:
            slot = self._slot(w, part.gpu_type, index)
            own = (part.vram or {}).get(index, 0)
            if slot is None or not own:
                v = 0.0
            else:
                v = _share(own, int(free[slot]) + own)
            best = max(best, self.maximum * (r + 2 * v) / 3)
        return best

    # -- spread -----------------------------------------------------------------------------------------

    def _spread(self, part: ReplicaPart) -> float:
        """How few instances of this model, then of others, are on its worker and on its cards."""
        fleet = self.fleet
        w = fleet.position.get(part.worker_id or 0)
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
        if not part.gpu_indexes:
            return self.maximum * worker
        on_cards = fleet.occupancy.model_on_gpu.get(self.model_id, {}).get(w, {})
        values = []
        for index in part.gpu_indexes:
            slot = self._slot(w, part.gpu_type, index)
            ours = on_cards.get(slot, 0) if slot is not None else 0
            everybody = int(fleet.occupancy.gpu_occupants[w, slot]) if slot is not None else 0
            values.append(1.0 / (1.0 + ours + _OTHERS * max(everybody - ours, 0)))
        return self.maximum * (0.85 * worker + 0.15 * sum(values) / len(values))

    @cached_property
    def _crowds(self) -> tuple[_Crowd, _Crowd]:
        """Instances of this model and of others on every worker, counted once for all replicas."""
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


def _is_stated(part: ReplicaPart) -> bool:
    """Whether the claim states what is held: VRAM where the part has cards, else RAM."""
    return part.vram is not None if part.gpu_indexes else part.ram is not None


def _share(part: int, whole: int) -> float:
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Crowd:
    """Counts by worker position, with the lowest and the highest of any live worker."""

    counts: Ints
    low: int
    high: int

    @classmethod
    def of(cls, counts: Ints, live: Bools) -> _Crowd:
        live_counts = counts[live]
        return cls(counts, int(live_counts.min(initial=2**62)), int(live_counts.max(initial=0)))

    def emptiness(self, w: int) -> float:
        """1 on the worker with the lowest count, 0 on the one with the highest."""
        if self.high <= self.low:
            return 1.0
        return 1.0 - (int(self.counts[w]) - self.low) / (self.high - self.low)
