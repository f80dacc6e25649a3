"""Points for workers that hold the model's files already (scorers spec section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpustackd.domain.demand import Demand
from gpustackd.domain.fleet import Fleet
from gpustackd.domain.model_spec import Source
from gpustackd.placement.policy import Files, Policy

DRAFT_WEIGHT = 0.5


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


def warm(demand: Demand, policy: Policy) -> Warm:
    """Who holds this demand's files."""
    files = policy.ready_files
    if policy.locality_max <= 0 or not files:
        return Warm()
    spec = demand.spec
    main = _ready(files, spec.source_index, spec.local_path if spec.source is Source.LOCAL_PATH else None)
    draft = spec.speculative_config.get("draft_model") if spec.speculative_config else None
    return Warm(main, _draft(files, draft, spec.source) if isinstance(draft, str) and draft else {})


def _ready(files: Files, index: str, path: str | None) -> Mapping[int, int]:
    by_index = files.get(index) or {}
    by_path = (files.get(f"path:{path}") or {}) if path else {}
    return {**by_path, **by_index} if by_path else by_index


def _draft(files: Files, draft: str, source: Source | None) -> Mapping[int, int]:
    from hashlib import sha256

    local = draft.startswith("/")
    prefix = "model_scope/" if source is Source.MODEL_SCOPE and not local else ""
    return _ready(files, sha256(f"{prefix}{draft}".encode()).hexdigest(), draft if local else None)


def shares(fleet: Fleet, files: Warm, size: int) -> NDArray[np.float64]:
    """Share per worker position, for placements on one worker."""
    found = np.zeros(size)
    for worker_id in {*files.main, *files.draft}:
        w = fleet.position.get(worker_id)
        if w is not None and w < size:
            found[w] = files.share((worker_id,))
    return found
