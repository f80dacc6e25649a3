"""The chain of filters of one demand, in their order.

Every filter looks at every worker: the first one that fails is where a worker is dropped, and the
others are known as well, so that a refusal can say what else stands in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, PoolStep, Reason
from gpustackd.placement.diagnostics.faults import StageFaults
from gpustackd.placement.diagnostics.wording import workers
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


def chain(demand: Demand, policy: Policy, faults: StageFaults | None = None) -> tuple[Filter, ...]:
    """The filters that this demand calls for; one that cannot be made is noted in `faults` and left out.
    Raises BadRow where the demand's selectors cannot be read."""
    spec, noted = demand.spec, StageFaults() if faults is None else faults
    framework = lambda: framework_filter(  # noqa: E731
        demand, policy.backends, policy.catalogue
    )
    made: tuple[tuple[str, Callable[[], Filter | None]], ...] = (
        ("cluster", lambda: None if spec.cluster_id is None else ClusterFilter(spec.cluster_id)),
        ("gpu_selector", lambda: PickedFilter(spec.gpu_ids) if spec.gpu_ids else None),
        ("labels", lambda: LabelFilter.of(spec.worker_selector) if spec.worker_selector else None),
        ("status", StatusFilter),
        ("backend", framework),
        ("local_path", lambda: local_path_filter(spec)),
    )
    found = (noted.tried(f"filter.{name}", make, None) for name, make in made)
    return tuple(f for f in found if f is not None)


def failures(filters: Sequence[Filter], fleet: Fleet, rows: Ints, faults: StageFaults | None = None) -> Bits:
    """Per worker position a bit for each filter that drops it (`GONE` = no worker there); 0 = stays. A filter
    that fails drops nobody, and is noted in `faults`."""
    bits: Bits = (~fleet.alive[rows]).astype(np.uint16) * np.uint16(GONE)
    for n, f in enumerate(filters):
        try:
            bits |= (~f.keep(fleet, rows)).astype(np.uint16) << np.uint16(n)
        except Exception as error:
            if faults is None:
                raise
            faults.note(f"filter.{f.name}", error)
    return bits


def guarded(framework: FrameworkFilter, faults: StageFaults) -> dict[str, Any]:
    """What the fit asks of the framework filter, as fields of `Rules`: where that fails, any card will do."""
    stage = "filter.backend"
    return {
        "devices": lambda fleet, rows: faults.tried(stage, lambda: framework.devices(fleet, rows), None),
        "by_cpu": lambda fleet, rows: faults.tried(
            stage, lambda: framework.by_cpu(fleet, rows), np.ones(len(rows), np.bool_)
        ),
    }


def pool(filters: Sequence[Filter], bits: Bits, alive: Bools) -> tuple[PoolStep, ...]:
    """How many workers are left after each filter."""
    here = bits[alive]
    total = len(here)
    steps: list[PoolStep] = []
    for n, f in enumerate(filters):
        kept = int(np.count_nonzero((here & ((2 << n) - 1)) == 0))
        steps.append(PoolStep(f.name, kept, total))
    return tuple(steps)


def refusals(
    filters: Sequence[Filter], fleet: Fleet, bits: Bits, alive: Bools, faults: StageFaults | None = None
) -> tuple[list[Reason], Cure]:
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
            reasons.extend(_texts(f, fleet, rows[dropped], left - count, left, faults))
            if isinstance(f, FrameworkFilter):
                stay, noted = rows[before & ~dropped], StageFaults() if faults is None else faults
                reasons.extend(noted.tried(f"filter.{f.name}", partial(f.remarks, fleet, stay), []))
            cures |= f.cure
            left -= count
        elif empty and left == 0:
            also = (here >> n) & 1 == 1
            others = int(np.count_nonzero(also))
            if others:
                texts = _texts(f, fleet, rows[also], len(rows) - others, len(rows), faults)
                reasons.extend(_also(r) for r in texts)
                cures |= f.cure
    return reasons, cures


def _texts(
    f: Filter, fleet: Fleet, dropped: Ints, left: int, of: int, faults: StageFaults | None
) -> list[Reason]:
    """Why a filter dropped workers; their number alone where it cannot say."""
    count = len(dropped)
    params = {"dropped": count, "left": left, "of": of}
    plain = [Reason(f"{f.name}.dropped", f.name, f"{workers(count)} dropped by the {f.name} filter", params)]
    if faults is None:
        return f.reasons(fleet, dropped, left, of)
    return faults.tried(f"filter.{f.name}", lambda: f.reasons(fleet, dropped, left, of), plain)


def _also(reason: Reason) -> Reason:
    return Reason(reason.code, reason.filter, f"also: {reason.text}", reason.params, "also")
