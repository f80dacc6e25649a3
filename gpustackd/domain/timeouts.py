"""How long silent workers and idle instances are waited for before they count as lost. All in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What the settings say, and the intervals that follow from it."""

    heartbeat_interval: float = 30.0
    """Between two heartbeats of one worker."""
    grace: float = 150.0
    """Without a heartbeat, before a worker is NOT_READY."""
    reschedule: float = 300.0
    """Without a heartbeat, before a worker's instances are placed anew."""
    unreachable: float = 900.0
    """For an instance that is UNREACHABLE although its worker sends heartbeats, before it is placed anew."""
    pickup: float = 60.0
    """For a SCHEDULED instance that its worker does not take, before it is placed anew."""
    stable: float = 600.0
    """Of running, before earlier failures are forgotten."""
    backoff: float = 10.0
    """Before the second restart; each later one waits twice as long."""
    avoid: float = 1800.0
    """During which any other place is preferred to one where an instance failed."""
    max_down_share: float = 0.55
    """Share of a cluster's workers: while more are down at once, nothing is evicted."""
    min_down: int = 3
    """Workers that have to be down for that."""

    @property
    def min_watched(self) -> float:
        """Time that workers must have been watched before one is called silent: one that is alive sends a
        heartbeat within it, whatever happened before."""
        return min(self.grace, 1.5 * self.heartbeat_interval)

    @property
    def max_gap(self) -> float:
        """Between two sweeps; after a longer gap nothing is known of the time in between."""
        return min(max(3 * self.sweep_interval, self.grace / 2, 2.0), 45.0)

    @property
    def sweep_interval(self) -> float:
        """Between two sweeps over the workers."""
        return min(max(min(self.grace, self.reschedule) / 10, 0.2), 15.0)

    @property
    def recovery_interval(self) -> float:
        """Between two rounds over instances that are not taken, have failed or are to leave."""
        return min(max(self.pickup / 12, 0.2), 5.0)


@dataclass(slots=True)
class ObservationPeriod:
    """How long the workers have been watched without a gap, by our clock and the database's.

    Time that nobody watched, because this daemon or the database stood still, is not held against a worker.
    """

    max_gap: float
    _since: float | None = None
    _last: tuple[float, float] = (0.0, 0.0)
    _now: tuple[float, float] = (0.0, 0.0)

    def begin(self, ours: float, theirs: float) -> float:
        """Begin a sweep at these readings of our monotonic clock and of the database's clock. Returns the
        seconds watched without a gap before it."""
        self._now = (ours, theirs)
        if self._since is None or max(ours - self._last[0], theirs - self._last[1]) > self.max_gap:
            self._since = ours
        return ours - self._since

    def complete(self) -> None:
        """The sweep succeeded. One that did not counts as never done, so a gap precedes the next one."""
        self._last = self._now
