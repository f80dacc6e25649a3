"""Files that workers have or are getting, as decisions look them up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.domain.origin import DOWNLOADING


def known_files(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Mapping[int, int]]:
    """Rows of `model_files` by source_index, and by `path:<resolved_path>`, where READY; by
    `downloading:<source_index>` where on their way: key -> {worker id: bytes, 0 = not told}."""
    found: dict[str, dict[int, int]] = {}
    for row in rows:
        size, worker_id, index = row.get("size") or 0, row["worker_id"], row["source_index"]
        if row.get("state") == "READY":
            found.setdefault(index, {})[worker_id] = size
            if path := row.get("resolved_path"):
                found.setdefault(f"path:{path}", {})[worker_id] = size
        elif row.get("state") == "DOWNLOADING":
            found.setdefault(DOWNLOADING + index, {})[worker_id] = size
    return found
