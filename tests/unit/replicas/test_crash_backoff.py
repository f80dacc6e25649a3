"""What is done about an instance in ERROR: when again, when elsewhere, when with more, when no more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustackd.domain.placement_hints import ClaimRaise
from gpustackd.replicas.crash_backoff import (
    MAX_RAISE_FACTOR,
    MAX_RAISES,
    FailedInstance,
    RestartAction,
    decide_restart,
    jittered_delay,
    restart_delay,
)
from gpustackd.replicas.failure_causes import FailureCause, failure_cause, requested_bytes

GIB = 2**30
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24"
)


decided = decide_restart


def failed(**more: object) -> FailedInstance:
    return FailedInstance(**{"id": 7, "restart_count": 0, "failures": 1, "since": 1e6, **more})  # type: ignore[arg-type]


def test_delays_double_from_ten_seconds_to_five_minutes() -> None:
    assert [restart_delay(k) for k in range(1, 11)] == [0, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    assert restart_delay(10**6) == 300


@given(st.integers(1, 2**40), st.integers(1, 40))
def test_jitter_adds_a_tenth_at_most_and_is_the_same_whoever_asks(instance: int, attempt: int) -> None:
    found = jittered_delay(instance, attempt)
    assert restart_delay(attempt) <= found <= restart_delay(attempt) * 1.1
    assert jittered_delay(instance, attempt) == found


def test_instances_that_failed_together_do_not_all_come_back_together() -> None:
    assert len({jittered_delay(i, 7) for i in range(100)}) > 50


def test_the_first_restart_comes_at_once_and_each_later_one_waits_its_time() -> None:
    assert decided(failed(since=0)).action is RestartAction.RESTART
    for count in range(1, 8):
        due = jittered_delay(7, count + 1)
        assert decided(failed(restart_count=count, since=due - 0.1)).action is RestartAction.WAIT
        assert decided(failed(restart_count=count, since=due + 0.1)).action is RestartAction.RESTART


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (OOM, FailureCause.VRAM),
        (
            "ggml_cuda: allocating 9000.50 MiB on device 0: cudaMalloc failed: out of memory",
            FailureCause.VRAM,
        ),
        ("NCCL WARN Cuda failure 'out of memory'", FailureCause.VRAM),
        ("ValueError: No available memory for the cache blocks.", FailureCause.VRAM),
        ("container was OOMKilled", FailureCause.RAM),
        ("process exited with code 137", FailureCause.RAM),
        ("mmap failed: Cannot allocate memory", FailureCause.RAM),
        ("CUDA error: uncorrectable ECC error encountered", FailureCause.DEVICE),
        ("NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus", FailureCause.DEVICE),
        ("ncclSystemError: System call failed during NCCL init", FailureCause.NODE),
        ("OSError: [Errno 28] No space left on device", FailureCause.NODE),
        ("api_server.py: error: unrecognized arguments: --max-modle-len 8192", FailureCause.CONFIG),
        ("manifest unknown: manifest unknown", FailureCause.CONFIG),
        ("something broke", FailureCause.OTHER),
        ("", FailureCause.OTHER),
        (None, FailureCause.OTHER),
        ("secret records of 1xid2", FailureCause.OTHER),
    ],
)  # fmt: skip
def test_messages_tell_their_cause(message: str | None, cause: FailureCause) -> None:
    assert failure_cause(message) is cause


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (OOM, 2 * GIB),
        ("allocating 9000.50 MiB on device 0: cudaMalloc failed", int(9000.5 * 2**20)),
        ("failed to allocate 512 MB", 512 * 10**6),
        ("out of memory", 0),
        (None, 0),
    ],
)
def test_messages_tell_how_much_was_asked_for_in_vain(message: str | None, size: int) -> None:
    assert requested_bytes(message) == size


@given(st.text(max_size=300))
def test_no_message_trips_anything(message: str) -> None:
    decided(failed(message=message, vram=GIB))


def test_a_broken_device_or_host_is_left_after_two_failures_there() -> None:
    for text, whole in (
        ("Xid 79: GPU has fallen off the bus", False),
        ("NCCL error: unhandled system error", True),
    ):
        assert decided(failed(message=text)).action is RestartAction.RESTART
        step = decided(failed(message=text, failures=2, restart_count=1))
        assert (step.action, step.whole_worker) == (RestartAction.MOVE, whole)
        assert (
            decided(failed(message=text, failures=2, restart_count=1, since=1)).action is RestartAction.WAIT
        )


def test_failures_that_tell_nothing_lead_elsewhere_after_five() -> None:
    assert decided(failed(failures=4, restart_count=3)).action is RestartAction.RESTART
    assert decided(failed(failures=5, restart_count=4)).action is RestartAction.MOVE


def test_what_was_told_something_wrong_is_given_up_after_three_until_its_model_is_edited() -> None:
    wrong = {"message": "error: unrecognized arguments: --foo", "since": 1e6}
    assert decided(failed(failures=2, restart_count=1, **wrong)).action is RestartAction.RESTART
    assert decided(failed(failures=3, restart_count=2, **wrong)).action is RestartAction.GIVE_UP
    assert decided(failed(failures=9, restart_count=8, **wrong)).action is RestartAction.GIVE_UP
    assert decided(failed(failures=3, restart_count=2, edited=True, **wrong)).action is RestartAction.RESTART


def test_out_of_memory_books_the_amount_that_was_missing_on_every_gpu() -> None:
    step = decided(failed(message=OOM, vram=40 * GIB, gpus=2, model_version=3))
    assert step.action is RestartAction.RAISE_CLAIM
    assert step.claim_raise == ClaimRaise(
        vram=40 * GIB + int(4 * GIB * 1.1), first_vram=40 * GIB, times=1, model_version=3
    )
    step = decided(failed(message="out of memory", vram=40 * GIB))
    assert step.claim_raise is not None
    assert step.claim_raise.vram == 44 * GIB


def test_host_memory_grows_by_a_gigabyte_at_least() -> None:
    step = decided(failed(message="OOMKilled", vram=GIB, ram=GIB))
    assert step.claim_raise is not None
    assert step.claim_raise.ram == GIB + int(GIB * 1.1)
    assert step.claim_raise.vram == 0


@given(st.integers(1, 500), st.integers(0, 400), st.integers(1, 16))
def test_raises_stay_within_their_bounds(first: int, asked: int, gpus: int) -> None:
    booked, more, times = first * GIB, None, 0
    while True:
        step = decided(
            failed(
                message=f"CUDA out of memory. Tried to allocate {asked} GiB",
                vram=booked,
                gpus=gpus,
                claim_raise=more,
            )
        )
        if step.action is not RestartAction.RAISE_CLAIM:
            break
        assert step.claim_raise is not None
        assert step.claim_raise.vram > booked
        booked, more, times = step.claim_raise.vram, step.claim_raise, times + 1
    assert times <= MAX_RAISES
    assert booked <= first * GIB * MAX_RAISE_FACTOR


def test_what_was_learnt_of_an_older_version_of_the_model_is_forgotten() -> None:
    old = ClaimRaise(vram=9 * GIB, first_vram=6 * GIB, times=3, model_version=1)
    assert (
        decided(failed(message=OOM, vram=9 * GIB, claim_raise=old, model_version=1)).action
        is RestartAction.RESTART
    )
    step = decided(failed(message=OOM, vram=9 * GIB, claim_raise=old, model_version=2))
    assert step.claim_raise is not None
    assert (step.claim_raise.times, step.claim_raise.first_vram) == (1, 9 * GIB)
