"""What a cluster reports of its nodes' cards, held against what is asked of a pool (vGPU spec B.3).

Without a report nothing is held against a node: the ledger alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.pools import DeviceGroup, InstanceType, Inventory
from gpustackd.placement.selectors.pool.rules import PoolRequest, belongs


@dataclass(frozen=True, slots=True)
class Report:
    """The inventory of one cluster (`nodes` None = it reports nothing), for one demand on one pool."""

    ask: PoolRequest
    pool: InstanceType | None
    nodes: Inventory | None

    def groups(self, node: str) -> tuple[DeviceGroup, ...] | None:
        """Cards of the pool on a node; None where nothing at all is reported."""
        if self.nodes is None or self.pool is None:
            return None
        pool = self.pool
        return tuple(g for g in self.nodes.get(node, ()) if belongs(g.manufacturer, g.product, pool))

    def open(self, fleet: Fleet, rows: Ints) -> Bools:
        """(R, S) cards that the report does not speak against."""
        said: Bools = np.ones((len(rows), fleet.slots), np.bool_)
        if self.nodes is None or self.pool is None:
            return said
        for r, w in enumerate(rows.tolist()):
            groups = self.groups(fleet.row(w).name) or ()
            fit = [
                a
                for g in groups
                if self.ask.allowed(g)
                for a in g.accelerators
                if self.ask.free(a, self.pool)
            ]
            if len(fit) < self.ask.cards:
                said[r] = False
                continue
            listed = {a.index for g in groups for a in g.accelerators}
            indexes = fleet.gpu_index[w]
            if any(int(i) in listed for i in indexes[fleet.gpu_id[w] != 0]):
                said[r] = np.isin(indexes, [a.index for a in fit if a.index is not None])
        return said

    def changed(self, since: Report, fleet: Fleet) -> Ints:
        """Positions of the workers of which something else is reported than before."""
        old, new = since.nodes, self.nodes
        if old is None or new is None:
            return np.arange(0 if old is new else fleet.count)
        names = [n for n in old.keys() | new.keys() if n in fleet.by_name and old.get(n) != new.get(n)]
        return np.array(sorted(fleet.by_name[n] for n in names), np.int64)
