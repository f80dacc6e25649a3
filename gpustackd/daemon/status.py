"""How this replica is: what the HTTP surface and systemd are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from gpustackd.ports import DatabaseHealth
from gpustackd.store.postgres.listen import ListenerStatus

BEAT_LIMIT = 15.0
"""Seconds without a turn of the decide loop after which the daemon is not alive."""
DEAF_RESCAN_EVERY = 10.0
"""Seconds between rescans while no notification is heard."""


@dataclass(slots=True)
class DaemonStatus:
    """One per process; each field has one writer: the decide loop (`last_beat`), the database check
    (`health`), the supervisor (`problem`, `stopping`), the listener (`listener`)."""

    listener: ListenerStatus
    last_beat: float = field(default_factory=monotonic)
    health: DatabaseHealth | None = None
    problem: str = "starting"
    """Why nothing is scheduled; empty while a session runs."""
    stopping: bool = False

    def beat(self) -> None:
        """The decide loop made a turn."""
        self.last_beat = monotonic()

    def beat_age(self) -> float:
        """Seconds since the last turn of the decide loop."""
        return monotonic() - self.last_beat

    @property
    def alive(self) -> bool:
        return self.beat_age() <= BEAT_LIMIT

    def set_health(self, health: DatabaseHealth) -> None:
        """What the database said of itself just now."""
        self.health = health

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Whether `/readyz` says yes, and why."""
        health, listening = self.health, self.listener.listening
        ready = health is not None and not self.problem and not self.stopping
        return ready, {
            "database": "ok" if health is not None else self.problem,
            "revision": health.revision if health else None,
            "writable": bool(health and health.writable),
            "listening": listening,
            "wakes": "notifications" if listening else f"rescan every {DEAF_RESCAN_EVERY:g} s",
            "stopping": self.stopping,
        }
