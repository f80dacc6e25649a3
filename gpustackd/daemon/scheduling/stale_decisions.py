"""Decisions that the fleet has outrun: it changed before their commit, or the commit conflicted.

The database would reject a stale placement; to find it in memory first is cheaper, and leaves the locks and
the writes to those that still have a chance. What conflicts again and again is avoided for a while.
"""

from __future__ import annotations

from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Part, Placement
from gpustackd.domain.placement_hints import AvoidedPlace
from gpustackd.ports import CommitResult


def still_fits(fleet: Fleet, placement: Placement) -> bool:
    """Whether a placement that is assumed on the fleet still fits there, with everything else that is booked
    or assumed by now. A commit may know better: this looks at room alone, and only as far as is known."""
    return placement.over_commit or all(_holds(fleet, part) for part in placement.parts)


def _holds(fleet: Fleet, part: Part) -> bool:
    w = fleet.position.get(part.worker_id)
    if w is None or not fleet.ready[w] or fleet.unified[w] != part.unified:
        return False
    if part.ram or part.unified:
        left = fleet.ram_capacity[w] - fleet.ram_allocated[w] - fleet.occupancy.ram_assumed[w]
        if left < 0 or fleet.worker_over[w]:
            return False
    for gpu_id in part.gpu_ids:
        place = fleet.slot.get(gpu_id)
        if place is None or not fleet.gpu_open[place] or fleet.gpu_over[place]:
            return False
        if fleet.vram_capacity[place] - fleet.vram_allocated[place] - fleet.occupancy.vram_assumed[place] < 0:
            return False
    return True


def conflicting_places(placement: Placement, conflict: CommitResult) -> tuple[AvoidedPlace, ...]:
    """What of a placement conflicted, as places to avoid; all of it where the commit does not say.

    A strategy that ranks places strictly would choose the same one again; where an open transaction holds it,
    of which no figure tells, it would do so for as long as that stays open.
    """
    named = bool(conflict.gpu_ids or conflict.worker_ids)
    places: list[AvoidedPlace] = []
    for part in placement.parts:
        gpus = tuple(g for g in part.gpu_ids if not named or g in conflict.gpu_ids)
        if gpus or not named or part.worker_id in conflict.worker_ids:
            places.append(AvoidedPlace(part.worker_id, gpus))
    return tuple(places)
