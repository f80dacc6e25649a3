"""Slices and partitions of cards (vGPU spec, part B)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpustackd.domain.outcome import Check, Cure
from gpustackd.domain.pools import Pools, gpu_pool
from gpustackd.errors import BadRow
from gpustackd.placement.policy import Policy
from gpustackd.placement.rules.pool import ask_of, belongs, percentages
from gpustackd.placement.rules.resource_rules import PoolRequest
from gpustackd.placement.search_cache import SearchCache
from tests.fleets import GIB, ask, fleet, model, occupy, place, refused, seats
from tests.unit.placement.pools import A100, asking, half, node, partition, policy

FORTY = 40 * GIB


# -- the selector ----------------------------------------------------------------------------------

MEMORY, CORES = "accelerator_sliced_memory_percentage", "accelerator_sliced_cores_percentage"


@pytest.mark.parametrize(
    ("raw", "found"),
    [
        ({}, (0, 0)), ({MEMORY: 0, CORES: 0}, (0, 0)), ({MEMORY: None, CORES: None}, (0, 0)),
        ({MEMORY: 50}, (50, 100)), ({MEMORY: 50, CORES: 30}, (50, 30)),
    ],
)  # fmt: skip
def test_percentages_are_made_plain(raw, found):
    assert percentages(raw, partitioned=False) == found


@pytest.mark.parametrize(
    ("selector", "said"),
    [
        ({CORES: 50}, f"{CORES}: is 50, but {MEMORY} is not set"),
        ({MEMORY: 50, CORES: 0}, f"{CORES}: is 0 where {MEMORY} is 50"),
        ({MEMORY: 101}, "a number from 0 to 100"),
        ({MEMORY: -1}, "a number from 0 to 100"),
        ({MEMORY: "half"}, "'half'"),
        ({MEMORY: 50, "accelerator_partitioned_profile": "1g"}, "a partition and percentages exclude"),
        ({MEMORY: 50, "type": ""}, "must name an instance type"),
        ({MEMORY: 50, "type": 7}, "must name an instance type"),
        ({"accelerator_partitioned_profile": 7}, "name of a partition"),
    ],
)
def test_a_selector_that_cannot_be_is_refused_with_its_field(selector, said):
    outcome = refused(fleet("1x2xA100-80"), asking(30, selector=selector), policy=policy())
    assert said in outcome.message
    assert outcome.cures == Cure.MODEL


def test_a_pool_goes_neither_with_hand_picked_gpus_nor_with_several_gpus_of_a_slice_nor_without_a_cluster():
    with pytest.raises(BadRow, match="exclude each other"):
        ask_of(half(30, gpu_ids=["w1:cuda:0"]))
    spec = replace(half(30).spec, gpu_selector=model(gpu_ids=["w1:cuda:0"], per_replica=2).gpu_selector)
    spec = replace(spec, gpu_selector=replace(spec.gpu_selector, gpu_ids=()))
    with pytest.raises(BadRow, match="gpus_per_replica: is 2"):
        ask_of(replace(half(30), spec=spec))
    with pytest.raises(BadRow, match="set the model's cluster"):
        ask_of(half(30, cluster_id=None))


@pytest.mark.parametrize(
    ("ask", "memory", "size"),
    [
        (PoolRequest("p", memory=50), "81920Mi", 42_949_672_960),
        (PoolRequest("p", profile="3g.40gb"), "81920Mi", 42_949_672_960),
        (PoolRequest("p", memory=33), "24564Mi", 8_499_882_885),
        (PoolRequest("p"), "80Gi", 85_899_345_920),
        (PoolRequest("p", profile="unknown"), "80Gi", 0),
        (PoolRequest("p", memory=50), None, 0),
    ],
)
def test_the_size_of_a_part(ask, memory, size):
    assert ask.size(gpu_pool("p", 1, A100 | {"memory": memory})) == size


# -- which device belongs to the pool ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("vendor", "name", "product", "same"),
    [
        ("nvidia", "NVIDIA L40S-48G", "L40S 48G", True),
        ("NVIDIA", "A100-80GB_PCIe", "a100 80gb pcie", True),
        ("nvidia", "Acme X1200", "200", False),
        ("amd", "A100", "A100", False),
        (None, "A100", "A100", False),
        ("nvidia", None, "A100", False),
        ("nvidia", "A100", "", False),
        ("nvidia", "A100 SXM", "A100", False),
    ],
)
def test_a_device_belongs_to_the_pool_by_vendor_and_name(vendor, name, product, same):
    pool = gpu_pool("p", 1, A100 | {"product": product})
    assert belongs(vendor, name, pool) is same


def test_a_pool_without_manufacturer_has_no_devices():
    assert not belongs("nvidia", "A100", gpu_pool("p", 1, {"product": "A100"}))


# -- one slice ---------------------------------------------------------------------------------------


def test_a_slice_is_booked_on_a_card_that_is_picked():
    on = fleet("2x2xA100-80")
    placed = place(on, half(30), policy=policy())
    assert placed.parts[0].vram == (FORTY,)
    assert placed.parts[0].gpu_indexes in ((0,), (1,))
    assert placed.vram_utilization is None
    assert placed.check is Check.FITS


def test_a_slice_is_booked_to_the_byte():
    third = asking(5, selector={MEMORY: 33})
    placed = place(fleet("1x1xA100-24"), third, policy=policy({**A100, "memory": "24564Mi"}))
    assert placed.parts[0].vram == (8_499_882_885,)


def test_slices_share_cards_and_never_more_than_a_card_holds():
    on = fleet("1x2xA100-80")
    known = policy()
    taken = [seats(place(on, half(30), f"m-{n}", n, known))[0][1] for n in range(4)]
    assert sorted(taken) == [(0,), (0,), (1,), (1,)]
    outcome = refused(on, half(30), n=4, policy=known)
    assert "cards of A100 are in use" in outcome.message
    assert outcome.reasons[-1].params["open_workers"] == 0
    assert Cure.CAPACITY in outcome.cures


def test_a_card_that_others_use_gives_a_slice_only_where_it_fits():
    on = fleet("1x2xA100-80")
    occupy(on, "w1", [0], 50)
    assert seats(place(on, half(30), policy=policy())) == [("w1", (1,))]


def test_other_cards_and_other_clusters_are_left_alone():
    on = fleet("1x2xH100-80 + 1x2xA100-80[cluster=2] + 1x1xA100-80")
    assert seats(place(on, half(30), policy=policy())) == [("w3", (0,))]


def test_ram_is_checked_on_every_worker():
    on = fleet("1x2xA100-80[ram=4] + 1x2xA100-80[ram=64]")
    placed = place(on, half(30, ram=8), policy=policy())
    assert (placed.parts[0].worker_name, placed.parts[0].ram) == ("w2", 8 * GIB)
    outcome = refused(fleet("1x2xA100-80[ram=4]"), half(30, ram=8), policy=policy())
    assert "not enough RAM" in outcome.message
    assert "4.00 of the 8.00 GiB needed" in outcome.message
    assert outcome.reasons[-1].code == "pool.ram"


# -- several workers -----------------------------------------------------------------------------------


def test_70_gib_take_two_slices_of_40_on_two_workers():
    on = fleet("2x2xA100-80")
    placed = place(on, half(70), policy=policy())
    assert {p.worker_name for p in placed.parts} == {"w1", "w2"}
    assert [p.vram for p in placed.parts] == [(FORTY,), (FORTY,)]
    assert [p.total_gpus for p in placed.parts] == [None, 2]
    assert placed.mode == "initialize_later"


def test_one_worker_is_too_few_for_two_slices():
    outcome = refused(fleet("1x2xA100-80"), half(70), policy=policy())
    for fact in ("70.00 GiB", "40.00 GiB", "2 parts needed", "1 worker of the pool"):
        assert fact in outcome.message
    assert outcome.reasons[-1].code == "pool.too_few_workers"


def test_distribution_that_is_off_refuses_what_one_slice_does_not_hold():
    off = half(70, distributed_inference_across_workers=False)
    outcome = refused(fleet("2x2xA100-80"), off, policy=policy())
    for fact in ("70.00 GiB", "40.00 GiB", "distributed inference across workers is off"):
        assert fact in outcome.message


def test_the_world_size_rules_how_many_slices_there_are():
    on = fleet("4x2xA100-80")
    assert len(place(on, half(70, "--tensor-parallel-size=4"), policy=policy()).parts) == 4
    short = refused(fleet("4x2xA100-80"), half(70, "--tensor-parallel-size=1"), policy=policy())
    assert "flags ask for 1, but it needs 2" in short.message


def test_slices_are_as_many_as_divide_the_model():
    on = fleet("5x1xA100-80")
    assert len(place(on, half(100, heads=64), policy=policy()).parts) == 4


def test_each_worker_books_its_ram():
    placed = place(fleet("2x1xA100-80"), half(70, ram=2), policy=policy())
    assert [p.ram for p in placed.parts] == [2 * GIB, 2 * GIB]


# -- what the cluster reports ----------------------------------------------------------------------------


def test_a_partition_needs_a_node_that_offers_it():
    devices = {"w1": node(100, 100), "w2": node(100, 100, profiles=2)}
    on = fleet("2x2xA100-80")
    known = policy(devices=devices)
    placed = place(on, partition(30), policy=known)
    assert placed.parts[0].worker_name == "w2"
    assert placed.parts[0].vram == (FORTY,)
    outcome = refused(fleet("1x2xA100-80"), partition(30), policy=known)
    assert "partition '3g.40gb'" in outcome.message
    assert outcome.reasons[-1].code == "pool.no_capable_node"
    assert Cure.BACKENDS in outcome.cures


@pytest.mark.parametrize(
    ("devices", "serves"),
    [
        (None, True), ({}, False), ({"w1": []}, False), ({"w1": node(100, 100)}, True),
        ({"w1": node(100, 100, logical=0)}, False), ({"w1": node(0, 0)}, False),
        ({"w1": node(100, 100, product="H100")}, False),
    ],
)  # fmt: skip
def test_a_slice_needs_software_slicing_where_the_cluster_reports_anything(devices, serves):
    on = fleet("1x2xA100-80")
    outcome = ask(on, half(30), policy=policy(devices=devices))
    assert hasattr(outcome, "placement") is serves


def test_a_slice_goes_to_a_card_of_which_enough_remains():
    on = fleet("1x2xA100-80")
    assert seats(place(on, half(30), policy=policy(devices={"w1": node(20, 60)}))) == [("w1", (1,))]
    scarce = policy(devices={"w1": node(20, 40)})
    assert "50 % of a card left" in refused(fleet("1x2xA100-80"), half(30), policy=scarce).message


def test_indexes_that_no_card_of_the_worker_bears_do_not_shut_it_out():
    devices = {"w1": [node(100)[0] | {"accelerators": [{"index": 70, "remaining": 1_000_000}]}]}
    assert place(fleet("1x2xA100-80"), half(30), policy=policy(devices=devices)).gpu_count == 1


# -- refusals: exactly one cause of the pool -------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "wanted", "code", "facts"),
    [
        (Policy(), half(30), "pool.no_types", ["'pool'", "no instance types"]),
        (policy(name="other"), half(30), "pool.unknown_type", ["'pool'", "it has other"]),
        (Policy(pools=Pools.of([gpu_pool("pool", 1, None)])), half(30), "pool.no_detail", ["details"]),
        (policy({"memory": "64Gi"}), half(30), "pool.no_accelerator", ["no manufacturer and product"]),
        (
            policy({**A100, "memory": None}),
            half(30),
            "pool.no_memory",
            ["the card memory of A100 is not known yet"],
        ),
        (policy(), partition(30, profile="9g"), "pool.unknown_profile", ["A100", "'9g'", "3g.40gb"]),
        (policy({**A100, "product": "B200"}), half(30), "pool.no_worker", ["a card of B200"]),
    ],
)
def test_the_first_cause_that_applies_is_said(known, wanted, code, facts):
    outcome = refused(fleet("2x2xA100-80"), wanted, policy=known)
    assert [r.code for r in outcome.reasons if r.filter == "pool"] == [code]
    for fact in facts:
        assert fact in outcome.message
    assert Cure.BACKENDS in outcome.cures


def test_workers_that_a_filter_drops_are_told_before_the_pool():
    outcome = refused(fleet("1x2xA100-80[state=NOT_READY]"), half(30), policy=policy())
    assert "NOT_READY" in outcome.message
    assert all(r.filter != "pool" for r in outcome.reasons)


# -- kept results --------------------------------------------------------------------------------------


def test_an_edited_pool_is_seen_by_the_next_decision():
    on = fleet("1x2xA100-80")
    memo: SearchCache = SearchCache()
    wanted = half(30)
    assert "no instance types" in refused(on, wanted, memo=memo).message
    assert ask(on, wanted, policy=policy(), memo=memo).placement.parts[0].vram == (FORTY,)
    smaller = policy({**A100, "memory": "64Gi"})
    assert ask(on, wanted, policy=smaller, memo=memo).placement.parts[0].vram == (32 * GIB,)
    assert "reports" in refused(on, wanted, policy=policy(devices={}), memo=memo).message


def test_an_edited_inventory_changes_only_the_nodes_that_it_concerns():
    on = fleet("3x2xA100-80")
    memo: SearchCache = SearchCache()
    for devices, worker in (
        ({"w1": node(100, 100)}, "w1"),
        ({"w2": node(100, 100)}, "w2"),
        ({"w2": node(0, 0), "w3": node(0, 70), "gone": node(100)}, "w3"),
        ({"w3": node(0, 20)}, None),
        (None, "any"),
        ({"w1": node(100, 100)}, "w1"),
    ):
        known = policy(devices=devices)
        kept = ask(on, half(30), policy=known, memo=memo)
        assert kept == ask(on, half(30), policy=known)
        if worker is None:
            assert "50 % of a card left" in kept.message
        else:
            assert kept.placement.parts[0].worker_name in (
                worker,
                *(["w1", "w2", "w3"] if worker == "any" else []),
            )


def test_a_slice_is_decided_on_what_earlier_decisions_took():
    on = fleet("3x2xA100-80")
    memo: SearchCache = SearchCache()
    known = policy()
    for n in range(12):
        kept = ask(on, half(30), name=f"m-{n}", n=n, policy=known, memo=memo)
        assert kept == ask(on, half(30), name=f"m-{n}", n=n, policy=known)
        on.assume(kept.placement, n, 1)
    refused(on, half(30), n=12, policy=known, memo=memo)


def test_parts_over_workers_divide_a_vision_part_that_is_loaded():
    on = fleet("3x1xA100-80")
    for flags, hosts in (((), 0), (("--language-model-only",), 3)):
        wanted = half(100, *flags, heads=96)
        hyper = replace(wanted.facts.hyper, vision_heads=16)
        wanted = replace(wanted, facts=replace(wanted.facts, hyper=hyper))
        if hosts:
            assert len(place(on, wanted, policy=policy()).parts) == hosts
        else:
            assert "4 parts needed" in refused(on, wanted, policy=policy()).message


@pytest.mark.parametrize(
    ("backend", "flags"),
    [("vLLM", ["--tensor-parallel-size=3"]), ("SGLang", ["--tp-size=3"]), ("MindIE", ["-tp", "32"])],
)
def test_a_tensor_parallel_size_that_does_not_divide_the_model_is_refused_for_pools_too(backend, flags):
    heads = 16 if backend == "MindIE" else 64
    wanted = asking(30, *flags, selector={MEMORY: 50}, heads=heads, backend=backend)
    said = refused(fleet("4x8xA100-80"), wanted, policy=policy()).message
    assert f"{heads}" in said
    assert "cannot be split evenly" in said


def test_heads_without_number_and_divisors_end_the_search_for_a_number_of_parts():
    said = refused(fleet("3x1xA100-80"), half(100, heads=999_999_999_989), policy=policy()).message
    assert "999999999989 heads cannot be split evenly over 3 GPUs" in said
