"""The peer's cases of GPU counts and of sizes that divide a model, through the rules of decisions."""

from __future__ import annotations

import pytest

from gpustackd.domain.model_spec import model_spec
from gpustackd.engines.flags import parse_flags
from gpustackd.engines.parallelism import Divisors, WorldSize
from gpustackd.errors import BadRow
from gpustackd.placement.rules.resource_rules import gpu_count
from tests import peer_cases as peer

COUNTS = peer.cases("gpu_count")


@pytest.mark.parametrize("case", COUNTS, ids=[c["id"] for c in COUNTS])
def test_gpu_counts(case):
    spec = model_spec({"id": 1, "version": 1, "name": "m"} | {k: v for k, v in case["model"].items() if v})
    expect = case["expect"]
    if "skip_count_check" in expect:
        assert spec.skips_gpu_count_check is expect["skip_count_check"]
        return
    asked = WorldSize(case["inputs"]["world_size"], tuple(case["inputs"]["strategies"]))
    if "error" in expect:
        with pytest.raises(BadRow, match="/".join(asked.labels)):
            gpu_count(spec, asked)
    else:
        assert gpu_count(spec, asked)[0] == expect["gpu_count"]


DIVISIBLE = peer.cases("tp_divisibility")


@pytest.mark.parametrize("case", DIVISIBLE, ids=[c["id"] for c in DIVISIBLE])
def test_divisibility(case):
    inputs, flags = case["inputs"], parse_flags(case["model"]["backend_parameters"])
    alone = {"vLLM": "language-model-only", "SGLang": "language-only"}.get(case.get("backend", "vLLM"))
    splits = alone is not None and not flags.flag(alone)
    vision = inputs["vision_num_attention_heads"] if splits else 0
    divides = Divisors(inputs["num_attention_heads"] or 0, vision or 0, inputs["vocab_size"] or 0)
    assert divides.allows(inputs["tp_size"]) is case["expect"]["divisible"]
