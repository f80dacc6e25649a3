"""Estimates against what llama.cpp really allocated, device by device."""

from __future__ import annotations

import pytest

from tests.gguf_truth import Run, estimated, headers, held, runs

STARTED = [run for run in runs() if not run.error]
REFUSED = [run for run in runs() if run.error]


def test_there_are_enough_runs_to_speak_of() -> None:
    assert len(STARTED) == 312
    assert len(REFUSED) == 16
    assert len({run.model for run in STARTED}) == 13


@pytest.mark.parametrize("model", sorted({run.model for run in STARTED}))
def test_every_buffer_of_every_run_is_exact_to_the_byte(model: str) -> None:
    for run in (r for r in STARTED if r.model == model):
        level = estimated(headers()[model], run.flags).chosen
        assert level is not None
        devices, host = held(level, len(run.devices))
        for ours, theirs in zip((*devices, host), (*run.devices, run.host), strict=True):
            assert ours[:2] == theirs[:2], run
            if run.pipelined_dry_run:
                assert 0.98 * theirs.total <= ours.total <= theirs.total, run
            else:
                assert ours.compute == theirs.compute, run


@pytest.mark.parametrize("group", sorted({run.group for run in STARTED}))
def test_totals_of_every_group_of_flags_stay_within_the_bounds(group: str) -> None:
    errors = sorted(error(run) for run in STARTED if run.group == group)
    assert abs(errors[len(errors) // 2]) <= 0.003
    assert sum(abs(e) <= 0.02 for e in errors) >= 0.9 * len(errors)
    assert errors[0] >= -0.03


def error(run: Run) -> float:
    """How much more we say than there was, as a share of it."""
    level = estimated(headers()[run.model], run.flags).chosen
    assert level is not None
    devices, host = held(level, len(run.devices))
    return sum(h.total for h in (*devices, host)) / run.total - 1


@pytest.mark.parametrize("run", REFUSED, ids=str)
def test_what_llama_cpp_refuses_is_refused_with_its_reason(run: Run) -> None:
    found = estimated(headers()[run.model], run.flags)
    assert found.levels == ()
    if "quantized V cache" in run.error:
        assert found.refused in run.error
    else:  # it says no more than that it failed
        assert found.refused
