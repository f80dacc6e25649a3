"""What a worker says to the database: heartbeats, and reports on the instances that are placed on it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import asyncpg

from gpustackd.domain.lifecycle import InstanceState
from gpustackd.errors import Contended, DatabaseUnavailable

CONNECTION: Mapping[str, Any] = {"lock_timeout": "5s", "statement_timeout": "20s", "command_timeout": 40.0}
"""Bounds of a worker's connection: a heartbeat that waits for others' locks yields and comes again."""

_BEAT = "UPDATE workers SET heartbeat_at = now() WHERE id = $1 RETURNING state"
_MINE = """
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
class Task:
    """An instance that its main worker has to do something about."""

    id: int
    name: str
    state: InstanceState
    worker_id: int
    epoch: int
    restarts: int


@contextmanager
def _told() -> Iterator[None]:
    """Errors of one statement as ours: Contended, DatabaseUnavailable."""
    try:
        yield
    except (
        asyncpg.LockNotAvailableError,
        asyncpg.QueryCanceledError,
        asyncpg.DeadlockDetectedError,
        asyncpg.SerializationError,
    ) as error:
        raise Contended(f"a statement had to yield to others: {error}") from error
    except TimeoutError as error:
        raise DatabaseUnavailable(
            "the database does not answer", "look at its load and the network"
        ) from error


async def worker_states(connection: asyncpg.Connection, names: Collection[str]) -> dict[str, tuple[int, str]]:
    """Workers of these names that exist: name -> (id, state)."""
    with _told():
        rows = await connection.fetch(
            "SELECT name, id, state FROM workers WHERE name = ANY ($1::text[])", list(names)
        )
    return {r["name"]: (r["id"], r["state"]) for r in rows}


async def beat(connection: asyncpg.Connection, worker_id: int) -> str | None:
    """One heartbeat, by the database's clock; the worker's state as it is then, None = the worker is gone.

    Raise Contended or DatabaseUnavailable.
    """
    with _told():
        found = await connection.fetchval(_BEAT, worker_id)
        return None if found is None else str(found)


async def tasks_of(connection: asyncpg.Connection, workers: Collection[int]) -> list[Task]:
    """Instances whose main worker is one of these and that do not run yet, or are to be reported again."""
    with _told():
        rows = await connection.fetch(_MINE, list(workers))
    return [
        Task(
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
    connection: asyncpg.Connection, task: Task, state: InstanceState, message: str | None = None
) -> bool:
    """Move an instance on, if it is still where and what the task says; False = it is not ours any more."""
    with _told():
        try:
            done = await connection.execute(
                _REPORT, task.id, task.worker_id, task.epoch, task.state.value, state.value, message
            )
        except asyncpg.CheckViolationError:  # somebody moved it between our look and our write
            return False
    return str(done) == "UPDATE 1"
