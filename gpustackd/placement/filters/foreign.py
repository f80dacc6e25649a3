"""Memory that processes of others hold on cards: what a refusal says of it.

The memory itself is taken off what is free on each card (`Fleet.foreign`); no worker is dropped for it.
"""

from __future__ import annotations

import numpy as np

from gpustackd.domain.fleet.columns import Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Reason
from gpustackd.placement.diagnostics.wording import gib, plural, some, workers


def held_by_others(fleet: Fleet, rows: Ints) -> Reason | None:
    """What others hold on cards of these worker positions beyond the workers' reserves; None = nothing."""
    fleet.renew()
    held = np.where(fleet.usable[rows], fleet.foreign[rows], 0)
    count = int(np.count_nonzero(held))
    if not count:
        return None
    r, s = np.unravel_index(int(np.argmax(held)), held.shape)
    w = int(rows[r])
    most, total = int(held[r, s]), int(held.sum())
    name, kind = fleet.row(w).name, fleet.types[int(fleet.gpu_type[w, s])]
    gpu = f"{some([name])}:{kind}:{int(fleet.gpu_index[w, s])}"
    hosts = int(np.count_nonzero(held.any(axis=1)))
    text = (
        f"processes outside the scheduler use {gib(total)} on {plural(count, 'GPU')} of {workers(hosts)}, "
        f"most on {gpu} ({gib(most)})"
    )
    params = {"gpus": count, "workers": hosts, "held_bytes": total, "gpu": gpu, "most_bytes": most}
    return Reason("fit.foreign_memory", "fit", text, params)
