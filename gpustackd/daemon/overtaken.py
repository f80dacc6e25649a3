"""Placements that news of the fleet has overtaken between their decision and their commit.

A commit would reject them; to find them in memory first is cheaper, and leaves the locks and the writes to
those that still have a chance.
"""

from __future__ import annotations

from gpustackd.domain.fleet import Fleet
from gpustackd.domain.outcome import Part, Placement


def still_fits(fleet: Fleet, placement: Placement) -> bool:
    """Whether a placement that is assumed on the fleet still fits there, with everything else that is booked
    or assumed by now. A commit may know better: this looks at room alone, and only as far as is known."""
    return placement.over_commit or all(_holds(fleet, part) for part in placement.parts)


def _holds(fleet: Fleet, part: Part) -> bool:
    w = fleet.position.get(part.worker_id)
    if w is None or not fleet.ready[w] or fleet.unified[w] != part.unified:
        return False
    if part.ram or part.unified:
        left = fleet.ram_capacity[w] - fleet.ram_allocated[w] - fleet.ram_assumed[w]
        if left < 0 or fleet.worker_over[w]:
            return False
    for gpu_id in part.gpu_ids:
        place = fleet.slot.get(gpu_id)
        if place is None or not fleet.gpu_open[place] or fleet.gpu_over[place]:
            return False
        if fleet.vram_capacity[place] - fleet.vram_allocated[place] - fleet.vram_assumed[place] < 0:
            return False
    return True
