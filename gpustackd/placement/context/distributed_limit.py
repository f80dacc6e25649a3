"""A worker takes part in at most one distributed instance of the same engine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet


def busy(fleet: Fleet, positions: Iterable[int], engine: Engine) -> list[int]:
    """Those of the positions where a distributed instance of this engine (or an unknown one) has a part."""
    return [w for w in dict.fromkeys(positions) if fleet.occupancy.spanning[w] and _same(fleet, w, engine)]


def mask(fleet: Fleet, rows: Ints, engine: Engine) -> Bools:
    """(R,) True where a worker may take part in another one."""
    allowed: Bools = fleet.occupancy.spanning[rows] == 0
    for r in np.flatnonzero(~allowed).tolist():
        allowed[r] = not _same(fleet, int(rows[r]), engine)
    return allowed


def occupant(fleet: Fleet, w: int, engine: Engine) -> int | None:
    """Id of a distributed instance of this engine with a part on the worker."""
    worker_id = int(fleet.worker_id[w])
    for instance_id in fleet.occupancy.instances_on_worker.get(worker_id, ()):
        if len(fleet.occupancy.workers_of(instance_id)) > 1:
            known = {b.backend.lower() for b in fleet.occupancy.rows_of(instance_id)}
            if not known or known & {"", engine.value}:
                return instance_id
    return None


def _same(fleet: Fleet, w: int, engine: Engine) -> bool:
    return occupant(fleet, w, engine) is not None
