"""Pools of cards and the inventories of clusters, as both stores give them."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.fleet.fleet import Fleet
from gpustackd.domain.outcome import Check, Placed
from gpustackd.estimate.demand import build_demand
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from gpustackd.ports import CommitCode, Proposal
from tests.conformance.scenes import Replica, Scene
from tests.fleets import GIB

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


async def test_a_whole_card_is_decided_on_the_stores_rows_and_committed_only_unchanged(
    scene: Scene, replica: Replica
) -> None:
    cluster = await scene.insert("clusters", name="one")
    await scene.insert("instance_types", name="a100", cluster_id=cluster, detail=A100)
    worker = await scene.insert("workers", name="w", state="READY", ram_total=GIB, cluster_id=cluster)
    cards = [
        await scene.insert(
            "gpu_devices", worker_id=worker, index=n, type="cuda", vendor="nvidia", vram_total=80 * GIB,
            name="NVIDIA A100-80GB-PCIe",
        )
        for n in range(2)
    ]  # fmt: skip
    row = {"cluster_id": cluster, "gpu_type_selector": {"type": "a100"}, "backend_parameters": ["--tp=2"]}
    model = await scene.insert("models", name="m", **row)
    first, second = [await scene.insert("model_instances", name=n, model_id=model) for n in ("m-1", "m-2")]
    outcomes = [await decided(scene, model, i) for i in (first, second)]  # neither sees the other
    results = []
    for instance, outcome in zip((first, second), outcomes, strict=True):
        (claim,) = await replica.claim(instance)
        (found,) = await scene.store.models([model])
        results += await replica.commit(Proposal(claim, found.version, outcome))
    assert [r.code for r in results] == [None, CommitCode.CONFLICT]
    held = await scene.row("model_instances", first)
    assert held is not None
    assert (held["worker_name"], held["gpu_indexes"]) == ("w", [0, 1])
    assert held["computed_resource_claim"]["vram"] == {"0": 80 * GIB, "1": 80 * GIB}
    for card in cards:
        gpu = await scene.row("gpu_devices", card)
        assert gpu is not None
        assert gpu["vram_allocated"] == 80 * GIB


async def decided(scene: Scene, model: int, instance: int) -> Placed:
    """A decision on the store's rows as they are."""
    changes = await scene.store.fleet_changes(None)
    fleet = Fleet()
    for w in changes.workers:
        fleet.put_worker(w)
    for g in changes.gpus:
        fleet.put_gpu(g)
    (record,) = await scene.store.models([model])
    assert record.spec is not None
    demand = build_demand(record.spec, ModelFacts(60 * GIB, categories=("llm",)))
    outcome = decide(fleet, demand, Subject(instance, "m"), Policy(pools=await scene.store.pools()))
    assert isinstance(outcome, Placed), outcome.message
    assert outcome.placement.check is Check.UNCHANGED
    return outcome
