"""Tables of rows that a user's statement left in any shape."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.cli.explain import show
from gpustackd.cli.get import _COLUMNS, _MORE, Kind, place
from gpustackd.cli.output import console

STRANGE = [5, "words", True, {"a": 1}, [5, None], [{}], None, ["x" * 1000]]


@pytest.mark.parametrize("value", STRANGE)
def test_lists_that_are_none_are_shown_in_some_way(value: Any) -> None:
    row = {"categories": value, "backend_parameters": value, "location": "/" + "x" * 5000}
    for heading, cell in (*_COLUMNS[Kind.MODELS], *_MORE[Kind.MODELS]):
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
