"""The oracles by themselves: against what was captured, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from tests.gpustack_reference.cases import Case, fixture, read_cases
from tests.gpustack_reference.oracles import keys, layers, scores
from tests.gpustack_reference.oracles.gguf_places import best_level, requested
from tests.gpustack_reference.oracles.room import fits, hosts
from tests.gpustack_reference.production import decisions

GIB = 2**30


@pytest.mark.parametrize(
    ("single", "several"),
    [("deepseek_r1_distill_qwen_32b_bf16_partial_offload", "split_3_1"),
     ("deepseek_r1_ud_iq2_xxs_partial_offload", "split_8"), ("llama3_70b_partial_offload", "split_2_4090")],
)  # fmt: skip
def test_layers_give_what_was_captured_for_one_device_and_for_several(single: str, several: str) -> None:
    names = (single, f"{single}_{several}")
    one, many = (fixture("gguf-estimates.json", "estimates", n, "")["items"] for n in names)
    model = layers.of_items(one, many)
    blocks = model.total_layers - 1
    for line in (one, many):
        for count, whole, _, devices in line[1:]:
            first = blocks - count if not whole else 0
            for n, (_, own, held) in enumerate(devices):
                last = first + held + bool(whole and n == len(devices) - 1)
                if last > first:
                    assert model.device(first, last, leads=not whole and n == 0) == own, (count, n)
                first += held


def test_layers_are_shared_out_as_llama_cpp_does() -> None:
    assert layers.shared_out((1, 1), 81) == [41, 40]
    assert layers.shared_out((8, 10), 81) == [36, 45]
    assert layers.shared_out((1,) * 6, 62) == [11, 10, 10, 11, 10, 10]
    assert layers.shared_out((30, 29), 59) == [30, 29]


def test_a_model_of_equal_layers_needs_so_many_gpus() -> None:
    model = layers.uniform(24 * GIB, 3)
    assert model.fill([24 * GIB] * 3, model.total_layers) == [4, 4, 1]
    assert model.fill([24 * GIB] * 2, model.total_layers) is None


FREE = [
    c
    for c in read_cases("selector.gguf", own=True)
    if requested(c) is None and c["model"].get("cpu_offloading")
]
"""Cases that do not ask for a number of layers."""


@pytest.mark.parametrize("case", FREE, ids=lambda c: str(c["id"]))
def test_the_most_layers_are_those_that_are_placed_and_one_more_is_not(case: Case) -> None:
    found = decisions.answer(decisions.ready(case)).place
    best = best_level(case, layers.of_case(case))
    assert best == (found["claim"]["offload_layers"] if found else 0)


@pytest.mark.parametrize("case", [c for c in read_cases(own=True) if c["area"].startswith("selector.")],
                         ids=lambda c: str(c["id"]))  # fmt: skip
def test_what_is_free_by_the_data_is_what_is_free_in_the_fleet(case: Case) -> None:
    on = decisions.fleet(case)
    for host in hosts(case).values():
        w = on.by_name[host.name]
        free = {(r.index, r.type): on.vram_capacity[on.slot[r.id]] - on.vram_allocated[on.slot[r.id]]
                for r in on.gpu_rows.values() if r.worker_id == host.id}  # fmt: skip
        for card in host.cards:
            least = (
                min(int(free[card.index, card.type]), host.ram)
                if host.unified
                else free[card.index, card.type]
            )
            assert card.free == max(int(least), 0)
        assert host.ram == max(int(on.ram_capacity[w] - on.ram_allocated[w]), 0)


def test_unified_memory_is_one_pool() -> None:
    """128 GiB with a GPU of 100; an instance holds 20 and 4, 2 of RAM and 1 for each GPU are kept back."""
    worker = {"id": 1, "name": "w", "state": "ready", "uma": True, "ram_total": 128 * GIB,
              "system_reserved": {"ram": 2 * GIB, "vram": GIB},
              "gpus": [{"index": 0, "type": "mps", "vram_total": 100 * GIB}]}  # fmt: skip
    instance = {
        "id": 1,
        "worker_id": 1,
        "gpu_indexes": [0],
        "claim": {"ram": 4 * GIB, "vram": {"0": 20 * GIB}},
    }
    (host,) = hosts({"workers": [{"inline": worker}], "existing_instances": [instance]}).values()
    assert (host.ram, host.cards[0].free) == (101 * GIB, 79 * GIB)


def test_a_place_that_does_not_fit_is_complained_of() -> None:
    worker = {"id": 1, "name": "w", "state": "ready", "ram_total": GIB,
              "gpus": [{"index": 0, "type": "cuda", "vram_total": 8 * GIB}]}  # fmt: skip
    case: Case = {"workers": [{"inline": worker}]}

    def place(**more: object) -> dict[str, object]:
        claim = {"ram": 0, "vram": {"0": 8 * GIB}}
        return {"worker": "w", "gpu_type": "cuda", "gpu_indexes": [0], "claim": claim} | more

    assert fits(case, place()) is None
    assert "is no worker" in str(fits(case, place(worker="v")))
    assert "no GPU 0 of type rocm" in str(fits(case, place(gpu_type="rocm")))
    assert "free of" in str(fits(case, place(claim={"vram": {"0": 9 * GIB}})))
    assert "RAM free" in str(fits(case, place(claim={"ram": 2 * GIB, "vram": {"0": GIB}})))
    assert "not those of its GPUs" in str(fits(case, place(claim={"vram": {}})))


def test_scores_worked_out_by_hand() -> None:
    assert scores.packed([(12, 24)], 2, 40) == pytest.approx(35)
    assert scores.packed([], 10, 40) == 25
    assert scores.packed([(30, 24)], 60, 40) == 100
    assert scores.mean(35, [36.67, 53.33]) == pytest.approx(265 / 7)
    assert scores.locality({1, 2, 3}, {1, 2}, {3}, 5) == pytest.approx(2.777777, abs=1e-5)


def test_a_plain_queue() -> None:
    ops = [{"op": "add", "key": "a"}, {"op": "add_after", "key": "b", "delay_s": 0.5}, {"op": "get"},
           {"op": "add", "key": "a"}, {"op": "get", "timeout_s": 1}, {"op": "done", "key": "a"},
           {"op": "get"}]  # fmt: skip
    found = keys.play(ops)
    assert [(v and v["key"], t) for v, t, _ in found.values()] == [("a", 0), ("b", 0.5), ("a", 0)]
