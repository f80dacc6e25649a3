"""The order in which the peer walks workers and GPU types: as its rows come, for SGLang those with most GPUs
first."""

from __future__ import annotations

import numpy as np

from gpustackd.domain.demand import Engine
from gpustackd.domain.fleet.fleet import Bools, Fleet, Ints
from gpustackd.placement.fit.rules import Rules


def walk(fleet: Fleet, passing: Bools, rules: Rules) -> Ints:
    """Positions that passed all filters, in order."""
    rows: Ints = np.flatnonzero(passing)
    if rules.compat and rules.engine is Engine.SGLANG:
        gpus = np.count_nonzero(fleet.gpu_id[rows], axis=1)
        rows = rows[np.argsort(-gpus, kind="stable")]
    return rows


def types(fleet: Fleet, rows: Ints) -> list[int]:
    """Codes of the GPU types of these workers, in the order in which they are met."""
    kinds = fleet.gpu_type[rows].ravel()
    return list(dict.fromkeys(kinds[kinds >= 0].tolist()))
