"""The storm: daemons and users on a contended fleet, while processes are killed and stopped, sessions ended,
the server restarted and notifications cut. The audit judges at every poll, the record at the end."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import asyncpg

from gpustackd.store.postgres.migrate import migrate
from tests.acceptance.daemons import Crew, Daemon, crew
from tests.acceptance.machines import model_directory, site_on
from tests.acceptance.record import GONE, Record, Watch, watching
from tests.chaos.users import Users, told
from tests.integration.world import connected
from tests.servers import Server
from tests.waiting import LOOK, elapse, until

REPLICAS = 3
SLACK = 20.0
"""Seconds beyond lease and rescan that a busy machine gets before something counts as stuck."""
NOT_UP = "database not reachable|next: check GPUSTACKD_DATABASE_URL|^replica-\\d+: (DETAIL|HINT)"
"""What a daemon says that is started while the server is down; it is started again."""
MUTE = "CREATE OR REPLACE FUNCTION gpustackd_notify(payload text) RETURNS void LANGUAGE sql AS 'SELECT 1'"


@dataclass(frozen=True)
class Plan:
    """How bad it gets. Seconds."""

    instances: int
    kills: int
    sleeps: int
    terminations: int
    restarts: int
    deafnesses: int
    backlog: int
    lease: float = 1.0
    """The default is 30."""
    rescan: float = 5.0
    """The default is 180."""
    pause: float = 1.0
    """Longest pause between two blows."""
    crashes: bool = False
    """Whether a restart may be a crash of the server."""
    seed: int = 1


@dataclass
class Outcome:
    """What happened."""

    blows: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    did: Counter[str] = field(default_factory=Counter)
    inserted: int = 0
    placed: int = 0
    refused_late: int = 0
    """Commits of daemons that had been stopped past their lease, all refused."""
    polls: int = 0
    blind: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        e = self.events
        return (
            f"{self.inserted} instances inserted, {self.placed} placements by {REPLICAS} daemons in"
            f" {self.seconds:.0f} s\n"
            f"  blows: {told(self.blows)}\n"
            f"  users: {told(self.did)}\n"
            f"  daemons: {e['placement.conflict']} conflicts, {e['lease.expired']} sweeps of expired leases,"
            f" {e['instance.lost']} late writes refused, {self.refused_late} of them after a sleep,"
            f" {e['database.lost']} times without database, {e['rescan.done']} scans\n"
            f"  audits: {self.polls} clean, {self.blind} while the server was away; 0 breaches"
        )


class Storm:
    """One run of a plan against a server of its own."""

    def __init__(self, plan: Plan, server: Server, daemons: Crew, users: Users) -> None:
        self.plan = plan
        self.outcome = Outcome()
        self.over = False
        self._server = server
        self._daemons = daemons
        self._users = users
        self._chance = random.Random(plan.seed)
        self._asleep: Daemon | None = None
        self._awake = anyio.Event()
        self._awake.set()
        self._tasks: Any = None

    # -- blows ------------------------------------------------------------------------------------------

    async def rage(self) -> None:
        """All blows of the plan, in an order drawn by its seed, and everybody awake at the end."""
        plan = self.plan
        blows: list[Callable[[], Awaitable[None]]] = (
            [self._kill] * plan.kills
            + [self._sleep] * plan.sleeps
            + [self._terminate] * plan.terminations
            + [self._restart] * plan.restarts
            + [self._deafen] * plan.deafnesses
        )
        self._chance.shuffle(blows)
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            for blow in blows:
                await blow()
                self.outcome.blows[blow.__name__.strip("_")] += 1
                await elapse(self._chance.uniform(0, plan.pause), "between two blows")
            await self._awake.wait()
        self.over = True

    def _fit(self) -> list[Daemon]:
        """Daemons that work: started, and not stopped."""
        return [d for d in self._daemons if d is not self._asleep and d.is_ready]

    async def _two_fit(self) -> list[Daemon]:
        async def two() -> bool:
            while len(list(self._daemons)) < REPLICAS:  # one that did not get up, as a service manager would
                await self._daemons.launch()
            return len(self._fit()) >= 2

        await until(two, "two daemons work", timeout=300)
        return self._fit()

    async def _kill(self) -> None:
        """SIGKILL to a daemon at work; another one is started in its place."""
        victim = self._chance.choice(await self._two_fit())
        await victim.kill()
        await self._daemons.launch()

    async def _sleep(self) -> None:
        """SIGSTOP to a daemon in the middle of a commit, for three leases; meanwhile the storm goes on.

        All GPUs are locked for a moment, longer than a commit waits: the victim's is given up by the server,
        and when the victim wakes it tries again what is no longer its own.
        """
        await self._awake.wait()
        await self._two_fit()
        try:
            holder = await connected(self._server.url(), application_name="users")
        except GONE:
            return
        try:
            async with holder.transaction():
                await holder.execute("SELECT 1 FROM gpu_devices ORDER BY id FOR UPDATE")
                victim = await self._waiting_for(await holder.fetchval("SELECT pg_backend_pid()"))
                if victim is None:
                    victim = self._chance.choice(self._fit())
                self._asleep, self._awake = victim, anyio.Event()
                victim.signal(signal.SIGSTOP)
                await elapse(0.5, "longer than a commit waits for a lock")
        except GONE:  # the server went away meanwhile; the victim sleeps all the same
            pass
        finally:
            holder.terminate()
        if self._asleep is not None:
            self._tasks.start_soon(self._wake, self._asleep)

    async def _waiting_for(self, holder: int) -> Daemon | None:
        """A fit daemon whose commit waits for our lock, if one comes within a lease."""
        looker = await connected(self._server.url(), application_name="the auditor")
        try:
            with anyio.move_on_after(self.plan.lease):
                while True:
                    names = await looker.fetch(
                        "SELECT application_name AS name FROM pg_stat_activity"
                        " WHERE query LIKE '%gpustackd_commit%' AND wait_event_type = 'Lock'"
                        " AND $1 = ANY (pg_blocking_pids(pid))",
                        holder,
                    )
                    found = [d for d in self._fit() if f"gpustackd {d.name}" in {r["name"] for r in names}]
                    if found:
                        return found[0]
                    await elapse(LOOK, "between two looks; it may never come")
        finally:
            looker.terminate()
        return None

    async def _wake(self, victim: Daemon) -> None:
        await elapse(3 * self.plan.lease, "three leases asleep")
        asleep = victim.latest()
        victim.signal(signal.SIGCONT)
        # it has learnt what it missed when it has seen to the database again
        with anyio.move_on_after(self.plan.lease + SLACK):
            seen = await victim.logged("rescan.done", after=asleep, timeout=SLACK * 3)
            lost = victim.before(seen, "instance.lost")
            self.outcome.refused_late += sum(asleep is None or d.number > asleep.number for d in lost)
        self._asleep = None
        self._awake.set()

    async def _terminate(self) -> None:
        """End some sessions of daemons, listening ones among them."""
        await self._sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'gpustackd %' AND random() < 0.4"
        )

    async def _restart(self) -> None:
        """The server goes down and comes back."""
        self._users.broken = True
        crash = self.plan.crashes and self._chance.random() < 0.5
        await anyio.to_thread.run_sync(lambda: self._server.restart(crash=crash))
        self._users.broken, self._users.stale = False, True

    async def _deafen(self) -> None:
        """No notification is sent for longer than a rescan takes to come; probes are still heard."""
        told = await self._sql("SELECT pg_get_functiondef('gpustackd_notify'::regproc)")
        await self._sql(MUTE)
        await elapse(self.plan.rescan * 1.5, "until every daemon has scanned")
        await self._sql(told)

    async def _sql(self, statement: str) -> Any:
        connection = await asyncpg.connect(
            self._server.url(), server_settings={"application_name": "the storm"}, timeout=30
        )
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()


async def storm(plan: Plan, folder: Path) -> Outcome:
    """Run a plan; raise AssertionError for anything that does not hold."""
    started = time.monotonic()
    settings = {"max_connections": 100, "autovacuum": True, "fsync": False, "full_page_writes": False}
    path = model_directory(folder / "model", need=14)
    with tempfile.TemporaryDirectory(prefix="gpustackd-test-") as data:
        async with Server(data, settings=settings) as server:
            url = server.url()
            await migrate(url)
            users = Users(url, str(path), random.Random(plan.seed), plan.backlog)
            stuck = plan.lease + SLACK
            async with (
                crew(
                    url,
                    folder / "logs",
                    keep=5000,
                    excuse=NOT_UP,
                    lease=plan.lease,
                    rescan_interval=plan.rescan,
                ) as daemons,
                watching(url, stuck_after=stuck, undecided_after=plan.rescan + stuck) as watch,
            ):
                run = Storm(plan, server, daemons, users)
                async with site_on(url, folder) as site:
                    await Record.install(site.sql)
                    await users.prepare(site)
                await daemons.start(REPLICAS)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run.rage)
                    await users.act(lambda: run.over and users.inserted >= plan.instances)
                await _calm(plan, url, folder, run, users, watch)
            users.close()
    outcome = run.outcome
    outcome.seconds = time.monotonic() - started
    outcome.did, outcome.inserted = users.did, users.inserted
    outcome.events = daemons.tally()
    outcome.polls, outcome.blind = watch.polls, watch.blind
    return outcome


async def _calm(plan: Plan, url: str, folder: Path, run: Storm, users: Users, watch: Watch) -> None:
    """After the storm: all is decided, what waits moves up as places are given back, nothing is left."""
    timeout = plan.lease + plan.rescan + SLACK
    assert users.failed == [], "\n".join(users.failed[:10])
    async with site_on(url, folder) as site:
        await site.settled(timeout=timeout)
        while True:
            left = await site.sql.fetchval(
                "SELECT count(*) FROM model_instances i JOIN models m ON m.id = i.model_id"
                " WHERE m.name NOT LIKE 'huge-%'"
            )
            if not left:
                break
            gone = await site.sql.fetchval(
                "WITH gone AS (DELETE FROM model_instances WHERE worker_id IS NOT NULL OR state = 'ERROR'"
                " RETURNING 1) SELECT count(*) FROM gone"
            )
            if gone == 0:  # the whole fleet is free, and yet something that would fit waits
                await site.until(
                    "SELECT EXISTS (SELECT FROM model_instances WHERE worker_id IS NOT NULL)",
                    timeout=timeout,
                )
        assert await site.sql.fetchval("SELECT sum(vram_allocated) FROM gpu_devices") == 0
        assert await site.sql.fetchval("SELECT sum(ram_allocated) FROM workers") == 0
        assert not await site.sql.fetchval("SELECT count(*) FROM instance_claims")
        await site.clean()
        record = Record(site.sql)
        assert await record.broken() == []
        run.outcome.placed = await record.count("SCHEDULED", by="gpustackd %")
    assert watch.polls > 0
