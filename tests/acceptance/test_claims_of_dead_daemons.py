"""FR-39: claims of a daemon that died, came back under the same name, was asked to stop, or slept."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.acceptance.daemons import Crew, Daemon, crew, within
from tests.acceptance.machines import CONFIG, GIB, Site, W
from tests.acceptance.record import Record, watching
from tests.hub import Hub, repo_of
from tests.waiting import until

pytestmark = pytest.mark.anyio

MODELS, EACH = 8, 5
ROWS = MODELS * EACH


@dataclass
class Stage:
    """Forty rows ANALYZING, their metadata not coming until the hubs answer; `victim` holds them."""

    daemons: Crew
    victim: Daemon
    ids: list[int]
    hubs: dict[str, anyio.Event]
    """Each daemon asks a hub of its own; name -> what lets that hub answer."""
    addresses: dict[str, str]

    async def again(self, name: str) -> Daemon:
        """Another process under the name of one that is gone."""
        (daemon,) = await self.daemons.start(name=name, HF_ENDPOINT=self.addresses[name])
        return daemon

    def answer(self) -> None:
        """All hubs answer."""
        for hub in self.hubs.values():
            hub.set()

    @property
    def others(self) -> list[Daemon]:
        return [d for d in self.daemons if d is not self.victim]


async def holders(site: Site) -> Counter[str]:
    """Daemon -> rows that it took last and that are under lease."""
    rows = await site.sql.fetch(
        "SELECT DISTINCT ON (m.instance_id) m.by FROM recorder.moves m"
        " JOIN model_instances i ON i.id = m.instance_id AND i.state = 'ANALYZING'"
        " WHERE m.became = 'ANALYZING' ORDER BY m.instance_id, m.n DESC"
    )
    return Counter(r["by"].removeprefix("gpustackd ") for r in rows)


async def taken_over(site: Site, stage: Stage, timeout: float) -> None:
    """Wait until all forty rows are under lease again and none of them in the victim's hands."""
    found: Counter[str] = Counter()

    async def by_others() -> bool:
        found.clear()
        found.update(await holders(site))
        return found.total() == ROWS and not found[stage.victim.name]

    await until(by_others, "all rows are in the hands of others", timeout, lambda: f"held: {dict(found)}")


@asynccontextmanager
async def forty_in_work(
    site: Site, folder: Path, lease: float, daemons: int = 3, others: float | None = None
) -> AsyncIterator[Stage]:
    """`lease` is the victim's, and the others' too unless said."""
    repos = {f"lab/m{n}": repo_of(CONFIG, [("w", "U8", (10 * GIB,))]) for n in range(MODELS)}
    await site.fleet(*[W(f"w{n}", 256, "8x24") for n in range(5)])
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(crew(site.url, folder, lease=lease, rescan_interval=600))
        await stack.enter_async_context(watching(site.url, stuck_after=lease + 10))
        hubs: dict[str, anyio.Event] = {}
        addresses: dict[str, str] = {}

        async def start(**settings: Any) -> Daemon:
            hub = await stack.enter_async_context(Hub(repos))
            (daemon,) = await made.start(HF_ENDPOINT=hub.url, **settings)
            hubs[daemon.name], addresses[daemon.name] = hub.hold("/"), hub.url
            return daemon

        victim = await start()
        ids: list[int] = []
        for name in repos:
            model = await site.model(name=name, source="huggingface", huggingface_repo_id=name)
            ids += await site.instances(model, EACH)
        await site.analyzing(ROWS)
        for _ in range(daemons - 1):
            await start(lease=others or lease)
        stage = Stage(made, victim, ids, hubs, addresses)
        yield stage
        stage.answer()


async def all_placed_once(site: Site, record: Record, stage: Stage) -> None:
    stage.answer()
    await site.placed(stage.ids, timeout=within(10))
    assert await record.broken() == []
    assert await record.count("ERROR") == 0


