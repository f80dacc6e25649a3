"""World size of MindIE's parallel sizes, and whether the model splits by them (Ascend spec sections 3, 5)."""

from __future__ import annotations

import pytest

from gpustackd.domain.facts import HyperParameters
from gpustackd.engines.mindie.parallelism import Ranks, check_model, ranks
from gpustackd.errors import BadRow

NONE = {"pp": 1, "tp": -1, "dp": -1, "cp": -1, "sp": -1, "moe_tp": -1, "moe_ep": -1}


def derive(**given: int) -> Ranks:
    return ranks(NONE | given)


@pytest.mark.parametrize(
    ("given", "world", "local"),
    [
        ({}, -1, -1),
        ({"tp": 4}, 4, -1),
        ({"pp": 3}, 3, 1),
        ({"pp": 2, "tp": 8}, 16, 8),
        ({"dp": 2}, 2, 1),
        ({"dp": 4, "tp": 8}, 32, 8),
        ({"moe_ep": 8}, 8, 1),
        ({"dp": 2, "tp": 4, "moe_ep": 4, "moe_tp": 2}, 8, 4),
        ({"cp": 2, "tp": 4}, 8, 4),
        ({"tp": 4, "sp": 4}, 4, -1),
        ({"tp": 4, "moe_tp": 4}, 4, -1),
        ({"tp": 0, "dp": 1}, -1, -1),
        ({"moe_tp": 4}, -1, -1),
    ],
)
def test_the_world_and_its_part_on_one_worker_follow_from_the_sizes(given, world, local):
    found = derive(**given)
    assert (found.world, found.local) == (world, local)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ({"pp": 2, "tp": 8}, ("pp", "tp")),
        ({"dp": 2, "tp": 4, "sp": 4, "moe_ep": 4, "moe_tp": 2}, ("tp", "dp", "sp", "moe_tp", "moe_ep")),
        ({"dp": 4, "tp": 8}, ("tp", "dp")),
    ],
)
def test_the_sizes_given_are_named_in_one_order(given, labels):
    assert derive(**given).world_size.labels == labels


@pytest.mark.parametrize("given", [{}, {"dp": 1}, {"tp": -8}, {"moe_tp": 4}])
def test_sizes_that_fix_no_world_leave_the_count_free(given):
    assert derive(**given).world_size is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"pp": 2, "dp": 1}, "pipeline parallelism (2) and data parallelism (1)"),
        ({"dp": 2, "cp": 2}, "data parallelism (2) and context parallelism (2)"),
        ({"tp": 4, "moe_tp": 2}, "expert tensor-parallel size 2 is not the world size 4"),
        (
            {"tp": 4, "moe_ep": 2, "moe_tp": 8},
            "expert tensor-parallel size 8 is more than the 4 of a worker",
        ),
        ({"tp": 4, "sp": 2}, "sequence-parallel size 2 is not the tensor-parallel size 4"),
        ({"dp": 2, "moe_ep": 8}, "world size 8 is not data-parallel 2 x tensor-parallel 1"),
        ({"cp": 2, "moe_ep": 8}, "world size 8 is not context-parallel 2 x tensor-parallel 1"),
        ({"pp": 2, "tp": 4, "moe_ep": 2, "moe_tp": 2}, "world size 8 is not expert-parallel 2"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_with_their_values(given, said):
    with pytest.raises(BadRow) as error:
        derive(**given)
    assert said in str(error.value)


def test_a_world_that_is_no_multiple_of_its_part_on_a_worker_is_refused_up_front():
    with pytest.raises(BadRow, match="cannot be divided into workers of 8"):
        derive(tp=8, moe_ep=4)


HEADS = HyperParameters(num_attention_heads=40, vocab_size=152064)
EXPERTS = HyperParameters(
    num_attention_heads=64, vocab_size=129280, moe_num_experts=60, moe_intermediate_size=1408
)


@pytest.mark.parametrize(
    ("hyper", "given", "said"),
    [
        (HEADS, {"tp": 16}, "40 attention heads cannot be split evenly by 16 (tp 16)"),
        (HEADS, {"pp": 2, "tp": 16}, "by 16 (tp 16)"),
        (HyperParameters(num_attention_heads=32, vocab_size=50257), {"tp": 4}, "50257 vocabulary entries"),
        (HyperParameters(vocab_size=50257), {"tp": 4}, "50257 vocabulary entries"),
        (EXPERTS, {"moe_ep": 8}, "60 experts cannot be split evenly by 8"),
        (EXPERTS, {"tp": 2, "moe_ep": 2, "moe_tp": 2}, ""),
        (HyperParameters(num_attention_heads=64, moe_intermediate_size=100), {"tp": 8}, "100 channels"),
        (None, {"tp": 16}, ""),
        (HyperParameters(moe_num_experts=60), {"moe_ep": 8}, ""),
    ],
)
def test_the_model_must_split_by_the_sizes(hyper, given, said):
    if not said:
        check_model(derive(**given), hyper)
        return
    with pytest.raises(BadRow) as error:
        check_model(derive(**given), hyper)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "given", [{"dp": 16, "tp": 4}, {"cp": 16, "tp": 4}, {"moe_ep": 16, "tp": 4, "moe_tp": 4}]
)
def test_heads_divide_by_the_tensor_parallel_size_not_by_the_world(given):
    check_model(derive(**given), HEADS)
