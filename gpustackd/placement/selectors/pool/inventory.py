"""What a cluster reports of its nodes' cards, held against what is asked of a pool.

Without a report nothing is held against a node: the ledger alone decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import Reason
from gpustackd.domain.pools import DeviceGroup, GpuPool, Inventory, Pools
from gpustackd.placement.diagnostics.wording import some
from gpustackd.placement.rules.pool import belongs
from gpustackd.placement.rules.resource_rules import PoolRequest

SHOWN = 5


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The inventory of one cluster (`nodes` None = it reports nothing), for one demand on one pool."""

    ask: PoolRequest
    pool: GpuPool | None
    nodes: Inventory | None

    def groups(self, node: str) -> tuple[DeviceGroup, ...] | None:
        """Cards of the pool on a node; None where nothing at all is reported."""
        if self.nodes is None or self.pool is None:
            return None
        pool = self.pool
        return tuple(g for g in self.nodes.get(node, ()) if belongs(g.manufacturer, g.product, pool))

    def open(self, fleet: Fleet, rows: Ints) -> Bools:
        """(R, S) cards that the report does not speak against."""
        allowed: Bools = np.ones((len(rows), fleet.slots), np.bool_)
        if self.nodes is None or self.pool is None:
            return allowed
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
                allowed[r] = False
                continue
            listed = {a.index for g in groups for a in g.accelerators}
            indexes = fleet.gpu_index[w]
            if any(int(i) in listed for i in indexes[fleet.gpu_id[w] != 0]):
                allowed[r] = np.isin(indexes, [a.index for a in fit if a.index is not None])
        return allowed

    def changed(self, since: NodeReport, fleet: Fleet) -> Ints:
        """Positions of the workers of which something else is reported than before."""
        old, new = since.nodes, self.nodes
        if old is None or new is None:
            return np.arange(0 if old is new else fleet.count)
        names = [n for n in old.keys() | new.keys() if n in fleet.by_name and old.get(n) != new.get(n)]
        return np.array(sorted(fleet.by_name[n] for n in names), np.int64)


def problem(
    ask: PoolRequest, found: GpuPool | None, size: int, pools: Pools, spec: ModelSpec
) -> Reason | None:
    """What is wrong with the pool itself, whatever the workers."""
    name = ask.type[:80]
    if found is None:
        others = pools.names_in(spec.cluster_id)
        if not others:
            text = f"unknown instance type {name!r}: the model's cluster has no instance types"
            return pool_reason("no_types", text, type=name, cluster_id=spec.cluster_id)
        text = f"the model's cluster has no instance type {name!r}; it has {some(others, SHOWN)}"
        return pool_reason("unknown_type", text, type=name, cluster_id=spec.cluster_id, known=others[:SHOWN])
    if not found.described:
        return pool_reason("no_detail", f"the details of instance type {name!r} are not known yet", type=name)
    label = found.label[:80]
    if not found.manufacturer or not found.product:
        text = f"instance type {name!r} is not an accelerator: it names no manufacturer and product"
        return pool_reason("no_accelerator", text, type=name, label=label)
    if not found.memory and not ask.profile:
        text = f"the card memory of {label} is not known yet"
        return pool_reason("no_memory", text, type=name, label=label)
    if ask.profile and not size:
        offered = sorted(n for n, memory in found.profiles.items() if memory)
        text = f"{label} offers no partition {ask.profile[:60]!r}"
        text += f"; it offers {some(offered, SHOWN)}" if offered else "; it offers none"
        return pool_reason("unknown_profile", text, type=name, label=label, profile=ask.profile[:60],
                     offered=offered[:SHOWN])  # fmt: skip
    return None


def pool_reason(code: str, text: str, **params: Any) -> Reason:
    """A reason about a pool of cards."""
    return Reason(f"pool.{code}", "pool", text, params)
