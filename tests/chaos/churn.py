"""The churn: many models whose numbers change at random while workers come and go and daemons are killed.

At rest every model has exactly its number. A witness of our own, a trigger in the database, looks at every
deletion that a daemon makes: no healthy replica goes while an unhealthy one stays.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from tests.acceptance.daemons import Crew, crew
from tests.acceptance.machines import GIB, W, model_directory, site_on
from tests.acceptance.record import Record, watching
from tests.integration.world import connected
from tests.waiting import elapse

REPLICAS = 3
WITNESS = """
CREATE SCHEMA churn;
CREATE TABLE churn.breaches (
    model_id bigint, gone text, gone_state text, stayed text, stayed_state text, stayed_worker text);
CREATE FUNCTION churn.judge() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') NOT LIKE 'gpustackd %' THEN
        RETURN NULL;
    END IF;
    -- A worker whose state changed this moment may have been another when the daemon looked.
    INSERT INTO churn.breaches
    SELECT g.model_id, g.name, g.state, s.name, s.state, sw.state
      FROM gone g
      JOIN workers gw ON gw.id = g.worker_id
      JOIN model_instances s ON s.model_id = g.model_id AND s.draining_since IS NULL
      LEFT JOIN workers sw ON sw.id = s.worker_id
     WHERE g.state = 'RUNNING' AND gw.state = 'READY'
       AND NOT (s.state = 'RUNNING' AND coalesce(sw.state = 'READY', false))
       AND s.created_at < now()
       AND coalesce(greatest(gw.updated_at, sw.updated_at), '-infinity') < clock_timestamp() - interval '2 s';
    RETURN NULL;
