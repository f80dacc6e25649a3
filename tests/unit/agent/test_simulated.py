"""What a simulated worker does next, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpustackd.agent.register import parse_gpus
from gpustackd.agent.simulated import SimulatedBehavior, TaskTimer
from gpustackd.domain.lifecycle import InstanceState
from gpustackd.errors import UsageError
from gpustackd.store.postgres.worker_reports import AgentTask

TASK = AgentTask(1, "a-0", InstanceState.SCHEDULED, 7, 3, 0)
GIB = 2**30


def walked(script: SimulatedBehavior, task: AgentTask) -> list[InstanceState]:
    states = []
    while task.state not in (InstanceState.RUNNING, InstanceState.ERROR):
        task = replace(task, state=script.step(task)[0])
        states.append(task.state)
    return states


def test_an_instance_goes_through_every_state_of_a_start() -> None:
    assert walked(SimulatedBehavior(), TASK) == [
        InstanceState.INITIALIZING,
        InstanceState.DOWNLOADING,
        InstanceState.STARTING,
        InstanceState.RUNNING,
    ]
    assert SimulatedBehavior().step(replace(TASK, state=InstanceState.UNREACHABLE)) == (
        InstanceState.RUNNING,
        None,
    )


def test_a_rate_of_one_fails_every_start_with_the_words_given_and_a_rate_of_zero_none() -> None:
    broken = SimulatedBehavior(fail_rate=1.0, fail_message="no such file")
    assert walked(broken, TASK)[-1] is InstanceState.ERROR
    assert broken.step(replace(TASK, state=InstanceState.STARTING)) == (InstanceState.ERROR, "no such file")
    assert all(walked(SimulatedBehavior(seed=n), TASK)[-1] is InstanceState.RUNNING for n in range(50))


def test_the_same_seed_fails_the_same_starts_whatever_the_order() -> None:
    starts = [replace(TASK, name=f"a-{n}", restarts=n % 3) for n in range(200)]
    fate = {t: walked(SimulatedBehavior(fail_rate=0.5, seed=4), t)[-1] for t in starts}
    assert fate == {t: walked(SimulatedBehavior(fail_rate=0.5, seed=4), t)[-1] for t in reversed(starts)}
    assert fate != {t: walked(SimulatedBehavior(fail_rate=0.5, seed=5), t)[-1] for t in starts}
    assert 50 < sum(s is InstanceState.ERROR for s in fate.values()) < 150


def test_what_is_scheduled_is_taken_at_once_and_each_later_state_lasts_for_the_delay() -> None:
    steps = TaskTimer(delay=2.0)
    taken = replace(TASK, state=InstanceState.INITIALIZING)
    assert steps.due([TASK], 10.0) == ([TASK], None)
    assert steps.due([taken], 10.0) == ([], 12.0)
    assert steps.due([taken], 11.9) == ([], 12.0)
    assert steps.due([taken], 12.0) == ([taken], None)


def test_an_instance_that_was_placed_anew_begins_its_delay_anew() -> None:
    steps = TaskTimer(delay=2.0)
    taken = replace(TASK, state=InstanceState.INITIALIZING)
    steps.due([taken], 10.0)
    assert steps.due([replace(taken, epoch=4)], 12.0) == ([], 14.0)
    assert steps.due([], 13.0) == ([], None)


def test_cards_are_written_as_a_number_and_a_size() -> None:
    found = parse_gpus("2x24GiB+1x80GiB")
    assert [(g["index"], g["vram_total"] // GIB) for g in found] == [(0, 24), (1, 24), (2, 80)]
    assert parse_gpus("") == []


@pytest.mark.parametrize(
    "text", ["80GiB", "x80GiB", "0x80GiB", "-1x80GiB", "8x", "8x80Gi?", "9999x80GiB", "8x0"]
)
def test_cards_that_are_none_are_refused_with_the_form_to_use(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_gpus(text)
    assert "8x80GiB" in refused.value.remedy
