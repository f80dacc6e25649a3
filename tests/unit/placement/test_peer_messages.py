"""What refusals and over-committing placements tell, held against the facts of the peer's messages: the same
figures, in our own words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpustackd.domain.outcome import NoFit, Reason
from gpustackd.placement.decide import decide
from gpustackd.placement.policy import Subject
from tests import peer_cases as peer

AREAS = ("selector.vllm", "selector.sglang", "selector.mindie", "selector.vgpu", "selector.custom")
DIFFERENCES = {
    ("selector.mindie", "largest_worker", "effective_gib"): "mindie.8.effective",
    ("selector.mindie", "best_combination", "vram_gib"): "mindie.9.first_prefix",
}
"""(area, kind of fact, figure) -> note: the peer counts the fraction twice, or shows the best combination of
workers that reach the world size only (0 where none does), where here the most that there is is shown."""
WORDS = {
    "attention_heads": "heads",
    "vocab_size": "vocabulary entries",
    "vision_attention_heads": "vision heads",
}
PERCENT = ("percent", "per_gpu_percent")


def told() -> Iterator[Any]:
    for case in peer.cases(*AREAS, handed=True):
        if case["expect"].get("message_facts") and not _lean(case):
            yield pytest.param(case, id=case["id"])


def _lean(case: dict[str, Any]) -> bool:
    """Whether workers have no RAM left: then selected GPUs are not over-committed, and RAM is told."""
    return any("system_reserved" in w.get("set", {}) for w in case["workers"])


@pytest.mark.parametrize("case", [*told()])
def test_every_figure_of_the_peers_message_is_in_ours(case: dict[str, Any]) -> None:
    wanted = peer.demand(case)
    outcome = decide(peer.fleet(peer.ready(case)), wanted, Subject(10**6, "x"), peer.policy(case))
    if isinstance(outcome, NoFit):
        reasons, text = outcome.reasons, outcome.message
    else:
        reasons = outcome.placement.warnings
        text = "\n".join(r.text for r in reasons)
        if not outcome.placement.over_commit:
            assert not reasons  # the peer words its diagnosis on success too
            return
    for fact in case["expect"]["message_facts"]:
        for name, value in fact.items():
            if name != "k" and (case["area"], fact["k"], name) not in DIFFERENCES:
                for one in value if isinstance(value, list) else [value]:
                    assert says(name, one, text, reasons), (fact["k"], name, one, text)


def says(name: str, value: Any, text: str, reasons: tuple[Reason, ...]) -> bool:
    if name == "instance_type":  # people read the name of the product
        return any(r.params.get("type") == value for r in reasons)
    if name == "what":
        return WORDS[value] in text
    if name in PERCENT:
        return f"{value:g} %" in text
    return (f"{value:.2f}" if isinstance(value, float) and name != "fraction" else str(value)) in text
