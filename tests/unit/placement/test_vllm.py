"""vLLM: one GPU, several GPUs of one worker (selectors spec section 9, worked examples; FR-14)."""

from __future__ import annotations

import pytest

from gpustackd.domain.fleet.rows import GpuRow
from gpustackd.domain.outcome import Cure
from tests.fleets import GIB, ask, demand, fleet, place, refused, seats


def test_a_language_model_books_its_share_of_one_card():
    on = fleet("1x1x4090-24.229")
    placed = place(on, demand(19.02))
    total = int(24.229 * GIB)
    assert placed.parts[0].vram == (int(total * 0.9),)
    assert placed.vram_utilization == 0.9


def test_four_cards_of_16_do_not_hold_75_gib_and_the_message_has_the_figures():
    said = refused(fleet("1x4x4080-15.9922"), demand(75.23, heads=64)).message
    for fact in ("75.23 GiB", "0.9", "90 %", "63.97 GiB on 4 GPUs", "4 of its 4 GPUs", "57.57 of the"):
        assert fact in said


def test_two_cards_of_80_hold_75_gib():
    placed = place(fleet("1x8xH100-80"), demand(75.23, heads=64))
    assert placed.parts[0].vram == (77309411328, 77309411328)


def test_seven_cards_would_do_by_size_but_128_heads_need_eight():
    on = fleet("1x8xH200-141.106")
    placed = place(on, demand(771, heads=128, vocabulary=129280))
    assert placed.gpu_count == 8


def test_an_embedding_model_books_what_it_needs():
    wanted = demand(1.479, categories=("embedding",))
    placed = place(fleet("1x1x4090-24"), wanted)
    assert placed.parts[0].vram == (wanted.need.vram,)
    assert placed.vram_utilization is None


@pytest.mark.parametrize(("heads", "vocabulary", "gpus"), [(64, 152064, 4), (40, None, 4)])
def test_the_number_of_cards_divides_heads_and_vocabulary(heads, vocabulary, gpus):
    on = fleet("1x4xH100-80", reserved=1)
    assert place(on, demand(170, heads=heads, vocabulary=vocabulary)).gpu_count == gpus


@pytest.mark.parametrize(
    ("heads", "vocabulary", "said"), [(64, 151674, "151674 vocabulary"), (25, None, "25 heads")]
)
def test_what_does_not_divide_is_named(heads, vocabulary, said):
    outcome = refused(fleet("1x4xH100-80", reserved=1), demand(170, heads=heads, vocabulary=vocabulary))
    assert said in outcome.message


def test_an_explicit_world_size_takes_exactly_that_many():
    on = fleet("1x8xH100-80")
    wanted = demand(10, heads=32, backend_parameters=["--pipeline-parallel-size", "3"])
    assert place(on, wanted).gpu_count == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tp=3"], "64 heads"),
        (["--tp=0"], "--tensor-parallel-size is 0"),
        (["--gpu-memory-utilization=1.5"], "--gpu-memory-utilization is 1.5"),
        (["--gpu-memory-utilization=lots"], "'lots'"),
        (["--hf-overrides={broken"], "--hf-overrides is '{broken', not a JSON object"),
        (["--distributed-executor-backend=mp", "--tp=2", "--dp=3", "--dpl=2"], "no multiple"),
    ],
)
def test_flags_that_cannot_be_used_are_named_and_only_an_edit_helps(flags, said):
    for categories in (("llm",), ("embedding",)):
        wanted = demand(10, heads=64, backend_parameters=flags, categories=categories)
        outcome = refused(fleet("1x8xH100-80"), wanted)
        assert said in outcome.message
        assert outcome.cures == Cure.MODEL


def test_an_unknown_size_is_never_placed():
    outcome = refused(fleet("1x8xH100-80"), demand(None))
    assert outcome.cures == Cure.TIME | Cure.MODEL | Cure.FILES


@pytest.mark.parametrize("text", ["1x1xH100-80[closed]", "1x1xH100-80[unknown]"])
def test_closed_and_unknown_cards_are_not_used(text):
    assert "no usable GPU" in refused(fleet(text), demand(10)).message


def test_an_over_committed_card_is_not_used():
    on = fleet("1x1xH100-80")
    on.gpu_over[0, 0] = True
    on.touch(0)
    assert "1 over-committed" in refused(on, demand(10)).message


def test_ram_is_checked_and_said():
    on = fleet("2x1xH100-80", ram=16)
    assert place(on, demand(10, ram=10)).parts[0].ram == 10 * GIB
    assert place(on, demand(10, ram=10), n=2).parts[0].ram == 10 * GIB
    said = refused(on, demand(10, ram=10), n=3).message
    assert "not enough RAM" in said
    assert "6.00 of the 10.00 GiB needed" in said


def test_unified_memory_is_one_pool():
    on = fleet("1x1xM3-100[uma,ram=100,ram_reserved=2,reserved=1,type=mps]")
    first = place(on, demand(20, categories=("embedding",), ram=4))
    assert first.parts[0].unified
    assert int(on.free_ram([0])[0]) == 73 * GIB
    refused(on, demand(70, categories=("embedding",), ram=4), n=2)
    place(on, demand(69, categories=("embedding",), ram=4), n=3)


def test_types_are_not_mixed_on_one_worker():
    on = fleet("1x2xA-80")
    for n in range(2):
        on.put_gpu(
            GpuRow(id=10 + n, worker_id=1, index=n, type="rocm", vram_total=60 * GIB, capacity=60 * GIB)
        )
    placed = place(on, demand(100, heads=64))
    assert placed.parts[0].gpu_type == "rocm" or placed.parts[0].gpu_type == "cuda"
    assert placed.gpu_count == 2
    assert len(set(placed.parts[0].gpu_indexes)) == 2
    refused(fleet("1x2xA-80"), demand(150, heads=64))


def test_replicas_of_one_model_take_different_blocks():
    on = fleet("1x8xH100-80")
    taken = [seats(place(on, demand(100, heads=64), name=f"m-{n}", n=n))[0][1] for n in range(4)]
    assert sorted(taken) == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_asking_twice_gives_the_same_answer():
    on = fleet("10x8xH100-80")
    assert ask(on, demand(10), name="a") == ask(on, demand(10), name="a")
