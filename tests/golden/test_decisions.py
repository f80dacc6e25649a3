"""What is decided today is what the record says."""

from __future__ import annotations

from difflib import unified_diff

import pytest

from tests.golden.record import DECISIONS, WORDING, record


@pytest.fixture(scope="module")
def now() -> tuple[str, str]:
    return record()


def test_decisions_are_those_of_the_record(now: tuple[str, str]) -> None:
    assert not _difference(DECISIONS.read_text(), now[0])


def test_refusals_and_suggestions_are_worded_as_in_the_record(now: tuple[str, str]) -> None:
    assert not _difference(WORDING.read_text(), now[1])


def _difference(recorded: str, now: str) -> list[str]:
    """The first lines that differ; `make golden` renews the record where that is meant."""
    lines = unified_diff(recorded.splitlines(), now.splitlines(), "recorded", "now", n=0, lineterm="")
    return [line[:600] for _, line in zip(range(12), lines, strict=False)]
