"""One demand against the fleet: filters, ladder and scores, kept and brought up to date by need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet import Bools, Fleet, Ints
from gpustackd.domain.model_spec import Strategy
from gpustackd.domain.outcome import PoolStep
from gpustackd.placement.engine_steps import engine_steps
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.framework import FrameworkFilter
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.filters.local_path import LocalPathFilter
from gpustackd.placement.fit.cards import Cards, cards
from gpustackd.placement.fit.fractions import follows_cards, fractions, with_fractions
from gpustackd.placement.fit.rules import Rules
from gpustackd.placement.fit.seat import Choice, Seat
from gpustackd.placement.fit.static_fraction import Fraction
from gpustackd.placement.hand_picked import HandPicked
from gpustackd.placement.over_workers import OverWorkers
from gpustackd.placement.policy import Policy
from gpustackd.placement.score.locality import Warm, shares, warm
from gpustackd.placement.score.strategy import Scorer, Seats
from gpustackd.placement.tiers import BEST, EPSILON, CpuOnly, ManyGpus, OneGpu

Floats = NDArray[np.float64]
NOBODY: Mapping[int, int] = {}
SHARED_ROWS = 512
"""More rows than this are not kept for the next step: memory stays flat."""


class Step(Protocol):
    """One step of the ladder."""

    @property
    def step(self) -> str:
        """Its name in answers."""

    def choose(self, turn: int) -> Choice | None:
        """The best place that this step finds."""


class Search:
    """All that is known of one demand on one fleet. Not thread-safe, as the fleet is not."""

    def __init__(self, fleet: Fleet, demand: Demand, policy: Policy, rules: Rules) -> None:
        self.fleet = fleet
        self.demand = demand
        self.policy = policy
        self.rules = rules
        self.model_id = demand.spec.id
        self.filters = chain.chain(demand, policy)
        framework = next((f for f in self.filters if isinstance(f, FrameworkFilter)), None)
        if framework is not None and not framework.letter:
            self.rules = replace(rules, devices=framework.devices, by_cpu=framework.by_cpu)
        self._labels = next((f for f in self.filters if isinstance(f, LabelFilter) and f.preferred), None)
        self._path = next((f for f in self.filters if isinstance(f, LocalPathFilter)), None)
        self.scorer = Scorer(
            demand.spec.placement_strategy or policy.strategy,
            policy.placement_max,
            "prefer_mean_over_gpus" in policy.prefer,
            "prefer_dominant_resource" in policy.prefer,
            policy.compat,
        )
        self.first_fit = self.scorer.strategy is Strategy.FIRST_FIT
        self.fractions: Mapping[str, Fraction] = {}
        """GPU type -> static fraction, where the share of a card follows from the cards."""
        self._follows_cards = follows_cards(demand, rules)
        self._followed: tuple[int, int] | None = None
        self.ladder: tuple[Step, ...] = self._ladder()
        self._cards: tuple[int, Cards] | None = None
        self._tick = -1
        self._size = 0
        self.filtered = 0
        """Rises whenever the filters let other workers through."""
        self.cut = False
        """Whether a step of the last search ended for its budget."""
        self._pool: tuple[PoolStep, ...] | None = None
        self._warm = Warm()
        self._warm_shares: Floats | None = None
        self._warm_roster = -1

    def _ladder(self) -> tuple[Step, ...]:
        if self.demand.spec.gpu_ids and self.rules.gguf is None:
            return (HandPicked(self),)
        if own := engine_steps(self):
            return own
        if self.rules.cpu_only:
            return (CpuOnly(self),)
        tiers: list[Step] = []
        more = self.rules.gpu_count != 1
        if self.rules.gpu_count <= 1:
            tiers.append(OneGpu(self))
        if more:
            tiers.append(ManyGpus(self))
        # the peer looks at several workers even where one GPU is asked for
        if (more or self.rules.compat) and self.rules.distributed:
            tiers.append(OverWorkers(self))
        if self.rules.cpu:
            tiers.append(CpuOnly(self))
        return tuple(tiers)

    # -- keeping up ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Filter bits and counts of this model, for workers that changed."""
        fleet = self.fleet
        if self._size != len(fleet.alive):
            self._size = len(fleet.alive)
            self.bits = np.full(self._size, chain.GONE, np.uint16)
            self.mine = np.zeros(self._size, np.int32)
            self.gain = np.zeros(self._size) if self._labels else None
            self._tick = -1
        if self._path is not None and self._path.renew(self.policy):
            self._tick, self._cards, self.ladder = -1, None, self._ladder()
        if self._tick == fleet.tick:
            return
        before = self._tick
        self._tick = fleet.tick
        rows = (fleet.touched[: fleet.count] > before).nonzero()[0]
        if not len(rows):
            return
        counts = fleet.model_on_worker.get(self.model_id)
        self.mine[rows] = [counts.get(w, 0) for w in rows.tolist()] if counts else 0
        rows = rows[fleet.described[rows] > before]
        if len(rows):
            self._filter(rows)
        if self._follows_cards:
            self._follow_cards()

    def _filter(self, rows: Ints) -> None:
        """Look anew at workers whose own rows changed."""
        bits = chain.failures(self.filters, self.fleet, rows)
        if not np.array_equal(bits, self.bits[rows]):
            self._pool = None
            self.filtered += 1
        self.bits[rows] = bits
        if self._labels is not None and self.gain is not None:
            self.gain[rows] = self._labels.preference(self.fleet, rows)

    def _follow_cards(self) -> None:
        """Work out the share of a card anew where workers or cards are others than before."""
        now = (self.fleet.inventory, self.filtered)
        if self._followed == now:
            return
        self._followed = now
        found = fractions(self.fleet, (self.bits == 0).nonzero()[0], self.demand, self.rules)
        if found != self.fractions:
            self.fractions = found
            self.rules = with_fractions(self.rules, found)
            self._cards = None
            self.ladder = self._ladder()

    @property
    def pool(self) -> tuple[PoolStep, ...]:
        """Workers left after each filter."""
        if self._pool is None:
            self._pool = chain.pool(self.filters, self.bits, self.fleet.alive)
        return self._pool

    def cards(self, rows: Ints) -> Cards:
        """Cards of these positions; steps that look at the same workers at the same time share them."""
        kept = self._cards
        if kept is not None and kept[0] == self.fleet.tick and np.array_equal(kept[1].w, rows):
            return kept[1]
        found = cards(self.fleet, rows, self.rules)
        self._cards = (self.fleet.tick, found) if len(rows) <= SHARED_ROWS else None
        return found

    # -- the answer ------------------------------------------------------------------------------------

    def best(self, turn: int) -> Choice | None:
        """The best place of the first step that has one."""
        self.refresh()
        if self.first_fit:
            turn = 0
        self.cut = False
        for tier in self.ladder:
            found = tier.choose(turn)
            self.cut |= getattr(tier, "cut", False)
            if found is not None:
                return found
        return None

    def pick(self, choices: Sequence[Choice], turn: int) -> Choice:
        """The best of a few ready choices, scored; even scores by fewer hosts, less memory, then `turn`."""
        totals, parts = self.rate([c.seats for c in choices])
        first = int(np.argmax(totals))
        if not self.policy.compat:
            keys = [(len(c.seats), sum(sum(s.claims) for s in c.seats)) for c in choices]
            best = np.flatnonzero(totals >= totals[first] - EPSILON).tolist()
            least = min(keys[i] for i in best)
            best = [i for i in best if keys[i] == least]
            first = best[turn % len(best)]
        also = sorted((i for i in range(len(choices)) if i != first), key=lambda i: -totals[i])
        records = tuple(
            {
                "worker": self.fleet.row(choices[i].seats[0].w).name,
                "gpus": sum(len(s.slots) for s in choices[i].seats),
                "score": round(float(totals[i]), 4),
                "parts": {k: round(float(v[i]), 4) for k, v in parts.items()},
            }
            for i in [first, *also[: BEST - 1]]
        )
        return replace(
            choices[first],
            score=float(totals[first]),
            scores={k: float(v[first]) for k, v in parts.items()},
            also=records,
        )

    # -- scoring -----------------------------------------------------------------------------------------

    def seats(self, found: Cards, claim: Ints, booked: Ints) -> Seats:
        """The strategy's view of cards; `booked` (R, S) or (R, 1) is what the RAM claim follows."""
        fleet, rules = self.fleet, self.rules
        ram: Any = rules.ram_static or 0
        if not rules.ram_static and rules.ram_ratio:
            ram = (booked * rules.ram_ratio).astype(np.int64)
        need_counts = self.scorer.spread
        return Seats(
            claim,
            found.free,
            fleet.vram_capacity[found.w],
            ram,
            found.ram[:, None],
            self._mine_on_cards(found.w) if need_counts else 0,
            fleet.gpu_occupants[found.w],
        )

    def _mine_on_cards(self, rows: Ints) -> Any:
        workers = self.fleet.model_on_gpu.get(self.model_id)
        if not workers:
            return 0
        where: list[int] = []
        slots: list[int] = []
        counts: list[int] = []
        here = rows.tolist()
        if len(workers) < len(here):  # rows are in order
            known = [w for w in workers if here[0] <= w <= here[-1]]
            at = np.searchsorted(rows, known).tolist()
            pairs = [(r, w) for r, w in zip(at, known, strict=True) if here[r] == w]
        else:
            pairs = [(r, w) for r, w in enumerate(here) if w in workers]
        if not pairs:
            return 0
        for r, w in pairs:
            for s, n in workers[w].items():
                where.append(r)
                slots.append(s)
                counts.append(n)
        mine = np.zeros((len(rows), self.fleet.slots), np.int32)
        mine[where, slots] = counts
        return mine

    def rank(
        self, idx: Ints, value: Floats, bare: bool = False, ram_claim: int | None = None
    ) -> tuple[Floats, Mapping[str, Floats]]:
        """Total score and its parts for offers on worker positions `idx` with card values `value`
        (`bare`: without GPUs, by the RAM they take)."""
        mine = self.mine[idx]
        others = self.fleet.occupants[idx] - mine
        if bare:
            ram = self.fleet.ram_free[idx]
            claim = self.rules.ram_claim(0) if ram_claim is None else ram_claim
            placed = self.scorer.without_cards(claim, ram, mine, others)
        else:
            placed = self.scorer.worker(value, mine, others)
        parts: dict[str, Floats] = {"placement": placed}
        total = parts["placement"]
        local = self._locality()
        if local is not None:
            parts["locality"] = self.policy.locality_max * local[idx]
            total = total + parts["locality"]
        if self.gain is not None:
            parts["preferred"] = self.gain[idx]
            total = total + parts["preferred"]
        return total, parts

    def rate(self, choices: Sequence[Sequence[Seat]]) -> tuple[Floats, dict[str, Floats]]:
        """Total score and its parts for ready choices, whatever they span; (K,)."""
        flat = [s for seats in choices for s in seats]
        of = np.array([k for k, seats in enumerate(choices) for _ in seats])
        rows = np.array([s.w for s in flat], np.int64)
        claim = np.zeros((len(flat), self.fleet.slots), np.int64)
        taken = np.zeros(claim.shape, np.bool_)
        for r, s in enumerate(flat):
            claim[r, list(s.slots)] = s.claims
            taken[r, list(s.slots)] = True
        found = cards(self.fleet, rows, self.rules)
        booked = claim.sum(axis=1)
        view = self.seats(found, claim, booked[:, None])
        if any(s.ram is not None for s in flat):
            own = [self.rules.ram_claim(sum(s.claims)) if s.ram is None else s.ram for s in flat]
            view.ram_claim = np.array(own, np.int64)[:, None]
        value = self.scorer.together(self.scorer.cards(view), taken)
        mine = self._mine(rows)
        others = self.fleet.occupants[rows] - mine
        mains = np.flatnonzero(np.diff(of, prepend=-1))
        score = value.copy()
        bare: Bools = ~np.any(taken, axis=1)
        score[mains] = self.scorer.worker(value[mains], mine[mains], others[mains])
        if bare.any():
            ram = np.broadcast_to(np.asarray(view.ram_claim), (len(flat), 1))[:, 0]
            alone = self.scorer.without_cards(ram[mains], found.ram[mains], mine[mains], others[mains])
            score[mains] = np.where(bare[mains], alone, score[mains])
        placed = np.array(
            [
                self.scorer.several_workers(float(score[m]), score[m + 1 : m + len(seats)].tolist())
                for m, seats in zip(mains, choices, strict=True)
            ]
        )
        parts: dict[str, Floats] = {"placement": placed}
        files = warm(self.demand, self.policy)
        if files.main or files.draft:
            ids = [[int(self.fleet.worker_id[s.w]) for s in seats] for seats in choices]
            parts["locality"] = self.policy.locality_max * np.array([files.share(i) for i in ids])
        if self._labels is not None:
            gain = self._labels.preference(self.fleet, rows)
            parts["preferred"] = np.array([gain[of == k].mean() for k in range(len(choices))])
        return sum(parts.values(), np.zeros(len(choices))), parts

    def together(self, seats: Sequence[Seat], parts: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Score parts of a placement over several workers from those of its parts, main first."""
        placed = parts["placement"]
        total = {"placement": self.scorer.several_workers(placed[0], list(placed[1:]))}
        if "locality" in parts:
            files = warm(self.demand, self.policy)
            ids = [int(self.fleet.worker_id[s.w]) for s in seats]
            total["locality"] = self.policy.locality_max * files.share(ids)
        if "preferred" in parts:
            total["preferred"] = sum(parts["preferred"]) / len(seats)
        return total

    def _mine(self, rows: Ints) -> Ints:
        counts = self.fleet.model_on_worker.get(self.model_id) or NOBODY
        return np.array([counts.get(w, 0) for w in rows.tolist()], np.int64)

    def _locality(self) -> Floats | None:
        found = warm(self.demand, self.policy)
        if not found.main and not found.draft:
            return None
        if self._warm_shares is None or found != self._warm or self._warm_roster != self.fleet.roster:
            self._warm = Warm(dict(found.main), dict(found.draft))
            self._warm_roster = self.fleet.roster
            self._warm_shares = shares(self.fleet, self._warm, len(self.fleet.alive))
        return self._warm_shares

    def ties(self, idx: Ints, scores: Floats, booked: NDArray[Any]) -> Ints:
        """Positions in `idx` that share the best score and, of these, book the least memory; the first
        worker alone where the strategy is first fit."""
        ties: Ints = (scores >= scores.max() - EPSILON).nonzero()[0]
        if self.first_fit:
            return ties[[int(np.argmin(self.fleet.worker_id[idx[ties]]))]]
        if len(ties) > 1:
            memory = booked[ties]
            least = memory.min()
            if memory.max() != least:
                ties = ties[memory == least]
        return ties
