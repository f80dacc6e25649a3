"""The benchmarks measure what they say: the ceiling does all the work of the placements that it repeats."""

from collections import Counter
from pathlib import Path

import anyio
import pytest

from gpustackd.store.audit.audit import audit
from tests.bench import ceiling
from tests.bench.daemons import replicas
from tests.bench.demands import write_models
from tests.bench.figure import Figure
from tests.bench.stage import Stage
from tests.waiting import until

pytestmark = pytest.mark.anyio
_LEDGER = """
SELECT i.name, c.worker_id, c.gpu_device_id, c.part, c.vram, c.ram
  FROM instance_claims c JOIN model_instances i ON i.id = c.instance_id ORDER BY 1, 2, 3"""
_PLACED = """
SELECT name, state, worker_name, gpu_type, gpu_indexes, computed_resource_claim, distributed_servers,
       placement_epoch, attempts FROM model_instances ORDER BY name"""
_BOOKED = "SELECT id, vram_allocated FROM gpu_devices WHERE vram_allocated > 0 ORDER BY 1"
_RECORDS = """
SELECT instance_id, placement_epoch, attempt, outcome, pool, candidates
  FROM scheduling_decisions ORDER BY 1"""


async def test_the_ceiling_writes_what_the_daemon_wrote(database: str, tmp_path: Path) -> None:
    async with await Stage.open(database) as stage:
        await stage.fill(40, await anyio.to_thread.run_sync(write_models, tmp_path / "models"))
        async with replicas(stage, tmp_path, 1) as (daemon,):
            burst = await stage.burst(
                [*stage.models["one"][:4], *stage.models["many"][:2], stage.models["over"][0]], 14
            )
            assert (burst.placed, burst.waiting) == (14, 0)
            told: Counter[str] = Counter()

            def all_of_them() -> bool:
                told.update(daemon.events())
                return told["instance.scheduled"] >= 14

            await until(all_of_them, "14 lines of placements", shows=lambda: str(told))
        told.update(daemon.events())
        assert told["instance.scheduled"] == 14
        pictures = (_LEDGER, _PLACED, _BOOKED, _RECORDS)
        before = [await stage.sql.fetch(sql) for sql in pictures]
        sizes = await ceiling.record(stage)
        assert sum(sizes) == 14
        found = await ceiling.play(stage, tmp_path)
        assert found.placed == 14
        assert found.rate > 0
        assert [await stage.sql.fetch(sql) for sql in pictures] == before
        assert (await audit(stage.sql)).breaches == ()


def test_a_ratio_of_one_or_more_reaches_the_bound_whichever_way_is_good() -> None:
    assert Figure("r", "rate", 5000, "/s", 2500).ratio == 2
    assert Figure("r", "time", 5, "ms", 10, at_most=True).ratio == 2
    assert Figure("r", "time", 20, "ms", 10, at_most=True).ratio == 0.5
    assert Figure("r", "printed only", 1).ratio is None
