"""Workers by the age of their heartbeat: the statements of the health sweep, each one call."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpustackd.domain.windows import Windows
from gpustackd.store.postgres import PostgresStore

LIMIT = 100
"""Instances that one call moves: a transaction stays short."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """A cluster (None = workers without one) of which too many workers are down at once to be believed."""

    cluster: str | None
    down: int
    of: int


@dataclass(frozen=True, slots=True)
class Census:
    """What a sweep found."""

    silent: tuple[str, ...] = ()
    """Workers that became NOT_READY in it."""
    doubts: tuple[Doubt, ...] = ()
    down: int = 0
    """Workers that are not there and have not been given up."""
    draining: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """An instance that a sweep moved. `kind`: `unreachable`, `evicted`, `untaken`, `adrift`, `drained`."""

    kind: str
    id: int
    name: str
    model_id: int
    worker: str | None
    why: str = field(default="")


class Health:
    """Over the daemon's pool. Raises DatabaseUnavailable, and Contended where it had to yield."""

    def __init__(self, store: PostgresStore, windows: Windows) -> None:
        self._store = store
        self._windows = windows

    async def clock(self) -> float:
        """The database's clock, in seconds."""
        async with self._store.connection() as connection:
            return float(await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())"))

    async def sweep(self, watched: float) -> Census:
        """Look at all workers; silent ones become NOT_READY. `watched`: seconds without a gap before."""
        w = self._windows
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "SELECT * FROM gpustackd_watch_workers($1, $2, $3, $4, $5, $6)",
                w.grace, w.reschedule, watched, w.seen, w.share, w.least,
            )  # fmt: skip
        counts = {r["kind"]: r["number"] for r in rows if r["kind"] in ("down", "draining")}
        return Census(
            silent=tuple(r["name"] for r in rows if r["kind"] == "stale"),
            doubts=tuple(Doubt(r["name"], r["number"], r["of"]) for r in rows if r["kind"] == "doubt"),
            down=counts["down"],
            draining=counts["draining"],
        )

    async def leave_workers(self, watched: float) -> list[Moved]:
        """Instances of workers that are not there: UNREACHABLE, or placed anew. At most `LIMIT`."""
        w = self._windows
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "SELECT * FROM gpustackd_leave_workers($1, $2, $3, $4, $5, $6, $7)",
                w.grace, w.reschedule, w.unreachable, watched, w.share, w.least, LIMIT,
            )  # fmt: skip
        return [Moved(*r) for r in rows]

    async def overdue(self, watched: float) -> list[Moved]:
        """Instances that nobody took or reports, placed anew; stable ones forget their failures."""
        w = self._windows
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                "SELECT * FROM gpustackd_overdue($1, $2, $3, $4, $5, $6, $7, $8, $9)",
                w.pickup, w.unreachable, w.stable, 5 * w.pickup, watched, w.grace, w.share, w.least, LIMIT,
            )  # fmt: skip
        return [Moved(*r) for r in rows]
