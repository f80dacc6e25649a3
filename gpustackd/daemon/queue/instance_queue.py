"""The instance queue: every waiting instance once, in the lane that says what it waits for.

    put ──► ACTIVE ──take──► IN_FLIGHT ── done ───► forgotten
              ▲                  │ ────── retry ──► BACKOFF    until its time, or a cure
              │                  │ ────── park ───► PARKED     until a cure, grouped by demand
              └── time, cure, activate, or a put or cure that came while it was in flight

One event loop owns it; nothing awaits but `take`, so no step can be seen half done. Nothing is lost: what
arrives while its id is in flight is remembered, and what finds no room is counted and asks for a rescan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import NamedTuple

import anyio
import anyio.lowlevel

from gpustackd.daemon.queue.lanes import Lane, Lanes, ParkedGroup, QueuedInstance, WakeOrigin
from gpustackd.domain.outcome import Cure


class QueueEntry(NamedTuple):
    """One id to work on, as it left the queue."""

    id: int
    model_id: int
    priority: int
    created: float
    origin: WakeOrigin


class InstanceQueue:
    """See the module. `clock` is monotonic seconds; `limit` bounds all lanes together."""

    def __init__(self, clock: Callable[[], float], limit: int = 100_000) -> None:
        self._clock = clock
        self._limit = limit
        self._lanes = Lanes()
        self._waiter: anyio.Event | None = None
        self._closed = False
        self._scan = 0
        self.dropped = 0
        """Ids refused or pushed out for want of room, ever."""
        self.overflowed = False
        """Something was dropped since the last `rescan_started`: only a rescan can find it."""

    # -- reading --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._lanes.items)

    def lane_of(self, instance_id: int) -> Lane | None:
        """Where an id is; None = not here."""
        item = self._lanes.items.get(instance_id)
        return item.lane if item else None

    def counts(self) -> dict[Lane, int]:
        """Ids per lane."""
        return dict(self._lanes.counts)

    @property
    def rescan_wanted(self) -> bool:
        """Whether ids were dropped and there is room again to look for them."""
        return self.overflowed and 2 * len(self) <= self._limit

    # -- coming in ------------------------------------------------------------------------------------

    def put(
        self,
        instance_id: int,
        priority: int,
        created: float,
        *,
        model_id: int,
        origin: WakeOrigin = WakeOrigin.NOTIFY,
        due_in: float = 0.0,
        size: float = 0.0,
        batch: int | None = None,
    ) -> bool:
        """An instance waits for work, as its row says. Equal priorities go by `size`, larger
        first, then by `created`, older first; `due_in` > 0 holds an id back for so many seconds. Returns
        False where there is no room for it.

        Instances of one statement are of one age. Of these, those of one `batch` (None = of one model) follow
        each other, so that what is worked out for one serves all; batch 0 comes first, in the order of ids.

        An id that is in BACKOFF or PARKED stays there, only its rank is brought up to date. One in flight
        comes back once when it is finished.
        """
        if self._closed:
            return False
        item = self._lanes.items.get(instance_id)
        if item is None:
            batch = model_id if batch is None else batch
            item = QueuedInstance(instance_id, model_id, priority, created, origin, self._scan, size, batch)
            if len(self) >= self._limit and not self._make_room(item):
                return False
            self._start(item, due_in)
            return True
        item.scan = self._scan
        size = size or item.size  # known once, known for good
        if (item.priority, item.created, item.size) != (priority, created, size):
            self._lanes.change_rank(item, priority, created, size)
        if item.lane is Lane.IN_FLIGHT:
            item.again, item.origin = True, origin
        return True

    # -- going out ------------------------------------------------------------------------------------

    def take_nowait(self, limit: int) -> list[QueueEntry]:
        """Up to `limit` ids to work on now, best first. In flight until one of the three ways back."""
        if self._closed:
            return []
        now = self._clock()
        while (due := self._lanes.backoff.first()) and due[0][0] <= now:
            self._activate(due[1], WakeOrigin.DUE)
        batch: list[QueueEntry] = []
        while len(batch) < limit and (first := self._lanes.active.first()):
            item = first[1]
            self._lanes.leave(item)
            self._lanes.enter(item, Lane.IN_FLIGHT)
            batch.append(QueueEntry(item.id, item.model_id, item.priority, item.created, item.origin))
        return batch

    async def take(self, limit: int) -> list[QueueEntry]:
        """As `take_nowait`, but wait until there is something; an empty list says that the queue is closed.

        Cancelled while waiting, it has taken nothing.
        """
        while True:
            await anyio.lowlevel.checkpoint()
            batch = self.take_nowait(limit)
            if batch or self._closed:
                return batch
            # one event for all who wait; whoever changes what they wait for sets it and drops it
            self._waiter = self._waiter or anyio.Event()
            due = self._lanes.backoff.first()
            with anyio.move_on_after(None if due is None else max(0.0, due[0][0] - self._clock())):
                await self._waiter.wait()

    def close(self) -> None:
        """Take in and give out nothing more; who waits gets an empty batch. What is in flight may finish."""
        self._closed = True
        self._signal()

    # -- the three ways back from flight: each returns the lane the id is in now, None = forgotten. -------
    # -- Raise ValueError for an id that is not in flight. ------------------------------------------------

    def done(self, instance_id: int) -> Lane | None:
        """Finished for good, unless it was put again meanwhile."""
        item = self._landed(instance_id)
        if self._at_once(item, Cure.NONE):
            return Lane.ACTIVE
        self._lanes.forget(item)
        self._made_room()
        return None

    def retry(self, instance_id: int, delay: float, cures: Cure = Cure.MODEL) -> Lane:
        """Try again after `delay` seconds, or as soon as one of `cures` comes."""
        item = self._landed(instance_id)
        if not self._at_once(item, cures):
            item.cures = cures
            self._hold(item, delay)
        return item.lane

    def park(
        self,
        instance_id: int,
        group: Hashable,
        cures: Cure,
        signature: str | None = None,
    ) -> Lane:
        """No place now: wait for one of `cures` among those of the same demand, which is of one model.

        An edit of the model is always a cure. A cure that came while the decision was made counts: the
        decision may not have seen it, so the id is tried again at once.
        """
        item = self._landed(instance_id)
        if not self._at_once(item, cures | Cure.MODEL):
            item.cures, item.signature = cures | Cure.MODEL, signature
            self._lanes.enter(item, Lane.PARKED, group)
        return item.lane

    # -- cures ----------------------------------------------------------------------------------------

    def wake(self, cure: Cure, model_ids: Collection[int] | None = None) -> list[ParkedGroup]:
        """Something happened that may help instances (of these models; None = of any).

        Ids in BACKOFF that it could help become active; ids in flight remember it. The groups that it could
        help are returned, best first, and stay where they are: try one decision per group in memory, then
        `activate` as many as fit, or `set_cures` where the answer is still no.
        """
        for item in self._lanes.in_flight.values():
            if model_ids is None or item.model_id in model_ids:
                item.missed |= cure
        for item in self._lanes.backoff_with(cure, model_ids):
            self._activate(item, WakeOrigin.CURE)
        return self.parked_groups(cure, model_ids)

    def parked_groups(
        self, cure: Cure = Cure.ANY, model_ids: Collection[int] | None = None
    ) -> list[ParkedGroup]:
        """Groups that one of these events could help, best head first."""
        return [group.view() for group in self._lanes.groups_with(cure, model_ids)]

    def activate(self, group: Hashable, n: int | None = None, origin: WakeOrigin = WakeOrigin.CURE) -> int:
        """Make the best `n` of a group active (None = all); returns how many that were."""
        moved = 0
        while (n is None or moved < n) and (known := self._lanes.groups.get(group)):
            self._activate(known.members.head(), origin)
            moved += 1
        return moved

    def activate_changed(self, group: Hashable, signature: str, origin: WakeOrigin = WakeOrigin.CURE) -> int:
        """Make those of a group active whose rows carry another refusal than `signature`; returns how
        many."""
        known = self._lanes.groups.get(group)
        if known is None or known.signatures.keys() == {signature}:
            return 0
        changed = [item for item in known.members if item.signature != signature]
        for item in changed:
            self._activate(item, origin)
        return len(changed)

    def set_cures(self, group: Hashable, cures: Cure) -> None:
        """A new decision for a parked group says what could help it from now on."""
        known = self._lanes.groups.get(group)
        if known is not None:
            known.cures = cures | Cure.MODEL

    # -- full scans -----------------------------------------------------------------------------------

    def rescan_started(self) -> None:
        """A full scan begins: all rows that wait will be put in, those dropped before too."""
        self.overflowed = False
        self._scan += 1

    def rescan_finished(self) -> int:
        """The scan saw every row that waits. Forget ids that neither it nor the one before saw: others placed
        or deleted them. (One scan is not enough: another replica may have been at work on a row.)
        Returns how many there were. Do not call it for a scan that failed or was cut short.
        """
        unseen = [
            item
            for item in self._lanes.items.values()
            if item.scan < self._scan - 1 and item.lane is not Lane.IN_FLIGHT
        ]
        for item in unseen:
            self._forget(item)
        return len(unseen)

    # -- inside ---------------------------------------------------------------------------------------

    def _start(self, item: QueuedInstance, due_in: float) -> None:
        if due_in > 0:
            item.cures = Cure.MODEL
            self._hold(item, due_in)
        else:
            self._lanes.enter(item, Lane.ACTIVE)
            self._signal()

    def _hold(self, item: QueuedInstance, delay: float) -> None:
        item.due = self._clock() + delay
        self._lanes.enter(item, Lane.BACKOFF)
        if self._lanes.backoff.head() is item:  # those who wait must wake earlier
            self._signal()

    def _activate(self, item: QueuedInstance, origin: WakeOrigin) -> None:
        self._lanes.leave(item)
        item.origin = origin
        self._lanes.enter(item, Lane.ACTIVE)
        self._signal()

    def _landed(self, instance_id: int) -> QueuedInstance:
        """The item, taken out of flight."""
        item = self._lanes.in_flight.get(instance_id)
        if item is None:
            raise ValueError(f"instance {instance_id} is not in flight")
        self._lanes.leave(item)
        item.scan = self._scan
        return item

    def _at_once(self, item: QueuedInstance, cures: Cure) -> bool:
        """Make a landed item active again where something came meanwhile that its outcome ignores."""
        # flags are slow to combine, and as a rule nothing came
        again, cured = item.again, item.missed is not Cure.NONE and bool(item.missed & cures)
        item.again, item.missed = False, Cure.NONE
        if again or cured:
            item.origin = item.origin if again else WakeOrigin.CURE
            self._lanes.enter(item, Lane.ACTIVE)
            self._signal()
        return again or cured

    def _make_room(self, newcomer: QueuedInstance) -> bool:
        """Full: the newest of the lowest priority goes. False = that is the newcomer."""
        self.dropped += 1
        self.overflowed = True
        worst = self._lanes.worst()
        if worst is None or newcomer.worth < worst.worth:
            return False
        self._forget(worst)
        return True

    def _forget(self, item: QueuedInstance) -> None:
        self._lanes.leave(item)
        self._lanes.forget(item)
        self._made_room()

    def _made_room(self) -> None:
        if 10 * len(self) < 9 * self._limit:
            self._lanes.forget_worst()

    def _signal(self) -> None:
        if self._waiter is not None:
            self._waiter.set()
            self._waiter = None
