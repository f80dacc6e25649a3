"""Instances on their way through this replica: rows that wait, claims that are held, work that is ready.

The only owner of this state: the loops of a session change it through these methods alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import anyio

from gpustackd.daemon.queue.instance_queue import QueueEntry
from gpustackd.daemon.queue.lanes import WakeOrigin
from gpustackd.domain.placement_hints import NO_HINTS, AvoidedPlace, PlacementHints
from gpustackd.ports import Claim, WaitingInstance


@dataclass(slots=True)
class WorkItem:
    """One instance being worked on. Without a claim it was refused before: it is tried in memory first."""

    entry: QueueEntry
    name: str
    claim: Claim | None = None
    signature: str | None = None
    """Of the refusal that its row carries."""
    epoch: int = 0
    attempts: int = 0
    conflicts: int = 0
    hints: PlacementHints = NO_HINTS
    avoid: tuple[AvoidedPlace, ...] = ()
    """Places that conflicted more than once; avoided for as long as this try lasts."""
    group: Hashable = None
    """Demand group, once decided."""

    @property
    def id(self) -> int:
        return self.entry.id

    @property
    def model_id(self) -> int:
        return self.entry.model_id

    @property
    def from_rescan(self) -> bool:
        return self.entry.origin is WakeOrigin.RESCAN


class WorkState:
    """One per session. Everything but `take`, `wait_for_room` and `finished` is immediate."""

    def __init__(self) -> None:
        self._rows: dict[int, WaitingInstance] = {}
        """Rows of instances in the queue, as last seen or written."""
        self._held: dict[int, Claim] = {}
        self._reading: dict[int, list[WorkItem]] = {}
        """Model id -> instances that wait for its facts."""
        self._unblocked: set[Hashable] = set()
        self._ready: deque[WorkItem] = deque()
        self._in_progress = 0
        self._added = anyio.Event()
        self._taken = anyio.Event()
        self._idle = anyio.Event()

    # -- rows that wait -------------------------------------------------------------------------------

    def row(self, instance_id: int) -> WaitingInstance | None:
        """The row as last seen or written; None = not known."""
        return self._rows.get(instance_id)

    def put_row(self, row: WaitingInstance) -> None:
        """Remember a row as it was just read."""
        self._rows[row.id] = row

    def drop_row(self, instance_id: int) -> None:
        """Forget a row: placed, or not ours to work on."""
        self._rows.pop(instance_id, None)

    def retain_rows(self, wanted: Callable[[int], bool]) -> None:
        """Forget the rows of all other instances."""
        for instance_id in [i for i in self._rows if not wanted(i)]:
            del self._rows[instance_id]

    def unknown(self, ids: Iterable[int]) -> list[int]:
        """Those of these instances whose rows are not known."""
        return [i for i in ids if i not in self._rows]

    def refused(self, item: WorkItem, signature: str | None, due_in: float) -> None:
        """The row of a refused instance says so now, or said so already."""
        row = self._rows.get(item.id)
        if row is not None:
            self._rows[item.id] = replace(
                row, epoch=item.epoch, attempts=item.attempts, signature=signature, due_in=due_in
            )

    def waiting_by_model(self) -> Counter[int]:
        """Number of known rows by model id."""
        return Counter(row.model_id for row in self._rows.values())

    # -- claims ---------------------------------------------------------------------------------------

    def hold(self, item: WorkItem, claim: Claim) -> None:
        """The claim was written: the instance is ours."""
        item.claim, item.epoch, item.attempts = claim, claim.epoch, claim.attempts
        self._held[item.id] = claim

    def release(self, instance_id: int) -> None:
        """The claim ended: committed, refused, lost or given back."""
        self._held.pop(instance_id, None)

    def held_ids(self) -> list[int]:
        """Instances whose leases have to be renewed."""
        return list(self._held)

    @property
    def held_count(self) -> int:
        return len(self._held)

    # -- models being read ----------------------------------------------------------------------------

    def reading_count(self, model_id: int) -> int:
        """Instances that wait for the facts of this model."""
        return len(self._reading.get(model_id, ()))

    def wait_for_facts(self, item: WorkItem) -> bool:
        """The item waits for its model. True = it is the first one: somebody has to read the model."""
        waiting = self._reading.setdefault(item.model_id, [])
        waiting.append(item)
        return len(waiting) == 1

    def facts_read(self, model_id: int) -> None:
        """All that waited for this model is ready."""
        self.push(self._reading.pop(model_id, ()))

    # -- parked groups that fit again -----------------------------------------------------------------

    def unblock(self, group: Hashable) -> None:
        """The last try of this parked group found a place: as one is placed, the next one follows."""
        self._unblocked.add(group)

    def block(self, group: Hashable) -> None:
        """An instance of this group was refused."""
        self._unblocked.discard(group)

    def is_unblocked(self, group: Hashable) -> bool:
        return group in self._unblocked

    # -- ready work -----------------------------------------------------------------------------------

    def push(self, items: Collection[WorkItem]) -> None:
        """Ready to be decided, after what is ready already."""
        self._ready.extend(items)
        if items:
            self._added.set()

    def push_front(self, items: Sequence[WorkItem]) -> None:
        """To be decided anew, before anything else."""
        self._ready.extendleft(reversed(items))
        if items:
            self._added.set()

    async def take(self, limit: int, wait: float) -> list[WorkItem]:
        """Up to `limit` items, in progress until `end`; an empty list after `wait` seconds without any."""
        if not self._ready:
            self._added = anyio.Event()
            with anyio.move_on_after(wait):
                await self._added.wait()
        items = [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]
        self._taken.set()
        if items:
            self._in_progress += 1
        return items

    async def wait_for_room(self, limit: int) -> None:
        """Wait until fewer than `limit` items are ready."""
        while len(self._ready) >= limit:
            self._taken = anyio.Event()
            await self._taken.wait()

    # -- batches in progress --------------------------------------------------------------------------

    @property
    def batches_in_progress(self) -> int:
        """Batches that are being decided, committed, or wait for their commit."""
        return self._in_progress

    def begin(self) -> None:
        """One more batch is in progress."""
        self._in_progress += 1

    def end(self) -> None:
        """A batch of `take` or `begin` is finished."""
        self._in_progress -= 1
        if not self._in_progress and not self._ready:
            self._idle.set()

    async def finished(self) -> None:
        """Wait until nothing is ready, being decided or being committed."""
        while self._in_progress or self._ready:
            self._idle = anyio.Event()
            await self._idle.wait()
