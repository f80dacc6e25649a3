"""The stage in which a model is scaled up, loses an instance, and is scaled down by one number in SQL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpustackd.demo.narration import Narration
from gpustackd.demo.polling import INTERVAL, poll
from gpustackd.store.postgres.connect import Connection

MODEL = "bge-base-en"
"""Small: there is room for more of it on any fleet."""
ADDED = 4
REMOVED = 3
PATIENCE = 30.0

_INSTANCES = """
SELECT i.id, i.name, i.worker_id IS NOT NULL AS placed
  FROM model_instances i JOIN models m ON m.id = i.model_id WHERE m.name = $1 ORDER BY i.id"""
_REPORT = """
UPDATE model_instances SET state = $2, state_message = $3
 WHERE name = ANY ($1::text[]) AND worker_id IS NOT NULL"""
_SECONDS = "SELECT extract(epoch FROM clock_timestamp() - $1::timestamptz)::double precision"
_SCALE = "UPDATE models SET replicas = $2 WHERE name = $1"
_DELETE = "DELETE FROM model_instances WHERE name = $1"


@dataclass(frozen=True, slots=True)
class _Change:
    """Instances that came and went by a statement, and seconds until all of the model had a place."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    seconds: float
    reached: bool
    """Whether the model has its number, all placed."""


async def scale_up_and_down(narration: Narration, connection: Connection) -> None:
    """From so many instances to four more, and back by three: the broken ones go first."""
    narration.say("\nA number of replicas")
    start = len(await _names(connection))
    number = start + ADDED
    up = await _observe(connection, number, _SCALE, MODEL, number)
    narration.check(
        up.reached and len(up.added) == ADDED,
        f"replicas = {number} of {MODEL}, which has {start}: {', '.join(up.added)} came and had their places"
        f" {up.seconds * 1000:.0f} ms later",
    )
    names = await _names(connection)
    await _report(connection, names, "RUNNING")
    deleted = names[1]
    again = await _observe(connection, number, _DELETE, deleted)
    narration.check(
        again.reached and again.added == (deleted,),
        f"DELETE of {deleted}: replaced by {', '.join(again.added) or 'none'} after"
        f" {again.seconds * 1000:.0f} ms, under the name that was free",
    )
    # one fails, the one that came back is not up yet: both go before any that serves
    broken = names[0]
    await _report(connection, [broken], "ERROR", "the engine ended with exit code 1")
    await _report(connection, again.added, "STARTING")
    down = await _observe(connection, number - REMOVED, _SCALE, MODEL, number - REMOVED)
    narration.check(
        down.reached and {broken, *again.added} < set(down.removed) and len(down.removed) == REMOVED,
        f"replicas = {number - REMOVED} removed {broken}, which had failed, {deleted}, which was not up yet,"
        f" and of those that ran only {', '.join(set(down.removed) - {broken, deleted})}",
    )


async def _names(connection: Connection) -> list[str]:
    """Instances of the model, oldest first."""
    return [r["name"] for r in await connection.fetch(_INSTANCES, MODEL)]


async def _report(
    connection: Connection, instances: Sequence[str], state: str, message: str | None = None
) -> None:
    """As a worker does: its instances are in this state now."""
    await connection.execute(_REPORT, list(instances), state, message)


async def _observe(connection: Connection, number: int, statement: str, *values: object) -> _Change:
    """Run a statement, and wait until the model has `number` instances, all placed."""

    async def all_placed() -> bool | None:
        rows = await connection.fetch(_INSTANCES, MODEL)
        return (len(rows) == number and all(r["placed"] for r in rows)) or None

    before = {r["id"]: r["name"] for r in await connection.fetch(_INSTANCES, MODEL)}
    began = await connection.fetchval("SELECT clock_timestamp()")
    await connection.execute(statement, *values)
    reached = await poll(all_placed, PATIENCE, INTERVAL / 4) is not None
    seconds = await connection.fetchval(_SECONDS, began)
    after = {r["id"]: r["name"] for r in await connection.fetch(_INSTANCES, MODEL)}
    return _Change(
        tuple(after[i] for i in sorted(after.keys() - before.keys())),
        tuple(before[i] for i in sorted(before.keys() - after.keys())),
        seconds,
        reached,
    )
