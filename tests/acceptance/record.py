"""What happened to every instance, written down by triggers of our own; and an audit at every poll.

The record is in a schema of its own and takes no part in what it records. Each move says who made it (the
`application_name` of the session: a daemon's begins with `gpustackd`).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import asyncpg

from gpustackd.domain.lifecycle import InstanceState, lawful
from gpustackd.store.audit.audit import audit
from tests.integration.world import connected
from tests.waiting import elapse, until

POLL = 0.2
GONE = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)
"""What a connection raises whose server goes away."""

INSTALL = """
CREATE SCHEMA recorder;
CREATE TABLE recorder.moves (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, instance_id bigint, was text, became text,
    epoch bigint, worker_id bigint, by text, lost boolean, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE recorder.bookings (
    n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, instance_id bigint, worker_id bigint,
    gpu_device_id bigint, worker_state text, by text, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION recorder.note_move() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO recorder.moves (instance_id, became, epoch, worker_id, by)
        VALUES (NEW.id, NEW.state, NEW.placement_epoch, NEW.worker_id, current_setting('application_name'));
    ELSIF TG_OP = 'DELETE' THEN
        INSERT INTO recorder.moves (instance_id, was, epoch, worker_id, by)
        VALUES (OLD.id, OLD.state, OLD.placement_epoch, OLD.worker_id, current_setting('application_name'));
    ELSIF (OLD.state, OLD.placement_epoch, OLD.worker_id)
          IS DISTINCT FROM (NEW.state, NEW.placement_epoch, NEW.worker_id) THEN
        INSERT INTO recorder.moves (instance_id, was, became, epoch, worker_id, by, lost)
        VALUES (NEW.id, OLD.state, NEW.state, NEW.placement_epoch, NEW.worker_id,
                current_setting('application_name'),
                OLD.worker_id IS NOT NULL AND EXISTS (
                    SELECT FROM workers w
                     WHERE (w.state IN ('NOT_READY', 'UNREACHABLE', 'ERROR', 'DELETING')
                            OR (w.state = 'MAINTENANCE' AND w.maintenance @> '{"drain": true}'))
                       AND (w.id = OLD.worker_id OR OLD.distributed_servers -> 'subordinate_workers'
                            @> jsonb_build_array(jsonb_build_object('worker_id', w.id)))));
    END IF;
    RETURN NULL;
END $$;
CREATE FUNCTION recorder.note_booking() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO recorder.bookings (instance_id, worker_id, gpu_device_id, worker_state, by)
    SELECT NEW.instance_id, NEW.worker_id, NEW.gpu_device_id, w.state, current_setting('application_name')
      FROM workers w WHERE w.id = NEW.worker_id;
    RETURN NULL;
END $$;
CREATE TRIGGER zz_recorder AFTER INSERT OR UPDATE OR DELETE ON model_instances
    FOR EACH ROW EXECUTE FUNCTION recorder.note_move();
CREATE TRIGGER zz_recorder AFTER INSERT ON instance_claims
    FOR EACH ROW EXECUTE FUNCTION recorder.note_booking();
"""

TAKEN = "('INITIALIZING', 'DOWNLOADING', 'STARTING', 'RUNNING')"


class Record:
    """What the triggers wrote; `install` it before anything happens."""

    def __init__(self, sql: Any) -> None:
        self._sql = sql

    @classmethod
    async def install(cls, sql: Any) -> Record:
        await sql.execute(INSTALL)
        return cls(sql)

    async def states(self, instance_id: int) -> list[str]:
        """The states that an instance went through, in order."""
        rows = await self._sql.fetch(
            "SELECT became FROM recorder.moves"
            " WHERE instance_id = $1 AND became IS DISTINCT FROM was ORDER BY n",
            instance_id,
        )
        return [r["became"] for r in rows]

    async def came(self, instance_id: int, state: str) -> None:
        """Wait until an instance has come into a state, however briefly."""

        async def there() -> bool:
            return state in await self.states(instance_id)

        await until(
            there, f"instance {instance_id} comes into {state}", shows=lambda: self.story(instance_id)
        )

    async def story(self, instance_id: int) -> str:
        """The states of an instance, for a failure's text."""
        return f"it was {' -> '.join(await self.states(instance_id))}"

    async def count(self, became: str, by: str = "%") -> int:
        """How often an instance came into a state, by whom."""
        found: int = await self._sql.fetchval(
            "SELECT count(*) FROM recorder.moves"
            " WHERE became = $1 AND was IS DISTINCT FROM became AND by LIKE $2",
            became,
            by,
        )
        return found

    async def broken(self) -> list[str]:
        """Breaches of what must hold over time: lawful moves, one binding for an instance and epoch, made by
        who claimed it, to READY workers only, hands off what a worker has taken as long as that worker is
        there (and is not being drained). Empty = none."""
        found: list[str] = []
        rows = await self._sql.fetch(
            "SELECT was, became, bool_and(worker_id IS NULL) AS cleared, count(*) AS n FROM recorder.moves"
            " WHERE was <> became GROUP BY 1, 2"
        )
        found += [
            f"{r['n']} moves {r['was']} -> {r['became']}"
            for r in rows
            if not lawful(InstanceState(r["was"]), InstanceState(r["became"]), placement_cleared=r["cleared"])
        ]
        rows = await self._sql.fetch(
            "SELECT instance_id, epoch, array_agg(by) AS by FROM recorder.moves"
            " WHERE became = 'SCHEDULED' AND was = 'ANALYZING' GROUP BY 1, 2 HAVING count(*) > 1"
        )
        found += [f"instance {r['instance_id']} bound twice in epoch {r['epoch']}: {r['by']}" for r in rows]
        rows = await self._sql.fetch(
            "SELECT b.instance_id, b.epoch, b.by, c.by AS owner"
            " FROM recorder.moves b LEFT JOIN recorder.moves c"
            " ON c.instance_id = b.instance_id AND c.epoch = b.epoch AND c.became = 'ANALYZING'"
            " WHERE b.was = 'ANALYZING' AND b.became = 'SCHEDULED' AND c.by IS DISTINCT FROM b.by"
        )
        found += [
            f"instance {r['instance_id']} bound by {r['by']} in epoch {r['epoch']}, claimed by {r['owner']}"
            for r in rows
        ]
        rows = await self._sql.fetch("SELECT * FROM recorder.bookings WHERE worker_state <> 'READY'")
        found += [f"instance {r['instance_id']} bound to a worker that was {r['worker_state']}" for r in rows]
        rows = await self._sql.fetch(
            "SELECT * FROM recorder.moves"
            f" WHERE was IN {TAKEN} AND by LIKE 'gpustackd %' AND became IS NOT NULL"
            " AND NOT (lost AND became IN ('UNREACHABLE', 'PENDING'))"
        )
        found += [
            f"instance {r['instance_id']} taken from {r['was']} to {r['became']} by {r['by']}" for r in rows
        ]
        return found


@dataclass
class Watch:
    """What the polls saw."""

    polls: int = 0
    blind: int = 0
    """Polls that the server did not answer."""
    breaches: list[str] = field(default_factory=list)
    slowest: float = 0.0


@asynccontextmanager
async def watching(
    url: str, *, stuck_after: float | None = None, undecided_after: float | None = None
) -> AsyncIterator[Watch]:
    """Audit the database five times a second until this ends; a breach at any poll fails the test.

    `stuck_after`: an ANALYZING row whose lease ended so many seconds ago is a breach too; `undecided_after`:
    one that has been PENDING for so long without having heard a reason.
    """
    watch = Watch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, url, watch, stuck_after, undecided_after)
        yield watch
        tasks.cancel_scope.cancel()
    assert watch.breaches == [], "\n".join(watch.breaches[:10])


async def _watch(url: str, watch: Watch, stuck_after: float | None, undecided_after: float | None) -> None:
    connection: Any = None
    try:
        while True:
            started = time.monotonic()
            try:
                if connection is None or connection.is_closed():
                    connection = await connected(url, application_name="the auditor")
                await _look(connection, watch)
                for seconds, question in ((stuck_after, STUCK), (undecided_after, UNDECIDED)):
                    if seconds is not None:
                        rows = await connection.fetch(question, seconds)
                        watch.breaches += [f"poll {watch.polls}: {r['name']}: {r['how']}" for r in rows]
            except GONE:
                watch.blind += 1
                if connection is not None:
                    connection.terminate()
                connection = None
            watch.slowest = max(watch.slowest, time.monotonic() - started)
            await elapse(POLL, "between two audits")
    finally:
        if connection is not None:
            connection.terminate()


async def _look(connection: Any, watch: Watch) -> None:
    found = await audit(connection)
    watch.polls += 1
    watch.breaches += [f"poll {watch.polls}: rule {b.rule}, {b.what}: {b.how}" for b in found.breaches]


STUCK = """
SELECT name, 'ANALYZING past its lease by ' || (clock_timestamp() - lease_until) AS how FROM model_instances
 WHERE state = 'ANALYZING' AND lease_until < clock_timestamp() - make_interval(secs => $1)"""
UNDECIDED = """
SELECT name, 'PENDING and undecided for ' || (clock_timestamp() - updated_at) AS how FROM model_instances
 WHERE state = 'PENDING' AND reasons IS NULL AND updated_at < clock_timestamp() - make_interval(secs => $1)"""
