"""How far property tests explore: a short form with the same examples every time, a long one with new ones.

`make test` runs the short form, so that it fails or passes for what was changed and for nothing else; `make
chaos` runs the long one, `GPUSTACKD_TEST_EXPLORE` times as many examples with new seeds. What it finds is
printed as an `@reproduce_failure` or `@example` line, and becomes an `@example` or a test of its own.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis

FACTOR = int(os.environ.get("GPUSTACKD_TEST_EXPLORE", "1"))


def explored(examples: int, **more: Any) -> hypothesis.settings:
    """Settings of a property test with so many examples in its short form."""
    return hypothesis.settings(max_examples=examples * FACTOR, derandomize=FACTOR == 1, **more)
