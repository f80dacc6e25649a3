"""Options of `gpustackd worker` that do not go together are refused before anything is asked."""

from __future__ import annotations

from typing import Any

import pytest

from gpustackd.cli.worker import worker
from gpustackd.errors import UsageError

NOWHERE = "postgresql://nobody@127.0.0.1:9/none"


@pytest.mark.parametrize(
    ("options", "next_step"),
    [
        ({"simulate": True}, "--simulate NAME"),
        ({"simulate": True, "names": ["a"], "fail_rate": 1.5}, "from 0 to 1"),
        ({"simulate": True, "names": ["a"], "fail_rate": float("nan")}, "from 0 to 1"),
        ({"simulate": True, "names": ["a"], "delay": -1.0}, "--delay 0.5"),
        ({"simulate": True, "names": ["a"], "delay": float("inf")}, "--delay 0.5"),
        ({"simulate": True, "names": ["a"], "gpus": "8x80GiB"}, "add --create"),
        ({"simulate": True, "names": ["a"], "ip": "10.0.0.1"}, "leave out --ip or --simulate"),
        ({"simulate": True, "names": ["a"], "create": True, "gpus": "many"}, "8x80GiB"),
        ({"simulate": True, "names": ["a"], "create": True, "ram": "a lot"}, "512GiB"),
        ({"names": ["a", "b"]}, "add --simulate"),
        ({"names": ["a"], "fail_rate": 1.0}, "add --simulate"),
        ({"names": ["a"], "create": True}, "add --simulate"),
    ],
)
def test_options_that_do_not_go_together_are_refused_with_the_next_step(
    options: dict[str, Any], next_step: str
) -> None:
    with pytest.raises(UsageError) as refused:
        worker(**options, database_url=NOWHERE)
    assert next_step in refused.value.remedy
