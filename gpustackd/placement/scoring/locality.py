"""Points for workers that hold the model's files already, and as the finer measure
the bytes that a placement would still have to download.

`model_files` rows count by source and, for paths, by the path that they were resolved to. A file that is
being downloaded counts as half there: how far it is nobody tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.model_spec import Source
from gpustackd.domain.origin import DOWNLOADING, adapter_origins, draft_origin
from gpustackd.placement.policy import Files, Policy

DRAFT_WEIGHT = 0.5
NOBODY: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True)
class Warm:
    """Workers (ids) with the main model's files ready, and with the draft model's."""

    main: Mapping[int, int] = field(default_factory=dict)
    draft: Mapping[int, int] = field(default_factory=dict)

    def share(self, worker_ids: Iterable[int]) -> float:
        """0..1 for a placement on these workers."""
        ids = set(worker_ids)
        if not ids or not (self.main or self.draft):
            return 0.0
        main = len(ids & self.main.keys()) / len(ids)
        if not self.draft:
            return main
        draft = len(ids & self.draft.keys()) / len(ids)
        return (main + DRAFT_WEIGHT * draft) / (1 + DRAFT_WEIGHT)


@dataclass(frozen=True, slots=True)
class Wanted:
    """One thing that a worker must have: its bytes, and what of it workers (ids) have."""

    size: int
    there: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known of one demand's files at one time."""

    warm: Warm = field(default_factory=Warm)
    wanted: tuple[Wanted, ...] = ()
    """Model, draft model and adapters of which some worker has something."""

    def to_download(self, worker_ids: Iterable[int]) -> int:
        """Bytes that these workers lack together, of what some worker has."""
        return sum(max(w.size - w.there.get(i, 0), 0) for i in worker_ids for w in self.wanted)


NOTHING = Known()


def known(demand: Demand, policy: Policy) -> Known:
    """What workers have of this demand's files; nothing where locality is switched off."""
    files = policy.ready_files
    if policy.locality_max <= 0 or not files:
        return NOTHING
    spec, facts = demand.spec, demand.facts
    path = spec.local_path if spec.source is Source.LOCAL_PATH else None
    draft = draft_origin(spec)
    main_ready = _ready(files, spec.source_index, path)
    draft_ready = _ready(files, draft.index, draft.path) if draft else NOBODY
    things = [(spec.source_index, path, facts.weight_bytes or 0)]
    if draft is not None:
        things.append((draft.index, draft.path, facts.draft_bytes))
    adapters = adapter_origins(spec)
    things.extend((a.index, a.path, facts.lora_bytes // len(adapters)) for a in adapters)
    wanted = tuple(w for t in things if (w := _wanted(files, *t)) is not None)
    return Known(Warm(main_ready, draft_ready), wanted)


def _ready(files: Files, index: str, path: str | None) -> Mapping[int, int]:
    by_index = files.get(index) or NOBODY
    by_path = (files.get(f"path:{path}") or NOBODY) if path else NOBODY
    return {**by_path, **by_index} if by_path else by_index


def _wanted(files: Files, index: str, path: str | None, size: int) -> Wanted | None:
    ready = _ready(files, index, path)
    coming = files.get(DOWNLOADING + index) or NOBODY
    if not ready and not coming:
        return None
    size = max(size, *ready.values(), *coming.values(), 1)
    return Wanted(size, dict.fromkeys(coming, size // 2) | dict.fromkeys(ready, size))


def shares(fleet: Fleet, files: Warm, size: int) -> NDArray[np.float64]:
    """Share per worker position, for placements on one worker."""
    found = np.zeros(size)
    for worker_id in {*files.main, *files.draft}:
        w = fleet.position.get(worker_id)
        if w is not None and w < size:
            found[w] = files.share((worker_id,))
    return found


def missing(fleet: Fleet, files: Known, size: int) -> NDArray[np.int64]:
    """Bytes still to download per worker position, for placements on one worker."""
    found = np.full(size, sum(w.size for w in files.wanted), np.int64)
    for worker_id in {i for w in files.wanted for i in w.there}:
        w = fleet.position.get(worker_id)
        if w is not None and w < size:
            found[w] = files.to_download((worker_id,))
    return found
