"""Cases of `gguf_combinations`: how many sets of GPUs the peer tries for each number of them.

Production tries none of these sets one by one; what a user can see is whether a model that needs so many GPUs
finds its place on so many.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.gpustack_reference import cases
from tests.gpustack_reference.cases import Case, Unreadable, known, one_of
from tests.gpustack_reference.judgement import Finding
from tests.gpustack_reference.production import decisions

INPUTS = {"scope", "full_offload_single_gpu_vram"}
ONE, RPC = "one_worker_multi_gpu", "main_worker_plus_rpc_servers"


def judge(case: Case) -> Iterator[Finding]:
    """Findings of one case."""
    known(case["inputs"], INPUTS, "inputs")
    known(case["expect"], {"count_by_gpu_number", "total"}, "expect")
    scope = one_of(case["inputs"].get("scope"), {ONE, RPC}, "inputs.scope")
    counts = case["expect"]["count_by_gpu_number"]
    if sum(counts.values()) != case["expect"].get("total", sum(counts.values())):
        raise Unreadable("expect.total", "is not the sum of the numbers of sets")
    main = len(cases.workers(case)[0].get("gpus") or [])
    found = {}
    for number in counts:
        # over workers the main one counts as one, with all its GPUs
        gpus = int(number) if scope == ONE else main + int(number) - 1
        found[number] = decisions.gpus_taken(case, gpus, spans=scope == RPC) == gpus
    yield Finding("count_by_gpu_number", counts, found)
