"""One demand against the fleet: filters and the mask they make, rules, cards as arrays; kept up to date."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import PoolStep
from gpustackd.engines.sglang import Fraction
from gpustackd.placement.context.cards import Cards, read_cards
from gpustackd.placement.diagnostics.faults import StageFault, StageFaults
from gpustackd.placement.filters import chain
from gpustackd.placement.filters.framework import FrameworkFilter
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.filters.local_path import LocalPathFilter
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.resource_rules import ResourceRules
from gpustackd.placement.rules.sglang_fractions import follows_cards, fractions, with_fractions

SHARED_ROWS = 512
"""More rows than this are not kept for the next selector: memory stays flat."""
NO_ROWS: Ints = np.zeros(0, np.int64)


class PlacementContext:
    """What is known of one demand on one fleet, whoever selects. Not thread-safe, as the fleet is not."""

    def __init__(self, fleet: Fleet, demand: Demand, policy: Policy, rules: ResourceRules) -> None:
        self.fleet = fleet
        self.demand = demand
        self.policy = policy
        self.rules = rules
        self.model_id = demand.spec.id
        self.faults = StageFaults()
        self.filters = chain.chain(demand, policy, self.faults)
        self.missing_filters = self.faults.noted()
        """Filters that could not be built at all."""
        framework = next((f for f in self.filters if isinstance(f, FrameworkFilter)), None)
        if framework is not None:
            self.rules = replace(rules, **chain.guarded(framework, self.faults))
        self.preferred_labels = next(
            (f for f in self.filters if isinstance(f, LabelFilter) and f.preferred), None
        )
        self._path = next((f for f in self.filters if isinstance(f, LocalPathFilter)), None)
        self.fractions: Mapping[str, Fraction] = {}
        """GPU type -> static fraction, where the share of a card follows from the cards."""
        self._follows_cards = follows_cards(demand, rules)
        self._followed: tuple[int, int] | None = None
        self._cards: tuple[int, Cards] | None = None
        self._tick = -1
        self._size = 0
        self.revision = 0
        """Rises whenever the rules change: what selectors keep is void then."""
        self.generation = 0
        """Rises whenever the arrays over worker positions are made anew."""
        self.filter_revision = 0
        """Rises whenever the filters let other workers through."""
        self.news = 0
        """Workers that changed between the last two decisions."""
        self.refiltered: Ints = NO_ROWS
        """Positions that the filters looked at in the last refresh."""
        self._pool: tuple[PoolStep, ...] | None = None

    # -- keeping up ------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Bring the filter mask and the instances of this model up to date, for workers that changed."""
        fleet = self.fleet
        if self._size != len(fleet.alive):
            self._size = len(fleet.alive)
            self.bits = np.full(self._size, chain.GONE, np.uint16)
            self.mine = np.zeros(self._size, np.int32)
            self.generation += 1
            self._tick = -1
        path = self._path
        if path is not None and self.faults.tried(
            "filter.local_path", lambda: path.renew(self.policy), False
        ):
            self._tick, self._cards = -1, None
            self.revision += 1
        self.news = 0
        self.refiltered = NO_ROWS
        if self._tick == fleet.tick:
            return
        before = self._tick
        self._tick = fleet.tick
        rows = (fleet.touched[: fleet.count] > before).nonzero()[0]
        self.news = len(rows)
        if not len(rows):
            return
        counts = fleet.occupancy.model_on_worker.get(self.model_id)
        self.mine[rows] = [counts.get(w, 0) for w in rows.tolist()] if counts else 0
        rows = rows[fleet.described[rows] > before]
        if len(rows):
            self._filter(rows)
        if self._follows_cards:
            self._follow_cards()

    def start_over(self) -> None:
        """Keep nothing that was worked out while a filter or scorer failed."""
        self._cards = None
        self.revision += 1
        if self.faults:
            self.faults.clear()
            self._size = 0

    def _filter(self, rows: Ints) -> None:
        """Look again at workers whose own rows changed."""
        bits = chain.failures(self.filters, self.fleet, rows, self.faults)
        if not np.array_equal(bits, self.bits[rows]):
            self._pool = None
            self.filter_revision += 1
        self.bits[rows] = bits
        self.refiltered = rows

    def _follow_cards(self) -> None:
        """Work out the share of a card again where workers or cards are others than before."""
        now = (self.fleet.inventory, self.filter_revision)
        if self._followed == now:
            return
        self._followed = now
        current = fractions(self.fleet, (self.bits == 0).nonzero()[0], self.demand, self.rules)
        if current != self.fractions:
            self.fractions = current
            self.rules = with_fractions(self.rules, current)
            self._cards = None
            self.revision += 1

    def failed_stages(self) -> dict[str, StageFault]:
        """What failed since the last decision began, by stage."""
        return {f.stage: f for f in (*self.missing_filters, *self.faults.noted())}

    @property
    def pool(self) -> tuple[PoolStep, ...]:
        """Workers left after each filter."""
        if self._pool is None:
            self._pool = chain.pool(self.filters, self.bits, self.fleet.alive)
        return self._pool

    def cards(self, rows: Ints) -> Cards:
        """Cards of these positions; selectors that look at the same workers at the same time share them."""
        kept = self._cards
        if kept is not None and kept[0] == self.fleet.tick and np.array_equal(kept[1].positions, rows):
            return kept[1]
        current = read_cards(self.fleet, rows, self.rules)
        self._cards = (self.fleet.tick, current) if len(rows) <= SHARED_ROWS else None
        return current