END $$;
CREATE TRIGGER zz_churn AFTER DELETE ON model_instances
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION churn.judge();
"""


@dataclass(frozen=True)
class Plan:
    """How much of it. Seconds."""

    models: int
    changes: int
    kills: int
    workers: int
    most: int = 5
    """Replicas that a model ever asks for."""
    pause: float = 0.05
    """Longest pause between two changes."""
    kill_every: float = 4.0
    lease: float = 2.0
    rescan: float = 10.0
    drain_window: float = 0.0
    seed: int = 1


@dataclass
class Outcome:
    """What happened."""

    changes: int = 0
    kills: int = 0
    did: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    synced: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    rest: float = 0.0
    """Seconds from the last change to rest."""

    def __str__(self) -> str:
        done = ", ".join(f"{n} {what}" for what, n in sorted(self.synced.items()))
        users = ", ".join(f"{n} {what}" for what, n in sorted(self.did.items()))
        return (
            f"{self.changes} changes of numbers, {self.kills} daemons killed, in {self.seconds:.0f} s;"
            f" at rest {self.rest:.1f} s after the last change\n"
            f"  workers and their instances: {users}\n"
            f"  daemons: {self.events['replicas.synced']} times brought to the number ({done}),"
            f" {self.events['instance.scheduled']} placements,"
            f" {self.events['lease.expired']} sweeps of expired leases\n"
            "  every model has its number; 0 breaches"
        )


class Churn:
    """One run of a plan on a database with the schema."""

    def __init__(self, plan: Plan, url: str, daemons: Crew) -> None:
        self.plan = plan
        self.outcome = Outcome()
        self.over = False
        self._url = url
        self._daemons = daemons
        self._chance = random.Random(plan.seed)

    async def prepare(self, sql: Any, path: str) -> None:
        """Workers of four cards, and models of which five share a card."""
        for n in range(self.plan.workers):
            await self._worker(sql, n)
        await sql.execute(
            "INSERT INTO models (name, source, local_path, backend, categories, backend_parameters, env,"
            " replicas, placement_strategy) SELECT 'm' || n, 'local_path', $1, 'vLLM', '[\"llm\"]',"
            " '[\"--gpu-memory-utilization=0.19\"]',"
            " jsonb_build_object('GPUSTACK_MODEL_VRAM_CLAIM', $2::text), 1,"
            " CASE n % 3 WHEN 0 THEN 'binpack' WHEN 1 THEN 'spread' END FROM generate_series(1, $3) n",
            path,
            str(4 * GIB),
            self.plan.models,
        )

    async def _worker(self, sql: Any, n: int) -> None:
        w = W(f"w{n}", 128, "4x24", "2/1")
        async with sql.transaction():
            worker = await sql.fetchval(
                "INSERT INTO workers (name, state, ram_total, vram_reserved) VALUES ($1, 'READY', $2, $3)"
                " RETURNING id",
                w.name,
                w.ram * GIB,
                GIB,
            )
            await sql.execute(
                'INSERT INTO gpu_devices (worker_id, "index", type, vendor, vram_total)'
                " SELECT $1, i - 1, 'cuda', 'nvidia', v"
                " FROM unnest($2::bigint[]) WITH ORDINALITY AS x (v, i)",
                worker,
                w.cards,
            )

    async def rage(self) -> None:
        """All changes and all kills; then every worker is back."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            tasks.start_soon(self._come_and_go)
            async with anyio.create_task_group() as deeds:
                deeds.start_soon(self._change)
                deeds.start_soon(self._kill)
            self.over = True
            tasks.cancel_scope.cancel()
        sql = await connected(self._url, application_name="users")
        try:
            await sql.execute("UPDATE workers SET state = 'READY' WHERE state <> 'READY'")
        finally:
            sql.terminate()

    async def _change(self) -> None:
        """Users: one number after another, now and then several at once or a row by hand."""
        sql = await connected(self._url, application_name="users")
        plan, chance = self.plan, self._chance
        try:
            while self.outcome.changes < plan.changes:
                kind = chance.random()
                if kind < 0.05:
                    several = chance.randint(2, 10)
                    await sql.execute(
                        "UPDATE models SET replicas = floor(random() * $1) WHERE id = ANY (ARRAY("
                        "SELECT id FROM models ORDER BY random() LIMIT $2))", plan.most + 1, several,
                    )  # fmt: skip
                    self.outcome.changes += several
                elif kind < 0.10:
                    await sql.execute(
                        "DELETE FROM model_instances WHERE id = ANY (ARRAY("
                        "SELECT id FROM model_instances ORDER BY random() LIMIT 2))"
                    )
                    self.outcome.did["deleted by hand"] += 1
                elif kind < 0.13:
                    await sql.execute(
                        "INSERT INTO model_instances (name, model_id)"
                        " SELECT 'hand-' || $1::text, id FROM models ORDER BY random() LIMIT 1",
                        f"{chance.getrandbits(48):x}",
                    )
                    self.outcome.did["inserted by hand"] += 1
                else:
                    await sql.execute(
                        "UPDATE models SET replicas = $1 WHERE name = $2",
                        chance.randint(0, plan.most),
                        f"m{chance.randint(1, plan.models)}",
                    )
                    self.outcome.changes += 1
                await elapse(chance.uniform(0, plan.pause), "between two changes")
        finally:
            sql.terminate()

    async def _kill(self) -> None:
        """SIGKILL to a daemon every few seconds; another one in its place."""
        while self.outcome.kills < self.plan.kills:
            await elapse(self._chance.uniform(0.5, 1.0) * self.plan.kill_every, "between two kills")
            fit = [d for d in self._daemons if d.is_ready]
            if len(fit) < 2:
                continue
            await self._chance.choice(fit).kill()
            self.outcome.kills += 1
            await self._daemons.launch()

    async def _work(self) -> None:
        """The workers: what is SCHEDULED comes to run, a few fail and some of those come back."""
        deeds = {
            "started": "state = 'STARTING' WHERE state = 'SCHEDULED'",
            "running": "state = 'RUNNING' WHERE state IN ('STARTING', 'UNREACHABLE')",
            "failed": "state = 'ERROR' WHERE state = 'RUNNING' AND random() < 0.01",
            "restarted": "state = 'SCHEDULED' WHERE state = 'ERROR' AND random() < 0.2",
        }
        sql = await connected(self._url, application_name="the workers")
        try:
            while True:
                for name, what in deeds.items():
                    done = await sql.execute(
                        f"UPDATE model_instances SET {what} AND id = ANY (ARRAY("
                        "SELECT i.id FROM model_instances i"
                        " JOIN workers w ON w.id = i.worker_id AND w.state = 'READY'"
                        " ORDER BY i.id FOR NO KEY UPDATE OF i SKIP LOCKED))"
                    )
                    self.outcome.did[name] += int(done.rpartition(" ")[2])
                await elapse(0.1, "between two rounds of the workers")
        finally:
            sql.terminate()

    async def _come_and_go(self) -> None:
        """Machines: not ready for a moment, in maintenance, removed and installed anew."""
        sql = await connected(self._url, application_name="the machines")
        chance = self._chance
        try:
            while True:
                n = chance.randrange(self.plan.workers)
                state = chance.choice(["NOT_READY", "UNREACHABLE", "MAINTENANCE", "gone"])
                if state == "gone":
                    await sql.execute("DELETE FROM workers WHERE name = $1", f"w{n}")
                else:
                    await sql.execute("UPDATE workers SET state = $1 WHERE name = $2", state, f"w{n}")
                self.outcome.did[f"workers {state}"] += 1
                await elapse(chance.uniform(0.1, 1.0), "a machine is away")
                if state == "gone":
                    await self._worker(sql, n)
                else:
                    await sql.execute("UPDATE workers SET state = 'READY' WHERE name = $1", f"w{n}")
        finally:
            if not sql.is_closed():
                with anyio.CancelScope(shield=True):
                    names = {r["name"] for r in await sql.fetch("SELECT name FROM workers")}
                    for n in range(self.plan.workers):
                        if f"w{n}" not in names:
                            await self._worker(sql, n)
            sql.terminate()


