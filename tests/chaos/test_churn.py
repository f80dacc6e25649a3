"""Numbers of replicas that change all the time: shortly in every test run, for long in `make chaos`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.churn import Plan, churn

pytestmark = pytest.mark.anyio

SHORT = Plan(models=30, changes=150, kills=2, workers=8, kill_every=2.5, rescan=4)
LONG = Plan(models=200, changes=1000, kills=25, workers=40, pause=0.2)
DRAINING = Plan(models=60, changes=300, kills=6, workers=16, drain_window=1.0, seed=3)


@pytest.mark.timeout(400)
async def test_numbers_hold_while_workers_come_and_go_and_daemons_are_killed(
    database: str, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    outcome = await churn(SHORT, database, tmp_path)
    tell(f"short churn of {SHORT.models} models: {outcome}")
    assert outcome.changes >= SHORT.changes
    assert outcome.kills == SHORT.kills


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plan", [LONG, DRAINING], ids=["long", "draining"])
async def test_the_same_for_long(
    database: str, tmp_path: Path, tell: Callable[[str], None], plan: Plan
) -> None:
    outcome = await churn(plan, database, tmp_path)
    tell(f"churn of {plan.models} models: {outcome}")
    assert outcome.changes >= plan.changes
    assert outcome.kills == plan.kills
