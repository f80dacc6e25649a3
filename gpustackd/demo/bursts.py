"""The stage in which all instances are placed: bursts of plain SQL, and one daemon killed during a burst."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpustackd.demo.daemon_processes import DaemonProcess, KillFirstToWork
from gpustackd.demo.models.examples import folder
from gpustackd.demo.narration import Narration
from gpustackd.demo.polling import poll
from gpustackd.errors import GpustackdError
from gpustackd.store.postgres.connect import Connection
from gpustackd.store.postgres.inventory import InventoryReads
from gpustackd.store.postgres.statements import statements

PATIENCE = 45.0
KILL_IN_BURST = 3

_UNDECIDED = """
SELECT name FROM model_instances
 WHERE state = 'ANALYZING' OR (state = 'PENDING' AND reasons IS NULL) ORDER BY id"""

_LATENCIES = """
SELECT count(*) AS n, percentile_cont(0.5) WITHIN GROUP (ORDER BY ms) AS p50,
       percentile_cont(0.9) WITHIN GROUP (ORDER BY ms) AS p90, max(ms) AS worst
  FROM (SELECT (extract(epoch FROM scheduled_at - created_at) * 1000)::double precision AS ms
          FROM model_instances WHERE scheduled_at IS NOT NULL) t"""

_PLACED_BY = """
SELECT replica, count(*) AS n FROM scheduling_decisions WHERE outcome = 'PLACED' GROUP BY 1 ORDER BY 1"""


async def insert_in_bursts(
    narration: Narration, connection: Connection, daemons: Sequence[DaemonProcess], lease: float
) -> None:
    """Insert the example instances and wait for each burst to be decided; `lease` in seconds is the daemons'.
    Raise GpustackdError where a burst is not decided in time."""
    narration.say("\nSixty instances by plain SQL, in bursts")
    for number, burst in enumerate(statements(folder() / "instances.sql"), 1):
        trap = KillFirstToWork(daemons, PATIENCE) if number == KILL_IN_BURST else None
        count = await execute(connection, burst)
        with narration.step(f"burst {number}, {count} instances") as notes:
            if trap is not None:
                victim = await trap.sprung()
                claimed = await _claimed(connection)
                notes.append(f"{victim.name} killed with SIGKILL while it worked on {claimed} of them")
                if claimed:
                    notes.append(f"taken over when their lease of {lease:g} s was over")
            await _all_decided(connection)
            counts = await InventoryReads(connection).counts()
            notes.append(", ".join(f"{n} {state}" for state, n in sorted(counts.items(), reverse=True)))
    latency = await connection.fetchrow(_LATENCIES)
    assert latency is not None
    narration.say(
        f"  INSERT to SCHEDULED over {latency['n']} placements: median {latency['p50']:.0f} ms,"
        f" 90 % within {latency['p90']:.0f} ms, slowest {latency['worst']:.0f} ms"
    )
    shares = await connection.fetch(_PLACED_BY)
    narration.say("  placed by " + ", ".join(f"{r['replica']}: {r['n']}" for r in shares))


async def execute(connection: Connection, statement: str) -> int:
    """Run a statement as psql would; how many rows it touched."""
    return int((await connection.execute(statement)).rpartition(" ")[2])


async def _all_decided(connection: Connection) -> None:
    """Wait until every instance is placed or has its reasons. Raise GpustackdError naming the others."""
    undecided: Sequence[Any] = ()

    async def none_left() -> bool | None:
        nonlocal undecided
        undecided = await connection.fetch(_UNDECIDED)
        return None if undecided else True

    if await poll(none_left, PATIENCE) is None:
        names = ", ".join(r["name"] for r in undecided[:10])
        raise GpustackdError(
            f"{len(undecided)} instances were not decided within {PATIENCE:.0f} s: {names}",
            "look into the logs of the daemons",
        )


async def _claimed(connection: Connection) -> int:
    """How many instances some daemon works on right now."""
    return int(await connection.fetchval("SELECT count(*) FROM model_instances WHERE state = 'ANALYZING'"))
