"""The short storm, a part of every test run; the long one is run by `make chaos`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.storm import Plan, storm

pytestmark = pytest.mark.anyio

SHORT = Plan(
    instances=600,
    kills=10,
    sleeps=3,
    terminations=4,
    restarts=1,
    deafnesses=1,
    backlog=150,
    pause=0.6,
)
LONG = Plan(
    instances=20_000,
    kills=150,
    sleeps=40,
    terminations=80,
    restarts=12,
    deafnesses=12,
    backlog=3000,
    lease=2,
    rescan=10,
    pause=3,
    crashes=True,
    seed=2,
)


@pytest.mark.timeout(400)
async def test_a_short_storm_breaks_no_rule_and_leaves_nothing_stuck(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    outcome = await storm(SHORT, tmp_path)
    tell(f"short storm: {outcome}")
    assert outcome.inserted >= SHORT.instances
    assert outcome.blows["kill"] == SHORT.kills
    assert outcome.blows["sleep"] == SHORT.sleeps
    assert outcome.blows["restart"] == SHORT.restarts


@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_a_long_storm_breaks_no_rule_and_leaves_nothing_stuck(
    tmp_path: Path, tell: Callable[[str], None]
) -> None:
    outcome = await storm(LONG, tmp_path)
    tell(f"long storm: {outcome}")
    assert outcome.inserted >= 20_000
    assert outcome.refused_late > 0
