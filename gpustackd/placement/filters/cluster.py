"""Keeps the workers of the model's cluster; a model without a cluster may go anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.diagnostics.wording import workers


@dataclass(frozen=True, slots=True)
class ClusterFilter:
    """`workers.cluster_id` equals the model's."""

    cluster_id: int
    name: str = "cluster"
    cure: Cure = Cure.WORKER | Cure.MODEL

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        kept: Bools = fleet.cluster[rows] == self.cluster_id
        return kept

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        count = len(dropped)
        text = f"{workers(count)} {'is' if count == 1 else 'are'} not in the model's cluster"
        params = {"dropped": count, "left": left, "of": of, "cluster_id": self.cluster_id}
        return [Reason("cluster.other", self.name, text, params)]
