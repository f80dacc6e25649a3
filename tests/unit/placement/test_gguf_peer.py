"""Compatibility mode of GGUF models: the edge cases of the specification, and the peer's numbers of sets."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.demand import Engine
from gpustackd.domain.outcome import NoFit
from gpustackd.placement.decide import candidates, decide
from gpustackd.placement.fit.gguf_peer import Card, Host, remote_sets, sets
from gpustackd.placement.policy import Policy, Subject
from tests import peer_cases as peer

SINGLE = {"estimate": "llama3_70b_partial_offload", "offload": "partial"}
PAIR = {"offload": "partial", "tensor_split": [1, 1], "estimate": "llama3_70b_partial_offload_split_2_4080",
        "extra": {"rpc": ["host:80"]}}  # fmt: skip
A4090, A4080 = 26015170560, 17171480576


def split(name: str, *sizes: int, rpc: bool = False) -> dict[str, Any]:
    extra = {"rpc": ["w:50053"]} if rpc else {"rpc": None}
    return {"offload": "partial", "tensor_split": list(sizes), "estimate": name, "extra": extra}


TWO_4080 = split("llama3_70b_partial_offload_split_2_4080", A4080, A4080)
TWO_4090 = split("llama3_70b_partial_offload_split_2_4090", A4090, A4090)


def case(*fixtures: str, estimates: list[dict[str, Any]], held: Any = (), **model: Any) -> dict[str, Any]:
    """A 70B model in four bits on workers of the fixtures."""
    asked = {"id": 1, "name": "test", "source": "huggingface", "huggingface_filename": "x.gguf",
             "replicas": 1, "gguf_estimates": [SINGLE, PAIR, *estimates], **model}  # fmt: skip
    workers = [{"fixture": f, "set": {"state": "ready"}} for f in fixtures]
    return {"area": "selector.gguf", "backend": "gguf", "model": asked, "workers": workers,
            "existing_instances": list(held)}  # fmt: skip


def found(described: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = peer.demand(described)
    return [
        peer.as_candidate(p, Engine.GGUF)
        for p in candidates(peer.fleet(described), wanted, Policy(compat=True))
    ]


def refusal(described: dict[str, Any]) -> NoFit:
    outcome = decide(peer.fleet(described), peer.demand(described), Subject(1, "x"), Policy(compat=True))
    assert isinstance(outcome, NoFit)
    return outcome


ONE_4090, TWO, FOUR, PAIR_4090 = (
    "linux_nvidia_1_4090_24gx1", "linux_nvidia_2_4080_16gx2", "linux_nvidia_4_4080_16gx4",
    "linux_nvidia_19_4090_24gx2",
)  # fmt: skip


def test_some_layers_on_the_worker_that_holds_most_of_them():
    (only,) = found(case(ONE_4090, TWO, estimates=[TWO_4080], cpu_offloading=True))
    assert only["claim"] == {
        "ram": 1093245112, "vram": {"0": 16900820992, "1": 16900820992}, "offload_layers": 60,
        "total_layers": 81, "tensor_split": [A4080, A4080],
    }  # fmt: skip


def test_every_set_of_three_where_two_cards_are_partly_used():
    held = [
        {
            "id": n,
            "model_id": 9,
            "worker_id": 5,
            "gpu_indexes": [n],
            "claim": {"ram": 0, "vram": {str(n): size}},
        }
        for n, size in ((2, 524288000), (3, 629145600))
    ]
    a, b = A4080 - 524288000, A4080 - 629145600
    name = "llama3_70b_partial_offload_split_3_4080_2"
    estimates = [split(name, A4080, A4080, a), split(name, A4080, A4080, b), split(name, A4080, a, b)]
    made = found(case(FOUR, estimates=estimates, held=held))
    assert [c["gpu_indexes"] for c in made] == [[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]
    assert made[0]["claim"]["tensor_split"] == [A4080, A4080, a]


def test_over_workers_the_one_with_more_memory_is_the_main_one_and_the_split_begins_with_the_remote():
    three = split("llama3_70b_partial_offload_split_3_4080_4090", A4090, A4080, A4080, rpc=True)
    (only,) = found(
        case(ONE_4090, TWO, estimates=[TWO_4080, three], distributed_inference_across_workers=True)
    )
    assert only["worker"] == "host4080"
    assert only["claim"]["tensor_split"] == [A4090, A4080, A4080]
    assert [(s["worker"], s["claim"]["offload_layers"]) for s in only["subordinates"]] == [("host4090", 33)]


def test_workers_without_gpus_hold_everything_in_ram_the_one_with_most_first():
    described = case("linux_cpu_1", "linux_cpu_2", estimates=[], cpu_offloading=True)
    made = found(described)
    assert len(made) == 2
    assert all(c["claim"]["offload_layers"] == 0 and c["gpu_indexes"] is None for c in made)
    assert {c["claim"]["ram"] for c in made} == {3106511032}
    ram = {peer.worker(w)["name"]: peer.worker(w)["ram_total"] for w in described["workers"]}
    assert ram[made[0]["worker"]] >= ram[made[1]["worker"]]


def test_layers_asked_for_need_leave_to_stay_in_ram():
    outcome = refusal(case(TWO, estimates=[TWO_4080], backend_parameters=["-ngl=40"]))
    assert "fit.layers" in outcome.signature
    assert "40" in outcome.message


def test_layers_asked_for_on_one_card():
    (only,) = found(case(ONE_4090, estimates=[], backend_parameters=["-ngl=40"], cpu_offloading=True))
    assert only["claim"]["offload_layers"] == 40
    assert len(only["gpu_indexes"]) == 1


def test_no_layers_on_gpus_is_a_matter_of_ram():
    (only,) = found(case(ONE_4090, estimates=[], backend_parameters=["-ngl=0"], cpu_offloading=True))
    assert only["gpu_indexes"] is None


def test_the_nearest_places_are_told_in_numbers():
    outcome = refusal(case(ONE_4090, TWO, estimates=[TWO_4080]))
    assert "40.52 GiB" in outcome.message  # all layers on one card
    assert "24.23 GiB" in outcome.message  # the largest card
    assert "42.68 GiB" in outcome.message  # all layers on the cards of the largest worker
    assert "31.98 GiB" in outcome.message


def test_a_selected_worker_that_is_not_there_is_named():
    picked = {"gpu_ids": ["host4080:cuda:0", "nowhere:cuda:0"]}
    outcome = refusal(
        case(TWO, estimates=[TWO_4080], gpu_selector=picked, distributed_inference_across_workers=True)
    )
    assert "nowhere" in outcome.message


def test_a_selected_card_that_holds_no_layer_is_named():
    held = [
        {
            "id": 1,
            "model_id": 9,
            "worker_id": 3,
            "gpu_indexes": [1],
            "claim": {"ram": 0, "vram": {"1": A4080 - 10**9}},
        }
    ]
    picked = {"gpu_ids": ["host4080:cuda:0", "host4080:cuda:1"]}
    outcome = refusal(case(TWO, estimates=[TWO_4080], gpu_selector=picked, held=held))
    assert "host4080:cuda:1" in outcome.message
    assert "1.83 GiB" in outcome.message


def test_with_too_many_cards_of_others_the_peer_looks_for_no_set():
    eight = [f"linux_nvidia_{n}_3090_24gx8" for n in (8, 9, 10)]
    outcome = refusal(case(ONE_4090, *eight, estimates=[], distributed_inference_across_workers=True))
    assert "too_many" in outcome.signature


@pytest.mark.parametrize("described", peer.cases("gguf_combinations"), ids=lambda c: c["id"])
def test_the_same_number_of_sets(described):
    hosts = []
    for n, w in enumerate(map(peer.worker, described["workers"])):
        cards = tuple(Card(n, g["index"], g["vram_total"]) for g in w["gpus"])
        hosts.append(Host(n, w["name"], False, w["ram_total"], cards))
    expected = described["expect"]["count_by_gpu_number"]
    if described["inputs"]["scope"] == "one_worker_multi_gpu":
        counts = {str(k): len(list(sets(hosts[0], k, 0))) for k in range(2, 9)}
    else:
        remotes = [c for h in hosts[1:] for c in h.cards]
        counts = {}
        for some in remote_sets(remotes, picked=False):
            counts[str(len(some) + 1)] = counts.get(str(len(some) + 1), 0) + 1
        assert len(list(remote_sets([*remotes, *hosts[0].cards], picked=True))) == 1
    assert counts == expected
    assert sum(counts.values()) == described["expect"]["total"]
