"""Keeps the workers that hand-picked GPUs name; the restriction holds from the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import GpuId
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.diagnostics.wording import have, workers


class PickedFilter:
    """The worker's name occurs in `gpu_selector.gpu_ids`."""

    name = "gpu_selector"
    cure = Cure.WORKER | Cure.MODEL

    def __init__(self, gpu_ids: Sequence[GpuId]) -> None:
        self.names = frozenset(g.worker for g in gpu_ids)

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        named = [fleet.by_name[n] for n in self.names if n in fleet.by_name]
        return np.isin(rows, np.array(named, np.int64))

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        text = f"{workers(len(dropped))} {have(len(dropped))} none of the selected GPUs"
        params = {"dropped": len(dropped), "left": left, "of": of}
        return [Reason("gpu_selector.not_selected", self.name, text, params)]
