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

    def add(self, more: WakeupBatch) -> bool:
        """Take over what came later; returns whether instances were created meanwhile."""
        self.created |= more.created
        self.models |= more.models
        self.cures |= more.cures
        self.deleted |= more.deleted
        self.full |= more.full
        return bool(more.created)

    @property
    def anything(self) -> bool:
        return bool(self.created or self.models or self.cures or self.deleted or self.full)


class Wakeups:
    """One per process. `notify` never blocks (the listener calls it); `next` waits for something."""

    def __init__(self, most: int = 20_000) -> None:
        """`most`: ids of new instances that are kept; beyond that a full scan is asked for."""
        self._most = most
        self._batch = WakeupBatch()
        self._event = anyio.Event()

    def notify(self, wake: Wake) -> None:
        """Something happened. A kind that is not known asks for a full scan."""
        batch = self._batch
        if wake.kind == "created":
            batch.created.update(wake.ids)
            if not wake.ids or len(batch.created) > self._most:
                batch.full = True
        elif wake.kind == "model":
            batch.models.update(wake.ids)
        elif wake.kind in _CURES:
            batch.cures |= _CURES[wake.kind]
            batch.deleted |= wake.kind == "deleted"
        else:
            batch.full = True
        self._event.set()

    def rescan(self) -> None:
        """Ask for a full scan."""
        self._batch.full = True
        self._event.set()

    async def next(self) -> WakeupBatch:
        """Everything since the last call, as soon as there is something."""
        while not self._batch.anything:
            self._event = anyio.Event()
            await self._event.wait()
        return self.take()

    def take(self) -> WakeupBatch:
        """Everything since the last call, perhaps nothing."""
        batch, self._batch = self._batch, WakeupBatch()
        return batch
