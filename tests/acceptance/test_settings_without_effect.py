"""Settings of groups, which operators of GPUStack clusters may have set: ignored, and named at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpustackd.settings import GROUP_VARIABLES
from tests.acceptance.daemons import crew, gpustackd

pytestmark = pytest.mark.anyio


async def test_settings_of_groups_are_named_once_at_the_start(database: str, tmp_path: Path) -> None:
    values = dict.fromkeys(GROUP_VARIABLES[:2], "not even a number")
    async with crew(database, tmp_path, **values) as daemons:
        [daemon] = await daemons.start()
        started = await daemon.logged("daemon.started")
        [warning] = daemon.before(started, "settings.ignored")
        assert warning["level"] == "warning"
        assert warning["variables"] == list(values)
        assert "no effect" in warning["reason"]


async def test_check_says_that_they_have_no_effect(database: str, tmp_path: Path) -> None:
    path = tmp_path / "gpustackd.toml"
    path.write_text("scheduler_group_candidate_limit = 8\n")
    code, text, _ = await gpustackd(database, "check", "--config", str(path))
    assert code == 0
    assert "have no effect: GPUSTACK_SCHEDULER_GROUP_CANDIDATE_LIMIT" in text
