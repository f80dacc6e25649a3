"""Rates places: totals with their parts, the best of a few, and records of what else there was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.model_spec import Strategy
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.context.gpu_allocation import Candidate, GpuAllocation
from gpustackd.placement.context.placement_context import PlacementContext
from gpustackd.placement.preferences import PREFER_DOMINANT_RESOURCE, PREFER_MEAN_OVER_GPUS
from gpustackd.placement.scoring.fault_tolerant import FaultTolerantScorer
from gpustackd.placement.scoring.soft_scores import Part, SoftScores
from gpustackd.placement.scoring.strategies import CardView
from gpustackd.placement.scoring.tie_break import block

Floats = NDArray[np.float64]
EPSILON = 1e-9
BEST = 5
NOBODY: Mapping[int, int] = {}


class Ranker:
    """Rates offers and ready candidates for one demand: the strategy's score plus the soft scores."""

    def __init__(self, context: PlacementContext) -> None:
        self.context = context
        self.fleet = context.fleet
        self.model_id = context.model_id
        demand, policy = context.demand, context.policy
        self.soft_scores = SoftScores(context.fleet, demand, context.preferred_labels, context.faults)
        self.scorer = FaultTolerantScorer(
            demand.spec.placement_strategy or policy.strategy,
            max(policy.placement_max, 0.0),
            PREFER_MEAN_OVER_GPUS in policy.prefer,
            PREFER_DOMINANT_RESOURCE in policy.prefer,
            policy.mix,
            context.faults,
        )
        self.first_fit = self.scorer.strategy is Strategy.FIRST_FIT
        self._generation = 0

    def mix_changed(self) -> bool:
        """Whether the strategy looks at the mix of demands, and that is another one now."""
        return self.scorer.mixed and self.scorer.mix is not self.context.policy.mix

    def renew_scorer(self) -> None:
        """Score by the mix of demands as it is now."""
        self.scorer = replace(self.scorer, mix=self.context.policy.mix)

    def refresh(self) -> None:
        """Bring the soft scores up to date; the context was refreshed just before."""
        context = self.context
        if self._generation != context.generation:
            self._generation = context.generation
            self.soft_scores.allocate(len(context.bits))
        if len(context.refiltered):
            self.soft_scores.describe(context.refiltered)

    def view(self, cards: Cards, claim: Ints, booked: Ints, in_order: bool = True) -> CardView:
        """The strategy's view of cards; `booked` (R, S) or (R, 1) is what the RAM claim follows. `in_order`:
        worker positions ascend, and none comes twice."""
        fleet, rules = self.fleet, self.context.rules
        ram: Any = rules.ram_static or 0
        if not rules.ram_static and rules.ram_ratio:
            ram = (booked * rules.ram_ratio).astype(np.int64)
        scorer = self.scorer
        view = CardView(
            claim,
            cards.free,
            fleet.vram_capacity[cards.positions],
            ram,
            cards.ram[:, None],
            self._mine_on_cards(cards.positions, in_order) if scorer.spread else 0,
            fleet.occupancy.gpu_occupants[cards.positions],
        )
        if scorer.looks_at_hosts:
            view.host_free, view.scale = fleet.free[cards.positions], fleet.largest[1]
        return view

    def _mine_on_cards(self, rows: Ints, in_order: bool) -> Any:
        workers = self.fleet.occupancy.model_on_gpu.get(self.model_id)
        if not workers:
            return 0
        where: list[int] = []
        slots: list[int] = []
        counts: list[int] = []
        here = rows.tolist()
        if in_order and len(workers) < len(here):
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

    # -- offers of workers ----------------------------------------------------------------------------------

    def rank(
        self, idx: Ints, value: Floats, bare: bool = False, ram_claim: int | None = None
    ) -> tuple[Floats, Mapping[str, Part]]:
        """Total score and its parts for offers on worker positions `idx` with card values `value`
        (`bare`: without GPUs, by the RAM they take)."""
        mine = self.context.mine[idx]
        others = self.fleet.occupancy.occupants[idx] - mine
        if bare:
            ram = self.fleet.ram_free[idx]
            claim = self.context.rules.ram_claim(0) if ram_claim is None else ram_claim
            placed = self.scorer.without_cards(claim, ram, mine, others)
        else:
            placed = self.scorer.worker(value, mine, others)
        parts: dict[str, Part] = {"placement": placed}
        total = placed
        more = self.soft_scores.of_workers(idx)
        if more is not None:
            total = total + more[0]
            parts |= more[1]
        return total, parts

    def ties(self, idx: Ints, scores: Floats, booked: NDArray[Any]) -> Ints:
        """Positions in `idx` that share the best score, of these book the least memory, and of these have the
        fewest bytes to download; the first worker alone where the strategy is first fit."""
        ties: Ints = (scores >= scores.max() - EPSILON).nonzero()[0]
        if self.first_fit:
            return ties[[int(np.argmin(self.fleet.worker_id[idx[ties]]))]]
        if len(ties) > 1:
            memory = booked[ties]
            least = memory.min()
            if memory.max() != least:
                ties = ties[memory == least]
        if len(ties) > 1 and (lacking := self.soft_scores.to_download(idx[ties])) is not None:
            ties = ties[lacking == lacking.min()]
        if len(ties) > 1 and (order := self.fleet.order) is not None:
            ties = ties[np.argsort(order[idx[ties]], kind="stable")]
        return ties

    # -- the best of a few ---------------------------------------------------------------------------------

    def pick(self, choices: Sequence[Candidate], tie_break: int) -> Candidate:
        """The best of a few ready choices, scored; even scores by fewer hosts, less memory, fewer bytes to
        download, then `tie_break`. Where the strategy is first fit, by the order of the workers."""
        totals, parts = self.rate([c.allocations for c in choices])
        keys = [self._key(c.allocations) for c in choices]
        best = np.flatnonzero(totals >= totals.max() - EPSILON).tolist()
        least = min(keys[i] for i in best)
        best = [i for i in best if keys[i] == least]
        first = best[tie_break % len(best)]
        also = sorted((i for i in range(len(choices)) if i != first), key=lambda i: -totals[i])
        records = tuple(
            self.record(
                [s.position for s in choices[i].allocations],
                sum(len(s.slots) for s in choices[i].allocations),
                {k: float(v[i]) for k, v in parts.items()},
            )
            for i in [first, *also[: BEST - 1]]
        )
        return replace(
            choices[first],
            score=float(totals[first]),
            scores={k: float(v[first]) for k, v in parts.items()},
            also=records,
        )

    def _key(self, allocations: Sequence[GpuAllocation]) -> tuple[int, ...]:
        """Lowest for the one to take of even scores."""
        if self.first_fit:
            return (len(allocations), *(int(self.fleet.worker_id[s.position]) for s in allocations))
        lacking = self.soft_scores.lacking([s.position for s in allocations])
        return (len(allocations), sum(sum(s.claims) for s in allocations), lacking)

    def hosts(self, members: Ints, scores: Floats, n: int, tie_break: int) -> list[int]:
        """Which `n` of these workers (positions, with their scores) one placement takes, as indexes into
        `members`: the best; of even ones whole blocks take turns, so that what stays free stays whole."""
        if self.first_fit:
            order = np.lexsort((self.fleet.worker_id[members], -scores))
            return order[:n].tolist()  # type: ignore[no-any-return]
        top = (scores >= scores.max() - EPSILON).nonzero()[0]
        if len(top) >= n:
            return block(top.tolist(), n, tie_break)
        return np.argsort(-scores, kind="stable")[:n].tolist()  # type: ignore[no-any-return]

    def others(
        self, members: Ints, scores: Floats, parts: Mapping[str, Part], taken: Sequence[int], gpus: int
    ) -> tuple[Mapping[str, object], ...]:
        """Records of the next best placements on as many workers as were `taken`, none of them twice."""
        n = len(taken)
        most = BEST * n
        best = np.argpartition(-scores, most)[:most] if len(scores) > most else np.arange(len(scores))
        rest = best[np.argsort(-scores[best], kind="stable")].tolist()
        rest = [i for i in rest if i not in taken][: (BEST - 1) * n]
        placed, positions = parts["placement"][rest].tolist(), members[rest].tolist()
        groups = [slice(k, k + n) for k in range(0, len(rest) - n + 1, n)]
        return tuple(self.record(positions[g], gpus, self.together(positions[g], placed[g])) for g in groups)

    def record(self, positions: Sequence[int], gpus: int, parts: Mapping[str, float]) -> Mapping[str, object]:
        """One line of a decision record: main worker, GPUs, score and its parts."""
        row = self.fleet.worker_rows[positions[0]]
        found: dict[str, object] = {"worker": row.name if row else "", "gpus": gpus}
        if len(positions) > 1:
            found["workers"] = len(positions)
        found["score"] = round(sum(parts.values()), 4)
        found["parts"] = {k: round(v, 4) for k, v in parts.items()}
        return found

    # -- scoring -------------------------------------------------------------------------------------------

    def rate(self, choices: Sequence[Sequence[GpuAllocation]]) -> tuple[Floats, dict[str, Floats]]:
        """Total score and its parts for ready choices, whatever they span; (K,)."""
        flat = [s for allocations in choices for s in allocations]
        of = np.array([k for k, allocations in enumerate(choices) for _ in allocations])
        rows = np.array([s.position for s in flat], np.int64)
        claim = np.zeros((len(flat), self.fleet.slots), np.int64)
        taken = np.zeros(claim.shape, np.bool_)
        for r, s in enumerate(flat):
            claim[r, list(s.slots)] = s.claims
            taken[r, list(s.slots)] = True
        cards = read_cards(self.fleet, rows, self.context.rules)
        booked = claim.sum(axis=1)
        view = self.view(cards, claim, booked[:, None], in_order=False)
        if any(s.ram is not None for s in flat):
            own = [self.context.rules.ram_claim(sum(s.claims)) if s.ram is None else s.ram for s in flat]
            view.ram_claim = np.array(own, np.int64)[:, None]
        value = self.scorer.taken(view, taken)
        mine = self._mine(rows)
        others = self.fleet.occupancy.occupants[rows] - mine
        mains = np.flatnonzero(np.diff(of, prepend=-1))
        score = value.copy()
        bare: Bools = ~np.any(taken, axis=1)
        score[mains] = self.scorer.worker(value[mains], mine[mains], others[mains])
        if bare.any():
            ram = np.broadcast_to(np.asarray(view.ram_claim), (len(flat), 1))[:, 0]
            alone = self.scorer.without_cards(ram[mains], cards.ram[mains], mine[mains], others[mains])
            score[mains] = np.where(bare[mains], alone, score[mains])
        placed = np.array(
            [
                self.scorer.several_workers(float(score[m]), score[m + 1 : m + len(allocations)].tolist())
                for m, allocations in zip(mains, choices, strict=True)
            ]
        )
        parts: dict[str, Floats] = {"placement": placed}
        parts |= self.soft_scores.of_choices([[s.position for s in allocations] for allocations in choices])
        return sum(parts.values(), np.zeros(len(choices))), parts

    def together(self, positions: Sequence[int], placed: Sequence[float]) -> dict[str, float]:
        """Score parts of a placement over several workers; `placed`: what each of them scores, main first."""
        total = {"placement": self.scorer.several_workers(placed[0], list(placed[1:]))}
        total |= {k: float(v[0]) for k, v in self.soft_scores.of_choices([positions]).items()}
        return total

    def _mine(self, rows: Ints) -> Ints:
        counts = self.fleet.occupancy.model_on_worker.get(self.model_id) or NOBODY
        return np.array([counts.get(w, 0) for w in rows.tolist()], np.int64)
