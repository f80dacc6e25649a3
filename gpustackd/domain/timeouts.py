"""How long is waited for workers and instances before they count as lost. All in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`interval`, `grace` and `reschedule` are the `GPUSTACK_*` settings that clusters have set already."""

    interval: float = 30.0
    """Between two heartbeats of one worker."""
    grace: float = 150.0
    """Silence after which a worker is NOT_READY."""
    reschedule: float = 300.0
    """Silence after which its instances are placed elsewhere."""
    unreachable: float = 900.0
    """How long an instance that nobody reports, on a worker that beats, is waited for."""
    pickup: float = 60.0
    """SCHEDULED and not taken."""
    stable: float = 600.0
    """Of running, after which earlier failures are history."""
    backoff: float = 10.0
    """Before the second restart; each later one takes twice as long."""
    avoid: float = 1800.0
    """For which any other place is preferred to one where an instance failed."""
    share: float = 0.55
    """Of a cluster's workers: where more are down at once, nothing is evicted."""
    least: int = 3
    """Workers that have to be down for that."""

    @property
    def seen(self) -> float:
        """Silence that must have been watched before a worker is called silent: one that is there beats
        within it, whatever happened before."""
        return min(self.grace, 1.5 * self.interval)

    @property
    def gap(self) -> float:
        """Between two looks, after which nothing is known of the time in between."""
        return min(max(3 * self.sweep, self.grace / 2, 2.0), 45.0)

    @property
    def sweep(self) -> float:
        """Between two looks at the workers."""
        return min(max(min(self.grace, self.reschedule) / 10, 0.2), 15.0)

    @property
    def care(self) -> float:
        """Between two looks at instances that are not taken, fail or are to leave."""
        return min(max(self.pickup / 12, 0.2), 5.0)


@dataclass(slots=True)
class Watch:
    """How long the workers have been watched without a gap, by our clock and the database's: what nobody
    watched, while this daemon or the database stood still, is nobody's silence."""

    gap: float
    _since: float | None = None
    _last: tuple[float, float] = (0.0, 0.0)
    _now: tuple[float, float] = (0.0, 0.0)

    def look(self, ours: float, theirs: float) -> float:
        """A look begins, at these readings of a monotonic clock of ours and of the database's clock. Returns
        for how long there was no gap before it."""
        self._now = (ours, theirs)
        if self._since is None or max(ours - self._last[0], theirs - self._last[1]) > self.gap:
            self._since = ours
        return ours - self._since

    def done(self) -> None:
        """The look succeeded. One that did not is no look: what follows it has a gap before it."""
        self._last = self._now
