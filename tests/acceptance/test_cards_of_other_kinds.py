"""NPUs, parts of cards, whole cards, unified memory and workers with two types of GPU, on real rows.

One daemon serves all tests of this file; each has a cluster of its own.
"""

from __future__ import annotations

import pytest

from tests.acceptance.daemons import within
from tests.acceptance.machines import GIB
from tests.acceptance.shop import (
    CARD_80,
    DEEPSEEK,
    HALF_GIB,
    NPU_64,
    Booked,
    Card,
    Shop,
    llm,
)

pytestmark = pytest.mark.anyio

A100 = {
    "memory": "81920Mi",
    "manufacturer": "nvidia",
    "product": "A100",
    "sliced_detail": {"physical": {"profiles": [{"name": "3g.40gb", "count": 2, "memory_mib": 40_960}]}},
}


def npus(number: int, *, at: int) -> list[Card]:
    return [
        Card(NPU_64, "cann", "ascend", "910B3", network={"status": "up", "inet": f"10.0.{at}.{n}/24"})
        for n in range(number)
    ]


async def test_mindie_takes_one_npu_and_the_ram_of_its_own_formula(shop: Shop) -> None:
    await shop.worker("w", *npus(4, at=1))
    flags = ["--cpu-mem-size=4", "--max-preempt-count", "1"]
    row = await shop.placed(await shop.model(llm(), backend="MindIE", backend_parameters=flags))
    (at,) = row["gpu_indexes"]
    await shop.holds(row, {"w": Booked("main", {f"cann:{at}": 54_975_581_388}, int(4.5 * GIB))})
    assert row["gpu_addresses"] == [f"10.0.1.{at}"]
    await shop.gives_all_back(row["id"])


async def test_mindie_over_two_workers_writes_the_addresses_of_the_npus_it_takes(shop: Shop) -> None:
    for n, name in enumerate(("a", "b", "c")):
        await shop.worker(name, *npus(8, at=n))
    row = await shop.placed(await shop.model(llm(642 * GIB, DEEPSEEK), backend="MindIE"))
    (sub,) = row["distributed_servers"]["subordinate_workers"]
    share = {f"cann:{n}": 54_975_581_388 for n in range(8)}
    names = {row["worker_name"]: "main", sub["worker_name"]: "subordinate"}
    await shop.holds(row, {n.rpartition("-")[0]: Booked(p, share, HALF_GIB) for n, p in names.items()})
    for part in (row, sub):
        at = "abc".index(part["worker_name"][0])
        assert part["gpu_addresses"] == [f"10.0.{at}.{n}" for n in part["gpu_indexes"]]
    await shop.gives_all_back(row["id"])


# -- custom backends ------------------------------------------------------------------------------------


async def test_a_slice_a_partition_and_whole_cards_are_booked_on_cards_that_are_picked(shop: Shop) -> None:
    await shop.worker("w", *[Card(CARD_80)] * 4)
    await shop.site.insert("instance_types", cluster_id=shop.cluster, name="pool", detail=A100)
    half = {"type": "pool", "accelerator_sliced_memory_percentage": 50}
    profile = {"type": "pool", "accelerator_partitioned_profile": "3g.40gb"}
    weights = int(28 * GIB / 1.2)  # a claim of 30 GiB
    rows = []
    for selector in (half, profile):
        row = await shop.placed(await shop.model(llm(weights), gpu_type_selector=selector))
        (at,) = row["gpu_indexes"]
        await shop.holds(row, {"w": Booked("main", {f"cuda:{at}": 42_949_672_960})})
        rows.append(row)
    whole = await shop.model(
        llm(100 * GIB), gpu_type_selector={"type": "pool"}, backend_parameters=["--tensor-parallel-size=2"]
    )
    row = await shop.placed(whole)
    shared = {i for r in rows for i in r["gpu_indexes"]}
    assert len(row["gpu_indexes"]) == 2
    assert not shared & set(row["gpu_indexes"]), "a whole card is one that nobody sits on"
    # all that can be booked of a card: the worker's reserve stays out
    expected = {f"cuda:{n}": CARD_80 - GIB for n in row["gpu_indexes"]}
    await shop.holds(row, {"w": Booked("main", expected)})
    refused = await shop.refused(whole)
    assert "in use" in refused["state_message"]
    await shop.site.delete("model_instances", *[r["id"] for r in rows])
    await shop.site.placed([refused["id"]], timeout=within(1))
    await shop.gives_all_back(row["id"], refused["id"])


# -- other machines -------------------------------------------------------------------------------------


async def test_on_unified_memory_cards_and_ram_come_from_one_pool(shop: Shop) -> None:
    # 64 GiB in all, 2 + 1 reserved: the cards of two fit, the 16 GiB of RAM of the second do not any more
    worker = await shop.worker("w", Card(60 * GIB), ram=64, unified_memory=True)
    share = int(60 * GIB * 0.3)
    flags = ["--gpu-memory-utilization=0.3"]
    extended = {"enabled": True, "ram_size": 16}
    model = await shop.model(llm(8 * GIB), backend_parameters=flags, extended_kv_cache=extended)
    row = await shop.placed(model)
    await shop.holds(row, {"w": Booked("main", {"cuda:0": share}, 16 * GIB)})
    assert row["computed_resource_claim"]["is_unified_memory"] is True
    assert (await shop.site.row("workers", worker))["ram_allocated"] == share + 16 * GIB
    waiting = await shop.refused(model)
    assert "27.00 of the 34.00 GiB needed for GPU and RAM together" in waiting["state_message"]
    plain = await shop.model(llm(8 * GIB), backend_parameters=flags)
    second = await shop.placed(plain)
    await shop.holds(second, {"w": Booked("main", {"cuda:0": share})})
    await shop.site.delete("models", model)
    await shop.gives_all_back(second["id"])


async def test_a_worker_with_two_types_of_gpu_keeps_both_and_books_the_right_one(shop: Shop) -> None:
    amd = [Card(64 * GIB, "rocm", "amd", "MI", index=n) for n in range(2)]
    nvidia = [Card(24 * GIB, index=n) for n in range(2)]
    await shop.worker("w", nvidia[0], amd[0], nvidia[1], amd[1])
    large = await shop.placed(await shop.model(llm(int(48 * GIB / 1.2))))
    assert large["gpu_type"] == "rocm"
    (at,) = large["gpu_indexes"]
    await shop.holds(large, {"w": Booked("main", {f"rocm:{at}": int(64 * GIB * 0.9)})})
    # two cards of one type, never one of each: 40 GiB needs both of 24 GiB where one of 64 GiB is taken twice
    second = await shop.placed(await shop.model(llm(int(48 * GIB / 1.2))))
    assert second["gpu_type"] == "rocm"
    assert second["gpu_indexes"] == [1 - at]
    both = await shop.placed(await shop.model(llm(int(38 * GIB / 1.2))))
    share = {f"cuda:{n}": int(24 * GIB * 0.9) for n in range(2)}
    await shop.holds(both, {"w": Booked("main", share)})
    assert (both["gpu_type"], both["gpu_indexes"]) == ("cuda", [0, 1])
    await shop.gives_all_back(large["id"], second["id"], both["id"])
