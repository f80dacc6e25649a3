"""Keeps READY workers."""

from __future__ import annotations

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.placement.diagnostics.wording import some, workers

SHOWN = 3


class StatusFilter:
    """`workers.state` is READY. Its reasons go by state and name the workers."""

    name = "status"
    cure = Cure.WORKER

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        kept: Bools = fleet.ready[rows]
        return kept

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        found: list[tuple[int, str, Reason]] = []
        codes = fleet.state[dropped]
        for code in np.unique(codes):
            rows = dropped[codes == code]
            count = len(rows)
            state = fleet.states[int(code)]
            names = [fleet.row(int(w)).name for w in rows[:SHOWN]]
            text = f"{workers(count)} {'is' if count == 1 else 'are'} {state} ({some(names, SHOWN, count)})"
            params = {"dropped": count, "left": left, "of": of, "state": state, "workers": names}
            found.append((-count, state, Reason("status.not_ready", self.name, text, params)))
        return [r for _, _, r in sorted(found, key=lambda x: x[:2])]
