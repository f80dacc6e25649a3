"""Wake-ups gathered until somebody looks: many notifications, one look."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from gpustackd.domain.outcome import Cure
from gpustackd.ports import Wake

_CURES = {
    "capacity": Cure.CAPACITY,
    "worker": Cure.WORKER | Cure.CAPACITY,
    "files": Cure.FILES,
    "backends": Cure.BACKENDS,
    "deleted": Cure.NONE,
}


@dataclass(slots=True)
class WakeupBatch:
    """What happened since the last look."""

    created: set[int] = field(default_factory=set)
    models: set[int] = field(default_factory=set)
    cures: Cure = Cure.NONE
    deleted: bool = False
    full: bool = False
    """Look at everything: at start, at a rescan, after a reconnect, on overflow."""
    listening_began: bool = False

    def add(self, more: WakeupBatch) -> bool:
        """Take over what came later; returns whether instances were created meanwhile."""
        self.created |= more.created
        self.models |= more.models
        self.cures |= more.cures
        self.deleted |= more.deleted
        self.full |= more.full
        self.listening_began |= more.listening_began
        return bool(more.created)

    @property
    def anything(self) -> bool:
        return bool(self.created or self.models or self.cures or self.deleted or self.full)


class Wakeups:
    """`tell` is called from the listener (never blocks); `next` waits until there is something."""

    def __init__(self, most: int = 20_000) -> None:
        self._most = most
        self._now = WakeupBatch()
        self._event = anyio.Event()

    def tell(self, wake: Wake) -> None:
        now = self._now
        if wake.kind == "created":
            now.created.update(wake.ids)
            if not wake.ids or len(now.created) > self._most:
                now.full = True
        elif wake.kind == "model":
            now.models.update(wake.ids)
        elif wake.kind in _CURES:
            now.cures |= _CURES[wake.kind]
            now.deleted |= wake.kind == "deleted"
        else:
            now.full = True
        self._event.set()

    def rescan(self) -> None:
        """Ask for a full scan."""
        self._now.full = True
        self._event.set()

    async def next(self) -> WakeupBatch:
        """Everything since the last call."""
        while not self._now.anything:
            self._event = anyio.Event()
            await self._event.wait()
        return self.take()

    def take(self) -> WakeupBatch:
        """Everything since the last call, perhaps nothing."""
        found, self._now = self._now, WakeupBatch()
        return found
