"""Workers by the age of their heartbeat: the statements of the health sweep, each one call."""

from __future__ import annotations

from dataclasses import dataclass

from gpustackd.domain.timeouts import Timeouts
from gpustackd.store.postgres.connections import Connections

BATCH = 100
"""Instances that one call moves at most, so that a transaction stays short."""

_WATCHED = (
    "CASE WHEN extract(epoch FROM clock_timestamp()) - $2::float8 > $3::float8 THEN 0 ELSE $1::float8 END"
)
"""Seconds that workers were watched ($1) when the clock was read ($2); 0 after a gap ($3) since then."""


@dataclass(frozen=True, slots=True)
class MassOutage:
    """A cluster (None = workers without one) of which so many workers are down at once that the observer is
    suspected first."""

    cluster: str | None
    down: int
    of: int


@dataclass(frozen=True, slots=True)
class WorkerSweep:
    """What a sweep saw."""

    silent: tuple[str, ...] = ()
    """Names of workers that became NOT_READY in it."""
    outages: tuple[MassOutage, ...] = ()
    down: int = 0
    """Workers that are down and whose instances were not all placed anew yet."""
    draining: int = 0
    """Workers that are to be emptied."""


@dataclass(frozen=True, slots=True)
class MovedInstance:
    """An instance that a sweep moved. `kind`: `unreachable`, `evicted`, `untaken`, `adrift`."""

    kind: str
    id: int
    name: str
    model_id: int
    worker: str | None
    why: str = ""


class WorkerHealthStore:
    """Over the daemon's pool. Raises DatabaseUnavailable or Contended."""

    def __init__(self, connections: Connections, timeouts: Timeouts) -> None:
        self._connections = connections
        self._timeouts = timeouts
        self._clock_read = float("inf")

    async def clock(self) -> float:
        """The database's clock in seconds. Time watched counts only in calls that come soon after."""
        now = await self._connections.fetchval("SELECT extract(epoch FROM clock_timestamp())")
        self._clock_read = float(now)
        return self._clock_read

    async def sweep(self, watched: float) -> WorkerSweep:
        """Look at all workers; silent ones become NOT_READY. `watched`: seconds without a gap before."""
        t = self._timeouts
        rows = await self._connections.fetch(
            f"SELECT * FROM gpustackd_watch_workers($4, $5, {_WATCHED}, $6, $7, $8)",
            watched, self._clock_read, t.max_gap, t.grace, t.reschedule, t.min_watched, t.max_down_share,
            t.min_down,
        )  # fmt: skip
        counts = {r["kind"]: r["number"] for r in rows if r["kind"] in ("down", "draining")}
        return WorkerSweep(
            silent=tuple(r["name"] for r in rows if r["kind"] == "stale"),
            outages=tuple(MassOutage(r["name"], r["number"], r["of"]) for r in rows if r["kind"] == "doubt"),
            down=counts["down"],
            draining=counts["draining"],
        )

    async def evict_from_lost_workers(self, watched: float) -> list[MovedInstance]:
        """Instances of workers that are down become UNREACHABLE, later PENDING. At most `BATCH`."""
        t = self._timeouts
        rows = await self._connections.fetch(
            f"SELECT * FROM gpustackd_leave_workers($4, $5, $6, {_WATCHED}, $7, $8, $9)",
            watched, self._clock_read, t.max_gap, t.grace, t.reschedule, t.unreachable, t.max_down_share,
            t.min_down, BATCH,
        )  # fmt: skip
        return [MovedInstance(*r) for r in rows]

    async def requeue_overdue(self, watched: float) -> list[MovedInstance]:
        """Instances that their worker did not take or does not report become PENDING, at most `BATCH`; those
        that run stably have their failures reset."""
        t = self._timeouts
        rows = await self._connections.fetch(
            f"SELECT * FROM gpustackd_overdue($4, $5, $6, $7, {_WATCHED}, $8, $9, $10, $11)",
            watched, self._clock_read, t.max_gap, t.pickup, t.unreachable, t.stable, 5 * t.pickup, t.grace,
            t.max_down_share, t.min_down, BATCH,
        )  # fmt: skip
        return [MovedInstance(*r) for r in rows]
