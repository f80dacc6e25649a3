"""The peer's GGUF cases decided as the daemon decides them: what differs, and the reason for each difference.

Sizes are those of llama.cpp for models of the cases' dimensions, where the peer's answers rest on its own
estimates. `DIFFERENCES` names the rules of which one or more explain every difference in the answer.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.demand import Demand
from gpustackd.domain.outcome import Placed, Placement
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Policy, Subject
from tests import peer_cases as peer
from tests.gguf_models import LLAMA_8B, R1_BF16, R1_Q8, Shape, demand, llama

SHAPES = {
    "Meta-Llama-3-8B-Instruct-GGUF": llama(32, 4096, 32, 8, 14336, kind="q4_k"),
    "Meta-Llama-3-70B-Instruct-GGUF": llama(80, 8192, 64, 8, 28672, kind="q4_k"),
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": LLAMA_8B,
    "DeepSeek-R1-Q8_0": R1_Q8,
    "DeepSeek-R1-BF16": R1_BF16,
}

DIFFERENCES = {
    "split": "gguf.7.whole_layers",
    "gpus": "gguf.7.fewest",
    "layers": "gguf.8.greedy",
    "main": "gguf.8.mains",
    "remote_ram": "gguf.8.remote_ram",
    "order": "gguf.11.index_order",
}
"""What may differ -> the note that says why. Claims differ everywhere: they are what llama.cpp allocates,
with an allowance; so that a model may go to fewer GPUs, or lie on them with more layers."""


def shape_of(case: dict[str, Any]) -> Shape | None:
    asked = case["model"]
    names = (asked.get("huggingface_repo_id", ""), (asked.get("huggingface_filename") or "").split("/")[0])
    return next((SHAPES[n] for n in names if n in SHAPES), None)


CASES = [c for c in peer.cases("selector.gguf", "selector.gguf_slow") if shape_of(c) is not None]


def wanted_of(case: dict[str, Any]) -> Demand:
    shape = shape_of(case)
    assert shape is not None
    spec = peer.spec_of(case)
    return demand(
        shape, *spec.backend_parameters, cpu_offloading=spec.cpu_offloading,
        distributed_inference_across_workers=spec.distributed_inference_across_workers,
        gpu_selector=spec.gpu_selector, placement_strategy=spec.placement_strategy,
    )  # fmt: skip


def differences(ours: Placement, theirs: dict[str, Any]) -> set[str]:
    """Which parts of the answer are not the peer's."""
    claim, parts = theirs["claim"], theirs.get("subordinates") or []
    found = set()
    if ours.parts[0].worker_name != theirs["worker"]:
        found.add("main")
    if ours.gpu_count != len(theirs.get("gpu_indexes") or ()) + len(parts):
        found.add("gpus")
    if ours.offload_layers != claim["offload_layers"]:
        found.add("layers")
    if list(ours.tensor_split or ()) != (claim.get("tensor_split") or []):
        found.add("split")
    if parts and len(ours.parts) > 1 and ours.parts[1].ram != parts[0]["claim"].get("ram", 0):
        found.add("remote_ram")
    if sorted(ours.parts[0].gpu_indexes) != list(ours.parts[0].gpu_indexes):
        found.add("order")
    return found


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_where_the_peer_finds_a_place_we_do_with_no_fewer_layers(case):
    theirs = case["expect"]["candidates"]
    outcome = decide(peer.fleet(peer.ready(case)), wanted_of(case), Subject(1, "x"), Policy())
    if not theirs:
        assert not isinstance(outcome, Placed)
        return
    assert isinstance(outcome, Placed), outcome.message
    placed = outcome.placement
    assert placed.offload_layers >= theirs[0]["claim"]["offload_layers"]
    if placed.offload_layers == theirs[0]["claim"]["offload_layers"]:
        parts = theirs[0].get("subordinates") or []
        picked = bool(case["model"].get("gpu_selector"))
        fewest = len(theirs[0].get("gpu_indexes") or ()) + len(parts)
        assert placed.gpu_count == fewest if picked else placed.gpu_count <= fewest
    assert differences(placed, theirs[0]) <= DIFFERENCES.keys()
