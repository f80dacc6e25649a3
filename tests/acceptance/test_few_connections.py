"""FR-37: blocked metadata reads hold no transaction and no connection."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from gpustackd.store.embedded import EmbeddedPostgres
from gpustackd.store.postgres.migrate import migrate
from tests.acceptance.daemons import crew, within
from tests.acceptance.machines import CONFIG, GIB, W, site_on
from tests.acceptance.record import Record
from tests.hub import Hub, repo_of
from tests.servers import QUICK
from tests.waiting import elapse, soon

pytestmark = pytest.mark.anyio

POOL = 5
MOST = POOL + 1
"""Connections of one daemon: its pool and the listening one."""


@pytest.fixture
async def tight_server() -> AsyncIterator[EmbeddedPostgres]:
    """A server that lets in 20 connections, three of them kept for its superuser."""
    settings = {**QUICK, "max_connections": 20}
    async with (
        anyio.TemporaryDirectory(prefix="gpustackd-test-") as folder,
        EmbeddedPostgres(folder, settings=settings) as postgres,
    ):
        await migrate(postgres.url())
        yield postgres


@dataclass
class Seen:
    """Samples of `pg_stat_activity`."""

    samples: int = 0
    most: int = 0
    idle: int = 0


SAMPLE = """
SELECT count(*) AS n,
       count(*) FILTER (WHERE state LIKE 'idle in transaction%'
                          AND now() - state_change > interval '2 s') AS idle
  FROM pg_stat_activity WHERE application_name LIKE 'gpustackd%'"""


async def sample(sql: Any, seen: Seen) -> None:
    while True:
        row = await sql.fetchrow(SAMPLE)
        seen.samples += 1
        seen.most = max(seen.most, row["n"])
        seen.idle += row["idle"]
        await elapse(0.2, "between two samples")


async def fifty_blocked_reads(server: EmbeddedPostgres, folder: Path, seconds: float) -> Seen:
    repos = {f"lab/m{n}": repo_of(CONFIG, [("w", "U8", (10 * GIB,))]) for n in range(50)}
    seen = Seen()
    async with (
        site_on(server.url(), folder / "models") as site,
        site_on(server.url(), folder / "models") as second,
        Hub(repos) as hub,
        crew(server.url(), folder / "logs", lease=30, rescan_interval=600, pool_size=POOL,
             HF_ENDPOINT=hub.url) as daemons,
        anyio.create_task_group() as sampling,
    ):  # fmt: skip
        record = await Record.install(site.sql)
        await site.fleet(*[W(f"w{n}", 64, "2x24") for n in range(50)])
        both = await daemons.start(2)
        sampling.start_soon(sample, second.sql, seen)
        # models whose facts are cached never wait for those whose facts are not
        known = await site.model(need=14)
        for other in reversed(both):  # each places one while the other is asleep
            other.signal(signal.SIGSTOP)
            await site.placed(await site.instances(known))
            other.signal(signal.SIGCONT)
        answer = hub.hold("/")
        blocked: list[int] = []
        for name in repos:
            model = await site.model(name=name, source="huggingface", huggingface_repo_id=name)
            blocked += await site.instances(model)
        await soon(hub.arrived.wait(), "the hub is asked")
        until = anyio.current_time() + seconds
        beside = 0
        while anyio.current_time() < until:
            (id_,) = await site.instances(known)
            await site.placed([id_], timeout=within(5))
            await site.delete("model_instances", id_)
            beside += 1
            await elapse(0.5, "between two users of what is known")
        assert beside > 0
        assert not await site.sql.fetchval(
            "SELECT count(*) FROM model_instances WHERE id = ANY ($1) AND worker_id IS NOT NULL", blocked
        )
        answer.set()
        await site.placed(blocked, timeout=within(30))
        assert all(d.running for d in both)
        assert await record.broken() == []
        await site.clean()
        sampling.cancel_scope.cancel()
    return seen


async def test_fifty_blocked_reads_leave_no_transaction_open_and_connections_bounded(
    tight_server: EmbeddedPostgres, tmp_path: Path
) -> None:
    seen = await fifty_blocked_reads(tight_server, tmp_path, seconds=5)  # of the report's 30 min
    assert seen.samples > 10
    assert seen.idle == 0
    assert seen.most <= 2 * MOST


@pytest.mark.chaos
@pytest.mark.timeout(2400)
async def test_the_same_for_half_an_hour(
    tight_server: EmbeddedPostgres, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    seen = await fifty_blocked_reads(tight_server, tmp_path, seconds=1800)
    tell(
        f"FR-37: {seen.samples} samples in 30 min: at most {seen.most} connections of 2 daemons,"
        f" {seen.idle} idle in transaction"
    )
    assert seen.idle == 0
    assert seen.most <= 2 * MOST
