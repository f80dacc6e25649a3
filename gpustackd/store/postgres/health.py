"""Workers by the age of their heartbeat: the statements of the health sweep, each one call."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpustackd.domain.timeouts import Timeouts
from gpustackd.store.postgres.store import PostgresStore

LIMIT = 100
"""Instances that one call moves: a transaction stays short."""

_WATCHED = (
    "CASE WHEN extract(epoch FROM clock_timestamp()) - $2::float8 > $3::float8 THEN 0 ELSE $1::float8 END"
)
"""Seconds watched ($1) as of the look at the clock ($2): nothing, if a gap ($3) came between that and now."""


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


class WorkerHealthStore:
    """Over the daemon's pool. Raises DatabaseUnavailable, and Contended where it had to yield."""

    def __init__(self, store: PostgresStore, windows: Timeouts) -> None:
        self._store = store
        self._windows = windows
        self._asked = float("inf")

    async def clock(self) -> float:
        """The database's clock, in seconds. What follows counts as watched only if it comes soon after."""
        async with self._store.connection() as connection:
            self._asked = float(await connection.fetchval("SELECT extract(epoch FROM clock_timestamp())"))
        return self._asked

    async def sweep(self, watched: float) -> Census:
        """Look at all workers; silent ones become NOT_READY. `watched`: seconds without a gap before."""
        w = self._windows
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                f"SELECT * FROM gpustackd_watch_workers($4, $5, {_WATCHED}, $6, $7, $8)",
                watched, self._asked, w.gap, w.grace, w.reschedule, w.seen, w.share, w.least,
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
                f"SELECT * FROM gpustackd_leave_workers($4, $5, $6, {_WATCHED}, $7, $8, $9)",
                watched, self._asked, w.gap, w.grace, w.reschedule, w.unreachable, w.share, w.least, LIMIT,
            )  # fmt: skip
        return [Moved(*r) for r in rows]

    async def overdue(self, watched: float) -> list[Moved]:
        """Instances that nobody took or reports, placed anew; stable ones forget their failures."""
        w = self._windows
        async with self._store.connection() as connection:
            rows = await connection.fetch(
                f"SELECT * FROM gpustackd_overdue($4, $5, $6, $7, {_WATCHED}, $8, $9, $10, $11)",
                watched, self._asked, w.gap, w.pickup, w.unreachable, w.stable, 5 * w.pickup, w.grace,
                w.share, w.least, LIMIT,
            )  # fmt: skip
        return [Moved(*r) for r in rows]
