"""What decisions look up beside the fleet: backends, pools of cards, model files, others' memory.

Each is read whole: there are few rows, and they change seldom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.domain.backends import Backends, backend_row
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.origin import DOWNLOADING
from gpustackd.domain.pools import Pools, gpu_pool

Rows = Iterable[Mapping[str, Any]]

BACKENDS = "SELECT name, owner, versions FROM inference_backends ORDER BY id"
POOLS = "SELECT id, name, cluster_id, detail FROM instance_types ORDER BY id"
INVENTORIES = "SELECT id, devices FROM clusters WHERE devices IS NOT NULL"
FILES = (
    "SELECT worker_id, source_index, resolved_path, size, state FROM model_files"
    " WHERE state IN ('READY', 'DOWNLOADING')"
)

HOLDING = (InstanceState.STARTING, InstanceState.RUNNING, InstanceState.UNREACHABLE)
"""States in which an instance's process may hold the memory that is booked for it."""

# Of the memory in use on a card, what exceeds the bookings of our instances there is foreign. The worker's
# reserve is meant for foreign memory, so only what exceeds the reserve too counts. An instance that is SCHEDULED
# or DOWNLOADING has booked memory that it does not use yet; its booking must not hide others' use. On unified
# memory a sample contains RAM too, so booked RAM counts as ours.
FOREIGN_MEMORY = f"""
WITH own AS (
    SELECT c.worker_id, c.gpu_device_id, sum(c.vram)::bigint AS vram, sum(c.ram)::bigint AS ram
      FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id
     WHERE i.state IN ({", ".join(f"'{s.value}'" for s in HOLDING)}) GROUP BY 1, 2),
host AS (SELECT worker_id, sum(ram)::bigint AS ram FROM own GROUP BY 1)
SELECT id, beyond FROM (
    SELECT g.id, greatest(g.vram_used - coalesce(o.vram, 0)
                          - CASE WHEN g.unified THEN coalesce(h.ram, 0) ELSE 0 END, 0)
                 - g.worker_reserve AS beyond
      FROM gpu_devices g
      LEFT JOIN own o ON o.gpu_device_id = g.id
      LEFT JOIN host h ON h.worker_id = g.worker_id
     WHERE g.vram_used > g.worker_reserve
       AND g.vram_used_at > clock_timestamp() - make_interval(secs => $1)) f
 WHERE beyond > 0"""
"""(GPU id, bytes beyond the reserve) of samples no older than $1 seconds by the database's clock."""


def read_backends(rows: Rows) -> Backends:
    """From rows of `inference_backends`; a version that cannot be read supports nothing."""
    return Backends.of(backend_row(r["name"], r["owner"], r["versions"]) for r in rows)


def read_pools(pools: Rows, clusters: Rows) -> Pools:
    """From rows of `instance_types` and `clusters`; a row that cannot be read matters only where it is asked
    for."""
    return Pools.of(
        [gpu_pool(p["name"], p["cluster_id"], p["detail"]) for p in pools],
        {c["id"]: c["devices"] for c in clusters if c["devices"] is not None},
    )


def read_files(rows: Rows) -> Mapping[str, Mapping[int, int]]:
    """From rows of `model_files`: key -> {worker id: bytes, 0 = unknown}.

    Keys of READY files are `<source_index>` and `path:<resolved_path>`; of files on their way
    `downloading:<source_index>`.
    """
    files: dict[str, dict[int, int]] = {}
    for row in rows:
        size, worker_id, index = row.get("size") or 0, row["worker_id"], row["source_index"]
        if row.get("state") == "READY":
            files.setdefault(index, {})[worker_id] = size
            if path := row.get("resolved_path"):
                files.setdefault(f"path:{path}", {})[worker_id] = size
        elif row.get("state") == "DOWNLOADING":
            files.setdefault(DOWNLOADING + index, {})[worker_id] = size
    return files
