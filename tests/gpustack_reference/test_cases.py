"""Every case: equal, or different by a class of the table, with the value that is right there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.gpustack_reference.cases import Case, read_cases
from tests.gpustack_reference.verdict import verdict

CASES = read_cases()


@pytest.mark.parametrize("case", CASES, ids=[str(c["id"]) for c in CASES])
def test_case(case: Case, record_property: Callable[[str, object], None]) -> None:
    found = verdict(case)
    record_property("gpustack", found.words)
    assert not found.wrong, "\n".join(found.wrong)
