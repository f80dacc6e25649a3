"""The peer's own scheduler cases through the `decide` that the daemon runs, in compatibility mode.

Same candidates in the same order, claims to the byte, the same overcommit flag and the same final choice.
`DIFFERENCES` lists, by rule and never by case, where we differ on purpose and which note says why.
"""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.domain.backend_parameters import parse
from gpustackd.domain.demand import Demand, Engine
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.errors import BadRow
from gpustackd.placement.decide import candidates, decide
from gpustackd.placement.fit.divisible import Divisors
from gpustackd.placement.fit.rules import World, gpu_count
from gpustackd.placement.notes import NOTES
from gpustackd.placement.policy import Subject
from tests import peer_cases as peer

AREAS = ("selector.vllm", "selector.sglang", "selector.mindie", "selector.vgpu", "selector.custom")


CASES = peer.cases(*AREAS)

DIFFERENCES = {
    "vram_utilization": "selectors.2.vram_utilization",
    "fewer_workers_seen": "selectors.6.type_grouping",
    "addresses": "mindie.6.addresses",
    "cards_of_pools": "vgpu.B.4.placeholder",
}
"""Rule -> note: what the comparison leaves out. The utilisation is set on every claim here, on some there;
a reduced list of workers (`final_workers`) is an accident of the peer's type grouping; the addresses of
an over-committed or hand-picked candidate are those of its own GPUs here; cards of a pool are picked
here, where the peer counts placeholders."""


