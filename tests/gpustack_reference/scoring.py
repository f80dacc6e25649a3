"""Cases of scorers by themselves: `scorer.placement`, `.file_locality`, `.chain`, `.instance_chain`,
`scale_down`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gpustack_reference.cases import Case, known, needed, one_of
from tests.gpustack_reference.judgement import Finding
from tests.gpustack_reference.production import scores

INPUTS = {
    "scorers", "candidates", "allocatable_given", "gpu_indexes", "claim", "allocatable", "total_max_score",
}  # fmt: skip
SCORER = {
    "type", "max_score", "strategy", "scale", "ready_main", "ready_draft", "has_draft", "scores",
}  # fmt: skip
OF_REPLICAS = {"status", "offload_layers"}
TYPES = {"placement", "placement_item", "file_locality", "given", *OF_REPLICAS, *scores.KINDS}
ROUNDED = 1e-6


def judge(case: Case) -> Iterator[Finding]:
    """Findings of one case."""
    inputs, expect = case["inputs"], case["expect"]
    known(inputs, INPUTS, "inputs")
    known(expect, {"scores", "score", "order", "parts"}, "expect")
    scorers = needed(inputs, "scorers", "inputs")
    for n, scorer in enumerate(scorers):
        known(scorer, SCORER, f"inputs.scorers[{n}]")
        one_of(scorer.get("type"), TYPES, f"inputs.scorers[{n}].type")
    kinds = {scores.KINDS.get(s["type"], s["type"]) for s in scorers}
    if kinds == {"placement_item"}:
        yield Finding("score", needed(expect, "score", "expect"), scores.of_item(case, scorers[0]), ROUNDED)
    elif "candidates" in inputs:
        yield from _of_candidates(case, scorers)
    else:
        yield from _of_replicas(case)


def _of_candidates(case: Case, scorers: list[dict[str, Any]]) -> Iterator[Finding]:
    """The scores of a chain are the sum of its scorers' (null is 0), those of production among them."""
    sums = [0.0] * len(case["inputs"]["candidates"])
    for scorer in scorers:
        values = scorer["scores"] if scorer["type"] == "given" else scores.of_candidates(case, scorer)
        sums = [t + (v or 0.0) for t, v in zip(sums, values, strict=True)]
    yield Finding("scores", case["expect"]["scores"], sums, ROUNDED)
    real = [s for s in scorers if s["type"] != "given"]
    if len(real) > 1 or not real:
        # a decision adds up its scorers' parts as the chain does, whatever they are
        total, added = scores.totals(case, real)
        yield Finding("totals", added, total, ROUNDED)


def _of_replicas(case: Case) -> Iterator[Finding]:
    expect = case["expect"]
    if "scores" in expect:
        yield Finding("scores", expect["scores"], scores.of_replicas(case), ROUNDED)
    for scorer, values in (expect.get("parts") or {}).items():
        kind = scores.KINDS.get(scorer, scorer)
        one_of(kind, {"placement", *OF_REPLICAS}, f"expect.parts.{scorer}")
        yield Finding(f"part {kind}", values, scores.of_replicas(case, kind), ROUNDED)
    if "order" in expect:
        yield Finding("order", expect["order"], scores.order(case))