REST = """
SELECT NOT EXISTS (SELECT FROM model_instances WHERE draining_since IS NOT NULL OR worker_id IS NULL)
   AND NOT EXISTS (SELECT FROM models m WHERE m.replicas <> (SELECT count(*) FROM model_instances i
                                                              WHERE i.model_id = m.id))"""


async def churn(plan: Plan, url: str, folder: Path) -> Outcome:
    """Run a plan; raise AssertionError for anything that does not hold."""
    started = time.monotonic()
    path = model_directory(folder / "model", need=14)
    settings = {"lease": plan.lease, "rescan_interval": plan.rescan, "drain_window": plan.drain_window}
    async with crew(url, folder / "logs", **settings) as daemons, watching(url), site_on(url, folder) as site:
        record = await Record.install(site.sql)
        await site.sql.execute(WITNESS)
        run = Churn(plan, url, daemons)
        await run.prepare(site.sql, str(path))
        await daemons.start(REPLICAS)
        await run.rage()
        began = time.monotonic()
        await site.until(REST, timeout=120 + plan.drain_window)
        run.outcome.rest = time.monotonic() - began
        # and it stays so, whoever looks: nobody does anything more
        moves = "SELECT coalesce(max(n), 0) FROM recorder.moves WHERE was IS NULL OR became IS NULL"
        before = await site.sql.fetchval(moves)
        for daemon in daemons:
            scans = await daemon.metric_now("gpustackd_rescans_total")
            await daemon.metric("gpustackd_rescans_total", lambda n, before=scans: n > before, timeout=120)
        assert await site.sql.fetchval(moves) == before
        assert await site.sql.fetchval(REST), await site.story()
        breaches = [dict(r) for r in await site.sql.fetch("SELECT * FROM churn.breaches")]
        assert breaches == []
        # lost workers are left by the daemons, which is theirs to do; everything else of the record holds
        broken = [line for line in await record.broken() if " taken from " not in line]
        assert broken == []
        await site.clean()
    run.outcome.events = daemons.tally()
    for line in daemons.whole("replicas.synced"):
        for what in ("added", "deleted", "draining", "taken_back"):
            run.outcome.synced[what] += line.get(what, 0)
    run.outcome.seconds = time.monotonic() - started
    return run.outcome
