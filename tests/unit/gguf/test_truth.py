"""Estimates against what llama.cpp really allocated, device by device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.gguf_truth import Error, Run, errors_of, estimated, headers, held, runs

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
            assert ours == theirs, run


@pytest.mark.parametrize("group", sorted({run.group for run in STARTED}))
def test_totals_of_every_group_of_flags_stay_within_the_bounds(group: str) -> None:
    within_bounds([e for e in errors_of("truth.jsonl") if e.group == group])


@pytest.mark.parametrize("architecture", sorted({h.architecture for h in headers().values()}))
def test_totals_of_every_architecture_stay_within_the_bounds(architecture: str) -> None:
    within_bounds([e for e in errors_of("truth.jsonl") if e.architecture == architecture])


def within_bounds(some: Sequence[Error]) -> None:
    """The median, nine of ten, and the one that is most too low."""
    totals = sorted(abs(e.total) for e in some)
    assert totals[len(totals) // 2] <= 0.003
    assert sum(t <= 0.02 for t in totals) >= 0.9 * len(totals)
    assert min(e.total for e in some) >= -0.03


def test_runs_of_our_own_cover_many_architectures() -> None:
    assert len({e.architecture for e in errors_of("measured.jsonl")}) >= 85
    assert len(errors_of("measured.jsonl")) >= 650


@pytest.mark.parametrize("model", sorted(headers("measured_headers.json")))
def test_weights_and_caches_of_other_architectures_are_exact_and_totals_close(model: str) -> None:
    for e in errors_of("measured.jsonl"):
        if e.run.model == model:
            assert e.memory_exact, e.run
            assert abs(e.total) <= 0.006, e.run


def test_nearly_all_runs_of_other_architectures_are_exact_in_every_buffer() -> None:
    exact = sum(e.exact for e in errors_of("measured.jsonl"))
    assert exact >= 0.9 * len(errors_of("measured.jsonl"))


@pytest.mark.parametrize("run", REFUSED, ids=str)
def test_what_llama_cpp_refuses_is_refused_with_its_reason(run: Run) -> None:
    found = estimated(headers()[run.model], run.flags)
    assert found.levels == ()
    if "quantized V cache" in run.error:
        assert found.refused in run.error
    else:  # it says no more than that it failed
        assert found.refused
