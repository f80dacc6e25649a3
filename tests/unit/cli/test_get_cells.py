"""Tables of rows that a user's statement left in any shape."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.cli.explain_text import show
from gpustackd.cli.get import _COLUMNS, _MORE, ResourceKind, place, why
from gpustackd.cli.output import console

STRANGE = [5, "words", True, {"a": 1}, [5, None], [{}], None, ["x" * 1000]]


@pytest.mark.parametrize("value", STRANGE)
def test_lists_that_are_none_are_shown_in_some_way(value: Any) -> None:
    row = {"categories": value, "backend_parameters": value, "location": "/" + "x" * 5000}
    for heading, cell in (*_COLUMNS[ResourceKind.MODELS], *_MORE[ResourceKind.MODELS]):
        if heading in ("CATEGORIES", "PARAMETERS", "WHERE"):
            assert len(str(cell(row))) <= 90


@pytest.mark.parametrize("value", STRANGE)
def test_a_place_in_any_shape_is_shown(value: Any) -> None:
    row = {"worker": "w", "gpu_type": "cuda", "gpu_indexes": value, "subordinates": value}
    assert place(row).startswith("w ")
    placement = {
        **row,
        "place": place(row),
        "vram": 1,
        "ram": 0,
        "decided_by": None,
        "pool": [],
        "candidates": [],
    }
    show(console(), {"name": "i", "model": "m", "state": "RUNNING", "placement": placement, "history": []})


def test_the_column_why_tells_the_reason_that_holds_for_most_workers() -> None:
    row = {
        "worker": None,
        "state_message": "No place among 13 workers:\n- 1 worker is MAINTENANCE (a)\n- 12 are full",
        "reasons": [
            {
                "code": "status",
                "level": "reject",
                "text": "1 worker is MAINTENANCE (a)",
                "params": {"dropped": 1},
            },
            {"code": "needs", "level": "info", "text": "The model needs much"},
            {"code": "fit", "level": "reject", "text": "12 are full", "params": {"workers": 12}},
        ],
    }
    assert why(row) == "12 are full"
    assert why({**row, "reasons": []}) == "1 worker is MAINTENANCE (a)"
    assert why({**row, "reasons": "no list"}) == "1 worker is MAINTENANCE (a)"
    assert why({**row, "reasons": [], "state_message": None}) == ""
