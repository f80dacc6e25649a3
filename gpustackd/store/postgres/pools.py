"""Instance types and the inventories of clusters, read whole: they are few and change seldom."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpustackd.domain.pools import Pools, instance_type

TYPES = "SELECT id, name, cluster_id, detail FROM instance_types ORDER BY id"
DEVICES = "SELECT id, devices FROM clusters WHERE devices IS NOT NULL"


def pools_of(types: Iterable[Mapping[str, Any]], clusters: Iterable[Mapping[str, Any]]) -> Pools:
    """From rows of both tables; a row that cannot be read says so only where it is asked for."""
    return Pools.of(
        [instance_type(t["name"], t["cluster_id"], t["detail"]) for t in types],
        {c["id"]: c["devices"] for c in clusters if c["devices"] is not None},
    )
