"""Keeps workers that have the model's local path, as far as anyone knows.

A worker with a READY file of the model has it. One that was asked and has no such path is dropped; so is one
that did not answer, unless the path is on this host too and may be on a file system that they share. A worker
that cannot be asked is never dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from gpustackd.domain.fleet.columns import Bools, Ints
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import ModelSpec, Source
from gpustackd.domain.outcome import Cure, Reason
from gpustackd.domain.paths import PathKnowledge, Presence
from gpustackd.placement.diagnostics.wording import some, workers

if TYPE_CHECKING:
    from gpustackd.placement.policy import Policy

SHOWN = 3
NOTHING = PathKnowledge()


def local_path_filter(spec: ModelSpec) -> LocalPathFilter | None:
    """The filter for a model's path; None where it has none."""
    if spec.source is not Source.LOCAL_PATH or not spec.local_path:
        return None
    return LocalPathFilter(spec.local_path, spec.source_index)


class LocalPathFilter:
    """Facts come with the policy: `renew` before `keep`."""

    name = "local_path"

    def __init__(self, path: str, source_index: str) -> None:
        self.path = path
        self.source_index = source_index
        self.out: Mapping[int, Presence] = {}
        """Ids of workers to drop."""
        self._seen: tuple[object, object] = (None, None)

    @property
    def cure(self) -> Cure:
        silent = Presence.SILENT in self.out.values()
        return Cure.FILES | Cure.WORKER | Cure.MODEL | (Cure.TIME if silent else Cure.NONE)

    def renew(self, policy: Policy) -> bool:
        """Take over what is known now; returns whether other workers are dropped than before."""
        known = policy.paths.get(self.path, NOTHING)
        if self._seen[0] is known and self._seen[1] is policy.ready_files:
            return False
        self._seen = known, policy.ready_files
        files = policy.ready_files
        having = files.get(self.source_index, {}).keys() | files.get(f"path:{self.path}", {}).keys()
        gone = {Presence.MISSING} if known.shared else {Presence.MISSING, Presence.SILENT}
        out = {w: p for w, p in known.workers.items() if p in gone and w not in having}
        changed = out != self.out
        self.out = out
        return changed

    def keep(self, fleet: Fleet, rows: Ints) -> Bools:
        if not self.out:
            return np.ones(len(rows), np.bool_)
        kept: Bools = ~np.isin(fleet.worker_id[rows], np.fromiter(self.out, np.int64, len(self.out)))
        return kept

    def reasons(self, fleet: Fleet, dropped: Ints, left: int, of: int) -> list[Reason]:
        found: list[Reason] = []
        for presence, code, words in (
            (Presence.MISSING, "missing", ("does not have", "do not have")),
            (Presence.SILENT, "unreachable", ("did not answer when asked for",) * 2),
        ):
            names = sorted(
                fleet.row(w).name
                for w in dropped.tolist()
                if self.out.get(int(fleet.worker_id[w])) is presence
            )
            if names:
                count = len(names)
                path = self.path if len(self.path) <= 200 else "..." + self.path[-197:]
                text = f"{workers(count)} ({some(names, SHOWN)}) {words[count > 1]} the path {path}"
                params = {"dropped": count, "left": left, "of": of, "path": path, "workers": names[:SHOWN],
                          "more": max(count - SHOWN, 0)}  # fmt: skip
                found.append(Reason(f"local_path.{code}", self.name, text, params))
        return found
