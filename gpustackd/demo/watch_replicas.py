"""What somebody who changes a model's number of replicas writes, and what he then waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from gpustackd.demo.watch import LOOK
from gpustackd.store.postgres.connect import Connection

_NAMES = """
SELECT i.name, i.worker_id IS NOT NULL AS placed
  FROM model_instances i JOIN models m ON m.id = i.model_id WHERE m.name = $1 ORDER BY i.id"""
_STATE = """
UPDATE model_instances SET state = $2, state_message = $3
 WHERE name = ANY ($1::text[]) AND worker_id IS NOT NULL"""
_SECONDS = "SELECT extract(epoch FROM clock_timestamp() - $1::timestamptz)::double precision"


@dataclass(frozen=True, slots=True)
class Scaled:
    """What became of a number: instances that came and went, and after how many seconds all had a place."""

    came: tuple[str, ...]
    went: tuple[str, ...]
    seconds: float
    reached: bool


async def names(connection: Connection, model: str) -> list[str]:
    """Instances of a model, oldest first."""
    return [r["name"] for r in await connection.fetch(_NAMES, model)]


async def scale(connection: Connection, model: str, number: int, patience: float) -> Scaled:
    """`UPDATE models SET replicas = number`, and see it come true."""
    return await _watched(
        connection, model, number, patience, "UPDATE models SET replicas = $2 WHERE name = $1", model, number
    )


async def lose(connection: Connection, model: str, instance: str, patience: float) -> Scaled:
    """Delete one instance of a model that keeps its number, and see it come back."""
    number = len(await names(connection, model))
    return await _watched(
        connection, model, number, patience, "DELETE FROM model_instances WHERE name = $1", instance
    )


async def report(
    connection: Connection, instances: Sequence[str], state: str, message: str | None = None
) -> None:
    """As a worker does: its instances are in this state now."""
    await connection.execute(_STATE, list(instances), state, message)


async def _watched(
    connection: Connection, model: str, number: int, patience: float, statement: str, *values: object
) -> Scaled:
    ids = "SELECT i.id, i.name FROM model_instances i JOIN models m ON m.id = i.model_id WHERE m.name = $1"
    before = {r["id"]: r["name"] for r in await connection.fetch(ids, model)}
    began = await connection.fetchval("SELECT clock_timestamp()")
    await connection.execute(statement, *values)
    reached = False
    with anyio.move_on_after(patience):
        while not reached:
            rows = await connection.fetch(_NAMES, model)
            reached = len(rows) == number and all(r["placed"] for r in rows)
            if not reached:
                await anyio.sleep(LOOK / 4)
    seconds = await connection.fetchval(_SECONDS, began)
    after = {r["id"]: r["name"] for r in await connection.fetch(ids, model)}
    return Scaled(
        tuple(after[i] for i in sorted(after.keys() - before.keys())),
        tuple(before[i] for i in sorted(before.keys() - after.keys())),
        seconds,
        reached,
    )