def said(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The candidates that the peer gave, without what `DIFFERENCES` names and without scores."""
    return [_bare(c) for c in case["expect"]["candidates"]]


def _bare(candidate: dict[str, Any], over: bool = False) -> dict[str, Any]:
    kept = {k: v for k, v in candidate.items() if k not in ("placement_score", "score")}
    claim = {k: v for k, v in (candidate.get("claim") or {}).items() if k in ("ram", "vram")}
    kept["claim"] = {"ram": claim.get("ram") or 0, "vram": claim.get("vram") or {}}
    if not kept.get("overcommit"):
        kept.pop("overcommit", None)
    if kept.get("overcommit") or over:
        kept.pop("gpu_addresses", None)
    if "subordinates" in kept:
        kept["subordinates"] = [_bare(s, bool(kept.get("overcommit"))) for s in kept["subordinates"]]
    for name in ("gpu_type", "gpu_indexes"):
        kept.setdefault(name, None)
    return kept


def ours(case: dict[str, Any]) -> tuple[list[dict[str, Any]], list[float], Demand]:
    wanted = peer.demand(case)
    try:
        found = candidates(peer.fleet(peer.ready(case)), wanted, peer.policy(case))
    except BadRow:
        found = []
    return [_bare(peer.as_candidate(p, wanted.engine)) for p in found], [p.score for p in found], wanted


def _picked_addresses(theirs: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Of hand-picked GPUs the peer lists the addresses of all that were selected on a worker; ours must be
    among them."""
    for their, our in zip(theirs, found, strict=False):
        listed = their.get("gpu_addresses")
        if listed is not None and set(our.get("gpu_addresses") or ()) <= set(listed):
            their.pop("gpu_addresses")
            our.pop("gpu_addresses", None)
        _picked_addresses(their.get("subordinates", []), our.get("subordinates", []))


@pytest.mark.parametrize("case", CASES, ids=[c["id"] for c in CASES])
def test_the_same_candidates_with_the_same_claims(case):
    found, scores, _ = ours(case)
    theirs = said(case)
    if case["model"].get("gpu_selector"):
        _picked_addresses(theirs, found)
    assert found == theirs
    expected = [c["placement_score"] for c in case["expect"]["candidates"] if "placement_score" in c]
    if expected:
        assert scores == pytest.approx(expected, rel=1e-12)


WITH_FINAL = [c for c in CASES if "final" in c["expect"]]


@pytest.mark.parametrize("case", WITH_FINAL, ids=[c["id"] for c in WITH_FINAL])
def test_the_same_final_choice(case):
    wanted = peer.demand(case)
    final = case["expect"]["final"]
    on = peer.fleet(case if final is None else peer.ready(case))
    outcome = decide(on, wanted, Subject(10**6, "x"), peer.policy(case))
    if final is None:
        assert not isinstance(outcome, Placed)
        return
    assert isinstance(outcome, Placed), outcome.message
    assert _bare(peer.as_candidate(outcome.placement, wanted.engine)) == _bare(final)


GGUF = peer.cases("selector.gguf")


def layered(candidate: dict[str, Any]) -> dict[str, Any]:
    """A candidate of a GGUF model without its score, as our answers write it."""
    kept = {k: v for k, v in candidate.items() if k not in ("placement_score", "score", "subordinates")}
    kept = {"gpu_indexes": None} | kept
    kept["claim"] = {"ram": 0} | kept["claim"] | {"vram": kept["claim"].get("vram") or {}}
    if parts := candidate.get("subordinates"):
        kept["subordinates"] = [layered(p) for p in parts]
    return kept


@pytest.mark.parametrize("case", GGUF, ids=[c["id"] for c in GGUF])
def test_the_same_candidates_of_gguf_models(case):
    found = candidates(peer.fleet(peer.ready(case)), peer.demand(case), peer.policy(case))
    expected = case["expect"]["candidates"]
    assert [peer.as_candidate(p, Engine.GGUF) for p in found] == [layered(c) for c in expected]
    scores = [c["placement_score"] for c in expected if "placement_score" in c]
    assert [p.score for p in found] == pytest.approx(scores, rel=1e-12)


@pytest.mark.parametrize("case", GGUF, ids=[c["id"] for c in GGUF])
def test_the_same_final_choice_and_figures_of_gguf_models(case):
    outcome = decide(peer.fleet(case), peer.demand(case), Subject(10**6, "x"), peer.policy(case))
    final = case["expect"].get("final")
    if isinstance(outcome, Placed):
        assert final is None or peer.as_candidate(outcome.placement, Engine.GGUF) == layered(final)
        return
    assert not case["expect"]["candidates"]
    assert isinstance(outcome, NoFit)
    for fact in case["expect"]["message_facts"]:
        for name, value in fact.items():
            told = f"{value:.2f}" if isinstance(value, float) else str(value)
            assert name == "k" or told in outcome.message


def test_every_difference_has_its_note():
    assert set(DIFFERENCES.values()) <= {n.code for n in NOTES}


COUNTS = peer.cases("gpu_count")


@pytest.mark.parametrize("case", COUNTS, ids=[c["id"] for c in COUNTS])
def test_gpu_counts(case):
    spec = peer.model_spec(
        {"id": 1, "version": 1, "name": "m"} | {k: v for k, v in case["model"].items() if v}
    )
    expect = case["expect"]
    if "skip_count_check" in expect:
        assert spec.skips_gpu_count_check is expect["skip_count_check"]
        return
    asked = World(case["inputs"]["world_size"], tuple(case["inputs"]["strategies"]))
    if "error" in expect:
        with pytest.raises(BadRow, match="/".join(asked.labels)):
            gpu_count(spec, asked)
    else:
        assert gpu_count(spec, asked)[0] == expect["gpu_count"]


DIVISIBLE = peer.cases("tp_divisibility")


@pytest.mark.parametrize("case", DIVISIBLE, ids=[c["id"] for c in DIVISIBLE])
def test_divisibility(case):
    inputs, flags = case["inputs"], parse(case["model"]["backend_parameters"], first_wins=True)
    alone = {"vLLM": "language-model-only", "SGLang": "language-only"}.get(case.get("backend", "vLLM"))
    splits = alone is not None and not flags.flag(alone)
    vision = inputs["vision_num_attention_heads"] if splits else 0
    divides = Divisors(inputs["num_attention_heads"] or 0, vision or 0, inputs["vocab_size"] or 0)
    assert divides.allows(inputs["tp_size"]) is case["expect"]["divisible"]
