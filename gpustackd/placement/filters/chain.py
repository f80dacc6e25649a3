"""The chain of filters of one demand, in the order of the filters spec (section 1).

Every filter looks at every worker: the first one that fails is where a worker is dropped, and the
others are known as well, so that a refusal can say what else stands in the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet import Bools, Fleet, Ints
from gpustackd.domain.outcome import Cure, PoolStep, Reason
from gpustackd.placement.filters.cluster import ClusterFilter
from gpustackd.placement.filters.framework import FrameworkFilter, framework_filter
from gpustackd.placement.filters.labels import LabelFilter
from gpustackd.placement.filters.local_path import local_path_filter
from gpustackd.placement.filters.picked import PickedFilter
from gpustackd.placement.filters.status import StatusFilter
from gpustackd.placement.policy import Policy

Bits = NDArray[np.uint16]
GONE = 1 << 15


class Filter(Protocol):
    """One cause to drop a worker."""

    @property
    def name(self) -> str:
        """Name of the stage in answers."""

    @property
    def cure(self) -> Cure:
        """What could bring a dropped worker back."""

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        """Which of these worker positions stay."""

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        """Why these workers were dropped, when `left` of `of` stayed."""


def chain(demand: Demand, policy: Policy) -> tuple[Filter, ...]:
    """The filters that this demand calls for. Raises BadRow where its selectors cannot be read."""
    found: list[Filter] = []
    spec = demand.spec
    if spec.cluster_id is not None:
        found.append(ClusterFilter(spec.cluster_id))
    if spec.gpu_ids:
        found.append(PickedFilter(spec.gpu_ids))
    if spec.worker_selector:
        found.append(LabelFilter.of(spec.worker_selector))
    found.append(StatusFilter())
    framework = framework_filter(demand, policy.backends, policy.catalogue, compat=policy.compat)
    if framework is not None:
        found.append(framework)
    local_path = local_path_filter(spec, compat=policy.compat)
    if local_path is not None:
        found.append(local_path)
    return tuple(found)


def failures(filters: Sequence[Filter], fleet: Fleet, rows: Ints) -> Bits:
    """Per worker position a bit for each filter that drops it (`GONE` = no worker there); 0 = stays."""
    bits: Bits = (~fleet.alive[rows]).astype(np.uint16) * np.uint16(GONE)
    for n, f in enumerate(filters):
        bits |= (~f.keep(fleet, rows)).astype(np.uint16) << np.uint16(n)
    return bits


def pool(filters: Sequence[Filter], bits: Bits, alive: Bools) -> tuple[PoolStep, ...]:
    """How many workers are left after each filter."""
    here = bits[alive]
    total = len(here)
    steps: list[PoolStep] = []
    for n, f in enumerate(filters):
        kept = int(np.count_nonzero((here & ((2 << n) - 1)) == 0))
        steps.append(PoolStep(f.name, kept, total))
    return tuple(steps)


def refusals(filters: Sequence[Filter], fleet: Fleet, bits: Bits, alive: Bools) -> tuple[list[Reason], Cure]:
    """Reasons of the filters that dropped workers, and what could bring those workers back.

    A worker counts at the first filter that drops it. Where nothing is left, a filter that only drops
    workers which are gone already is named too, with what it would have dropped of the whole fleet.
    """
    reasons: list[Reason] = []
    cures = Cure.NONE
    rows = np.flatnonzero(alive)
    here = bits[rows]
    left = len(rows)
    empty = not np.any(here == 0)
    for n, f in enumerate(filters):
        before = (here & ((1 << n) - 1)) == 0
        dropped = before & ((here >> n) & 1 == 1)
        count = int(np.count_nonzero(dropped))
        if count:
            reasons.extend(f.reasons(fleet, rows[dropped], left - count, left))
            if isinstance(f, FrameworkFilter):
                reasons.extend(f.remarks(fleet, rows[before & ~dropped]))
            cures |= f.cure
            left -= count
        elif empty and left == 0:
            also = (here >> n) & 1 == 1
            others = int(np.count_nonzero(also))
            if others:
                reasons.extend(_also(r) for r in f.reasons(fleet, rows[also], len(rows) - others, len(rows)))
                cures |= f.cure
    return reasons, cures


def _also(reason: Reason) -> Reason:
    return Reason(reason.code, reason.filter, f"would also fail: {reason.text}", reason.params, "also")