async def test_what_a_killed_daemon_held_is_taken_over_when_its_lease_ends(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with forty_in_work(site, tmp_path, lease=2) as stage:  # 15 times shorter than the default
        await stage.victim.kill()
        await taken_over(site, stage, timeout=within(2 + 5))
        await all_placed_once(site, record, stage)
        await stage.daemons.stop()
        assert stage.daemons.tally()["lease.expired"] > 0


async def test_a_daemon_that_comes_back_under_the_same_name_does_not_keep_its_old_claims_alive(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with forty_in_work(site, tmp_path, lease=2) as stage:
        old = {
            r["lease_owner"]
            for r in await site.sql.fetch(
                "SELECT DISTINCT i.lease_owner FROM model_instances i JOIN recorder.moves m"
                " ON m.instance_id = i.id AND m.became = 'ANALYZING' WHERE m.by = $1",
                f"gpustackd {stage.victim.name}",
            )
        }
        assert len(old) == 1
        await stage.victim.kill()
        again = await stage.again(stage.victim.name)
        await site.until(
            "SELECT count(*) = $1 FROM model_instances WHERE state = 'ANALYZING' AND lease_owner <> $2",
            ROWS,
            old.pop(),
            timeout=within(2 + 5),
        )
        await all_placed_once(site, record, stage)
        assert again.running


async def test_a_daemon_asked_to_stop_gives_its_claims_back_and_others_go_on_at_once(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with forty_in_work(site, tmp_path, lease=600) as stage:  # only a hand-back can free them
        assert await stage.victim.stop(within(10)) == 0
        await taken_over(site, stage, timeout=within(2))
        assert len(stage.victim.whole("daemon.stopping")) == 1
        assert stage.victim.whole("instance.handed_back")
        await all_placed_once(site, record, stage)


async def asleep_for_three_leases(site: Site, stage: Stage, lease: float) -> tuple[int, datetime]:
    """Stop the victim, see its rows taken over, and let three leases pass; how many rows it held, and since
    when it sleeps."""
    held = (await holders(site))[stage.victim.name]
    since: datetime = await site.sql.fetchval("SELECT clock_timestamp()")
    stage.victim.signal(signal.SIGSTOP)
    await taken_over(site, stage, timeout=within(lease + 5))
    await site.until(
        "SELECT clock_timestamp() > $1::timestamptz + make_interval(secs => $2)", since, 3 * lease
    )
    return held, since


async def bound_late(site: Site, stage: Stage, since: datetime) -> int:
    """Rows that the victim bound in an epoch that it had claimed before it fell asleep."""
    found: int = await site.sql.fetchval(
        "SELECT count(*) FROM recorder.moves b JOIN recorder.moves c ON c.instance_id = b.instance_id"
        " AND c.epoch = b.epoch AND c.became = 'ANALYZING' AND c.at < $2"
        " WHERE b.became = 'SCHEDULED' AND b.by = $1 AND b.at > $2",
        f"gpustackd {stage.victim.name}",
        since,
    )
    return found


async def refused(stage: Stage, held: int) -> None:
    """Wait until the victim has learnt what its models need, decided, tried to commit, and been refused."""
    await stage.victim.logged("instance.lost", times=held)


async def test_a_sleeper_binds_nothing_that_others_have_placed_and_then_goes_on(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with forty_in_work(site, tmp_path, lease=1, others=6) as stage:
        held, since = await asleep_for_three_leases(site, stage, lease=1)
        await all_placed_once(site, record, stage)
        stage.victim.signal(signal.SIGCONT)
        await refused(stage, held)
        assert await bound_late(site, stage, since) == 0
        # alone, it places what comes next
        for other in stage.others:
            assert await other.stop(within(10)) == 0
        await site.delete("model_instances", *stage.ids)
        model = await site.sql.fetchval("SELECT min(id) FROM models")
        await site.placed(await site.instances(model, 3), timeout=within(5))


async def test_a_sleeper_binds_nothing_that_others_work_on_at_that_moment(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with forty_in_work(site, tmp_path, lease=1, others=6) as stage:
        held, since = await asleep_for_three_leases(site, stage, lease=1)
        # it has what it waited for, while the rows are ANALYZING in the others' hands
        stage.hubs[stage.victim.name].set()
        stage.victim.signal(signal.SIGCONT)
        await refused(stage, held)
        assert (await holders(site)).total() == ROWS
        await all_placed_once(site, record, stage)
        assert await bound_late(site, stage, since) == 0


async def test_a_sleeper_that_nobody_replaced_claims_anew_before_it_binds(
    site: Site, record: Record, tmp_path: Path
) -> None:
    async with forty_in_work(site, tmp_path, lease=1, daemons=1) as stage:
        since = await site.sql.fetchval("SELECT clock_timestamp()")
        stage.victim.signal(signal.SIGSTOP)
        await site.until("SELECT clock_timestamp() > $1::timestamptz + make_interval(secs => $2)", since, 3)
        assert (await holders(site))[stage.victim.name] == ROWS  # its claims are over, and still there
        stage.answer()
        stage.victim.signal(signal.SIGCONT)
        await all_placed_once(site, record, stage)
        assert await bound_late(site, stage, since) == 0


@pytest.mark.chaos
@pytest.mark.timeout(1800)
async def test_a_hundred_rounds_of_deaths_and_sleeps_bind_each_row_once(
    site: Site, record: Record, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Lease 2 s (of 30); kills, hand-backs and sleeps in turn; the victim comes back under its old name."""
    async with forty_in_work(site, tmp_path, lease=2) as stage:
        await all_placed_once(site, record, stage)
        model = (await site.rows(stage.ids))[0]["model_id"]
        for n in range(100):
            await site.delete("model_instances", *stage.ids)
            stage.ids = []
            for _ in range(8):
                stage.ids += await site.instances(model, EACH)
            victim = next(iter(stage.daemons))
            if n % 3 == 0:
                await victim.kill()
            elif n % 3 == 1:
                assert await victim.stop(within(10)) == 0
            else:
                victim.signal(signal.SIGSTOP)
                await site.placed(stage.ids, timeout=within(2 + 5))
                victim.signal(signal.SIGCONT)
            await site.placed(stage.ids, timeout=within(2 + 5))
            if not victim.running:
                await stage.again(victim.name)
        assert await record.broken() == []
    refused = stage.daemons.tally()["instance.lost"]
    tell(f"FR-39: 100 rounds of 40 rows, each bound once; {refused} late commits refused")
