"""Pools of cards and the inventories of clusters, as both stores give them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.scenes import Scene

pytestmark = pytest.mark.anyio

A100 = {"memory": "81920Mi", "manufacturer": "nvidia", "product": "A100-80GB-PCIe"}
NODE = {"w1": [{"id": "g", "manufacturer": "nvidia", "product": "A100", "logical_count": 8,
                "accelerators": [{"index": 0, "remaining": 500_000}]}]}  # fmt: skip


async def test_pools_are_read_with_the_inventories_of_their_clusters(scene: Scene) -> None:
    cluster = await scene.insert("clusters", name="one", devices=NODE)
    silent = await scene.insert("clusters", name="two")
    await scene.insert("instance_types", name="a100", cluster_id=cluster, detail=A100)
    await scene.insert("instance_types", name="later", cluster_id=cluster)
    pools = await scene.store.pools()
    found = pools.named("a100", cluster)
    assert found is not None
    assert (found.memory, found.label) == (80 * 1024**3, "A100-80GB-PCIe")
    assert not pools.named("later", cluster).described
    assert pools.named("a100", silent) is None
    nodes: Any = pools.nodes(cluster)
    assert nodes["w1"][0].accelerators[0].remaining == 500_000
    assert pools.nodes(silent) is None


async def test_an_edited_inventory_is_seen_the_next_time(scene: Scene) -> None:
    cluster = await scene.insert("clusters", name="one", devices=["not", "a", "map"])
    assert (await scene.store.pools()).nodes(cluster) is None
    await scene.update("clusters", cluster, devices={})
    assert (await scene.store.pools()).nodes(cluster) == {}
