"""Instances on their way through this replica: what is known of them, what is claimed, what is next."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import anyio

from gpustackd.daemon.queue.instance_queue import Taken, WakeOrigin
from gpustackd.domain.placement_hints import NO_HINTS, AvoidedPlace, PlacementHints
from gpustackd.ports import Claim, WaitingInstance


@dataclass(slots=True)
class Work:
    """One instance being worked on. Without a claim it was refused before: it is tried in memory first."""

    taken: Taken
    name: str
    claim: Claim | None = None
    signature: str | None = None
    """Of the refusal that its row carries."""
    epoch: int = 0
    attempts: int = 0
    clashes: int = 0
    hints: PlacementHints = NO_HINTS
    shunned: tuple[AvoidedPlace, ...] = ()
    """Places that clashed again, left alone for as long as this try lasts."""
    group: Hashable = None
    """Demand group, once decided."""

    @property
    def id(self) -> int:
        return self.taken.id

    @property
    def model_id(self) -> int:
        return self.taken.model_id

    @property
    def from_rescan(self) -> bool:
        return self.taken.origin is WakeOrigin.RESCAN


class WorkState:
    """Work that is ready for a decision, and the claims that are held."""

    def __init__(self) -> None:
        self.rows: dict[int, WaitingInstance] = {}
        """Rows of instances in the queue, as last seen or written."""
        self.held: dict[int, Claim] = {}
        self.reading: dict[int, list[Work]] = {}
        """Model id -> claimed instances that wait for its facts."""
        self._ready: deque[Work] = deque()
        self._more = anyio.Event()
        self._less = anyio.Event()

    def __len__(self) -> int:
        return len(self._ready)

    def push(self, work: list[Work], *, front: bool = False) -> None:
        if front:
            self._ready.extendleft(reversed(work))
        else:
            self._ready.extend(work)
        if work:
            self._more.set()

    async def take(self, limit: int, wait: float) -> list[Work]:
        """Up to `limit` pieces of work; an empty list after `wait` seconds without any."""
        if not self._ready:
            self._more = anyio.Event()
            with anyio.move_on_after(wait):
                await self._more.wait()
        taken = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
        self._less.set()
        return taken

    async def room(self, most: int) -> None:
        """Wait until fewer than `most` pieces are ready."""
        while len(self._ready) >= most:
            self._less = anyio.Event()
            await self._less.wait()

    def let_go(self, instance_id: int) -> None:
        self.held.pop(instance_id, None)
