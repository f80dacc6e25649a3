"""Registered backends and memory held by others, as both stores give them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tests.conformance.scenes import MemoryScene, Replica, Scene, fleet, part_on
from tests.integration.world import GIB

pytestmark = pytest.mark.anyio


async def test_backends_are_read_with_owners_and_versions(scene: Scene) -> None:
    await scene.insert("inference_backends", name="vLLM", versions={"1.0": {"custom_framework": "CUDA"}})
    await scene.insert(
        "inference_backends", name="vLLM", owner="a", versions={"2.0": {"built_in_frameworks": ["rocm", 7]}}
    )
    await scene.insert("inference_backends", name="other", versions=["not", "a", "map"])
    found = await scene.store.backends()
    platform, own = found.visible("vllm", "a")
    assert platform["1.0"].custom == "cuda"
    assert own["2.0"].built_in == {"rocm"}
    assert len(found.visible("vLLM", None)) == len(found.visible("vLLM", "b")) == 1
    assert [dict(v) for v in found.visible("other", None)] == [{}]
    assert found.visible("unheard", "a") == []


async def test_backends_with_the_same_content_are_equal(scene: Scene) -> None:
    row = await scene.insert("inference_backends", name="x", versions={"1": {"custom_framework": "cuda"}})
    first = await scene.store.backends()
    assert await scene.store.backends() == first
    await scene.update("inference_backends", row, versions={"1": {"custom_framework": "rocm"}})
    assert await scene.store.backends() != first


def now(scene: Scene) -> datetime:
    """By the clock of the store."""
    return datetime.fromtimestamp(scene.time, UTC) if isinstance(scene, MemoryScene) else datetime.now(UTC)


async def card(scene: Scene, used: float, age: float = 0, **worker: int | bool) -> tuple[int, int]:
    """A worker with one card of 80 GiB and a sample of what is in use on it: (worker id, GPU id)."""
    host, (gpu,) = await fleet(scene, 80 * GIB, **worker)
    at = now(scene) - timedelta(seconds=age)
    await scene.update("gpu_devices", gpu, vram_used=int(used * GIB), vram_used_at=at)
    return host, gpu


async def test_what_is_used_and_not_booked_is_foreign_beyond_the_reserve(scene: Scene) -> None:
    _, gpu = await card(scene, used=30, vram_reserved=2 * GIB)
    assert await scene.store.foreign_memory(100) == {gpu: 28 * GIB}
    await scene.update("gpu_devices", gpu, vram_used=GIB)
    assert await scene.store.foreign_memory(100) == {}


async def test_an_old_sample_is_not_trusted(scene: Scene) -> None:
    _, gpu = await card(scene, used=30, age=60)
    assert await scene.store.foreign_memory(120) == {gpu: 30 * GIB}
    assert await scene.store.foreign_memory(30) == {}
    await scene.update("gpu_devices", gpu, vram_used_at=None)
    assert await scene.store.foreign_memory(120) == {}


async def test_a_sample_raises_no_version(scene: Scene) -> None:
    _, gpu = await card(scene, used=30)
    before = await scene.store.fleet_sums()
    await scene.update("gpu_devices", gpu, vram_used=40 * GIB, vram_used_at=now(scene))
    assert await scene.store.fleet_sums() == before
    assert await scene.store.foreign_memory(100) == {gpu: 40 * GIB}


async def test_own_bookings_count_from_the_moment_that_their_process_starts(
    scene: Scene, replica: Replica
) -> None:
    host, gpu = await card(scene, used=71)
    model = await scene.insert("models", name="m")
    instance = await scene.insert("model_instances", name="i", model_id=model)
    await replica.place(instance, await part_on(scene.store, host, [gpu], 72 * GIB))
    seen = {"SCHEDULED": await scene.store.foreign_memory(100)}
    for state in ("DOWNLOADING", "STARTING", "RUNNING"):
        await scene.update("model_instances", instance, state=state)
        seen[state] = await scene.store.foreign_memory(100)
    held = {gpu: 71 * GIB}
    assert seen == {"SCHEDULED": held, "DOWNLOADING": held, "STARTING": {}, "RUNNING": {}}


async def test_on_unified_memory_booked_ram_is_ours_too(scene: Scene, replica: Replica) -> None:
    host, gpu = await card(scene, used=60, unified_memory=True, ram_total=80 * GIB)
    model = await scene.insert("models", name="m")
    instance = await scene.insert("model_instances", name="i", model_id=model)
    await replica.place(instance, await part_on(scene.store, host, [gpu], 20 * GIB, ram=10 * GIB))
    await scene.update("model_instances", instance, state="RUNNING")
    assert await scene.store.foreign_memory(100) == {gpu: 30 * GIB}
