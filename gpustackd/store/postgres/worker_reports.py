"""What a worker's agent writes: heartbeats, and the states of the instances placed on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from gpustackd.domain.lifecycle import InstanceState
from gpustackd.errors import DatabaseUnavailable
from gpustackd.store.postgres.connect import CONTENDED, Connection, contended

CONNECTION: Mapping[str, Any] = {"lock_timeout": "5s", "statement_timeout": "20s", "command_timeout": 40.0}
"""Options of an agent's connection: a heartbeat that waits for a lock gives way and comes again."""

_HEARTBEAT = "UPDATE workers SET heartbeat_at = now() WHERE id = $1 RETURNING state"
_TASKS = """
SELECT i.id, i.name, i.state, i.worker_id, i.placement_epoch, i.restart_count
  FROM model_instances i JOIN workers w ON w.id = i.worker_id
 WHERE i.worker_id = ANY ($1::bigint[])
   AND (i.state IN ('SCHEDULED', 'INITIALIZING', 'DOWNLOADING', 'STARTING')
        OR (i.state = 'UNREACHABLE' AND w.state IN ('READY', 'MAINTENANCE')))
 ORDER BY i.id"""
_REPORT = """
UPDATE model_instances SET state = $5, state_message = $6, updated_at = now()
 WHERE id = $1 AND worker_id = $2 AND placement_epoch = $3 AND state = $4"""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """An instance whose main worker has to act: it does not run yet, or has to be reported again."""

    id: int
    name: str
    state: InstanceState
    worker_id: int
    epoch: int
    restarts: int


@contextmanager
def _translated() -> Iterator[None]:
    """Errors of one statement as Contended or DatabaseUnavailable; `connected` translates a lost connection."""
    try:
        yield
    except CONTENDED as error:
        raise contended(error) from error
    except TimeoutError as error:
        raise DatabaseUnavailable("the database does not answer", "check its load and the network") from error


async def worker_states(connection: Connection, names: Collection[str]) -> dict[str, tuple[int, str]]:
    """Workers of these names that exist: name -> (id, state). Raises Contended or DatabaseUnavailable."""
    with _translated():
        rows = await connection.fetch(
            "SELECT name, id, state FROM workers WHERE name = ANY ($1::text[])", list(names)
        )
    return {r["name"]: (r["id"], r["state"]) for r in rows}


async def heartbeat(connection: Connection, worker_id: int) -> str | None:
    """One heartbeat, by the database's clock. Returns the worker's state after it; None = the row is gone.

    Raises Contended or DatabaseUnavailable.
    """
    with _translated():
        state = await connection.fetchval(_HEARTBEAT, worker_id)
        return None if state is None else str(state)


async def tasks_of(connection: Connection, workers: Collection[int]) -> list[AgentTask]:
    """Tasks of the instances whose main worker is one of these. Raises Contended or DatabaseUnavailable."""
    with _translated():
        rows = await connection.fetch(_TASKS, list(workers))
    return [
        AgentTask(
            r["id"],
            r["name"],
            InstanceState(r["state"]),
            r["worker_id"],
            r["placement_epoch"],
            r["restart_count"] or 0,
        )
        for r in rows
    ]


async def report(
    connection: Connection, task: AgentTask, state: InstanceState, message: str | None = None
) -> bool:
    """Write a state, if the instance is still as the task says; False = it is not this worker's any more.

    Raises Contended or DatabaseUnavailable.
    """
    with _translated():
        try:
            done = await connection.execute(
                _REPORT, task.id, task.worker_id, task.epoch, task.state.value, state.value, message
            )
        except asyncpg.CheckViolationError:  # it was moved since it was read: no lawful move
            return False
    return str(done) == "UPDATE 1"
