"""The lanes of the instance queue: where each id stands, in what order, and what could move it on.

Mechanics only: every id is in exactly one lane, and `enter`, `leave` and `change_rank` keep the counts, the
order and the groups in step. When something moves is decided in `instance_queue`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from gpustackd.daemon.queue.heap import RemovableHeap
from gpustackd.domain.outcome import Cure


class Lane(StrEnum):
    """What an id in the queue waits for."""

    ACTIVE = "active"
    BACKOFF = "backoff"
    PARKED = "parked"
    IN_FLIGHT = "in_flight"


class WakeOrigin(StrEnum):
    """What made an id active; the metrics count what only a rescan found."""

    START = "start"
    NOTIFY = "notify"
    RESCAN = "rescan"
    CURE = "cure"
    DUE = "due"


class QueuedInstance:
    """One id. `stamp` is new whenever it enters a lane or changes its rank there, and 0 outside: so old heap
    entries are known. No stamp is ever used again, not even after an id was forgotten and put anew."""

    __slots__ = (
        "again", "batch", "created", "cures", "due", "group", "id", "lane", "missed", "model_id",
        "origin", "priority", "scan", "signature", "size", "stamp",
    )  # fmt: skip

    def __init__(
        self,
        id: int,  # noqa: A002
        model_id: int,
        priority: int,
        created: float,
        origin: WakeOrigin,
        scan: int,
        size: float = 0.0,
        batch: int = 0,
    ) -> None:
        self.id = id
        self.model_id = model_id
        self.priority = priority
        self.created = created
        self.size = size
        """The larger ones of a priority come first; all 0 where the order is by age."""
        self.batch = batch
        """Of those of one age, those of one batch follow each other."""
        self.origin = origin
        self.lane = Lane.ACTIVE
        self.scan = scan
        """Number of the rescan under way or over when its row was last known to wait."""
        self.stamp = 0
        self.due = 0.0
        """When BACKOFF ends, by the queue's clock."""
        self.group: DemandGroup | None = None
        self.cures = Cure.NONE
        self.signature: str | None = None
        """Of the refusal that its row carries."""
        self.again = False
        """Put once more while in flight."""
        self.missed = Cure.NONE
        """Cures that came while in flight."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Lowest for the one to work on first: highest priority, largest, then oldest."""
        return (-self.priority, -self.size, self.created, self.batch, self.id)

    @property
    def worth(self) -> tuple[float, ...]:
        """Lowest for the one to drop first: lowest priority, then newest."""
        return (self.priority, -self.created, -self.id)


class DemandGroup:
    """WaitingInstance items of one demand."""

    __slots__ = ("cures", "key", "members", "model_id", "signatures")

    def __init__(self, key: Hashable, model_id: int) -> None:
        self.key = key
        self.model_id = model_id
        self.cures = Cure.NONE
        """Of all that came in since it was empty: one too many costs a decision, one too few a long wait."""
        self.members: RemovableHeap[QueuedInstance] = RemovableHeap()
        self.signatures: dict[str | None, int] = {}

    def view(self) -> ParkedGroup:
        """The group as others see it now."""
        head = self.members.head()
        return ParkedGroup(
            self.key, self.model_id, self.cures, len(self.members), head.priority, head.created,
            frozenset(self.signatures),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ParkedGroup:
    """Instances of one demand that wait for a cure: one decision in memory answers for all of them."""

    key: Hashable
    """What `park` was given."""
    model_id: int
    cures: Cure
    count: int
    priority: int
    """Of the best of them, as `created`."""
    created: float
    signatures: frozenset[str | None]
    """Signatures of the refusals that their rows carry."""


class Lanes:
    """All items, by lane."""

    def __init__(self) -> None:
        self.items: dict[int, QueuedInstance] = {}
        self.active: RemovableHeap[QueuedInstance] = RemovableHeap()
        self.backoff: RemovableHeap[QueuedInstance] = RemovableHeap()
        self.in_flight: dict[int, QueuedInstance] = {}
        self.groups: dict[Hashable, DemandGroup] = {}
        self.counts = dict.fromkeys(Lane, 0)
        self._stamps = count(1)
        self._groups_of_model: dict[int, dict[Hashable, DemandGroup]] = {}
        self._backoff_cures: dict[Cure, int] = dict.fromkeys(Cure.ANY, 0)
        self._worst: RemovableHeap[QueuedInstance] | None = None
        """Everything not in flight, the one to drop first; kept only while the queue is full or nearly so."""

    def enter(self, item: QueuedInstance, lane: Lane, key: Hashable = None) -> None:
        """Put an item that is in no lane into one; `key` names the group for PARKED."""
        item.lane, item.stamp = lane, next(self._stamps)
        self.items[item.id] = item
        self.counts[lane] += 1
        if lane is Lane.ACTIVE:
            self.active.add(item.rank, item)
        elif lane is Lane.IN_FLIGHT:
            self.in_flight[item.id] = item
            return
        elif lane is Lane.BACKOFF:
            self.backoff.add((item.due, item.id), item)
            for flag in item.cures:
                self._backoff_cures[flag] += 1
        else:
            self._join(item, key)
        if self._worst is not None:
            self._worst.add(item.worth, item)

    def leave(self, item: QueuedInstance) -> None:
        """Take an item out of its lane; it must enter another one or be forgotten."""
        lane = item.lane
        item.stamp = 0
        self.counts[lane] -= 1
        if lane is Lane.ACTIVE:
            self.active.removed()
        elif lane is Lane.IN_FLIGHT:
            del self.in_flight[item.id]
            return
        elif lane is Lane.BACKOFF:
            self.backoff.removed()
            for flag in item.cures:
                self._backoff_cures[flag] -= 1
        else:
            self._part(item)
        if self._worst is not None:
            self._worst.removed()

    def forget(self, item: QueuedInstance) -> None:
        """Take an item that has left its lane out of the queue."""
        del self.items[item.id]

    def change_rank(self, item: QueuedInstance, priority: int, created: float, size: float) -> None:
        """Change the order of an item inside its lane."""
        item.priority, item.created, item.size = priority, created, size
        if item.lane is Lane.IN_FLIGHT:
            return
        item.stamp = next(self._stamps)
        if item.lane is Lane.ACTIVE:
            self.active.removed()
            self.active.add(item.rank, item)
        elif item.lane is Lane.BACKOFF:
            self.backoff.removed()
            self.backoff.add((item.due, item.id), item)
        elif item.group is not None:
            item.group.members.removed()
            item.group.members.add(item.rank, item)
        if self._worst is not None:
            self._worst.removed()
            self._worst.add(item.worth, item)

    def worst(self) -> QueuedInstance | None:
        """The item to drop first; None when all are in flight."""
        if self._worst is None:
            self._worst = RemovableHeap()
            for item in self.items.values():
                if item.lane is not Lane.IN_FLIGHT:
                    self._worst.add(item.worth, item)
        first = self._worst.first()
        return first[1] if first else None

    def forget_worst(self) -> None:
        """There is room again: no need to know the worst for now."""
        self._worst = None

    def backoff_with(self, cure: Cure, model_ids: Collection[int] | None) -> list[QueuedInstance]:
        """Items in BACKOFF that one of these events could help; costs nothing where there is none."""
        if not any(self._backoff_cures[flag] for flag in cure):
            return []
        return [i for i in self.backoff if i.cures & cure and (model_ids is None or i.model_id in model_ids)]

    def groups_with(self, cure: Cure, model_ids: Collection[int] | None) -> list[DemandGroup]:
        """Groups that one of these events could help, the one with the best head first."""
        groups: Collection[DemandGroup] = self.groups.values()
        if model_ids is not None:
            groups = [g for m in set(model_ids) for g in self._groups_of_model.get(m, {}).values()]
        return sorted((g for g in groups if g.cures & cure), key=lambda group: group.members.head().rank)

    def _join(self, item: QueuedInstance, key: Hashable) -> None:
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = DemandGroup(key, item.model_id)
            self._groups_of_model.setdefault(item.model_id, {})[key] = group
        item.group = group
        group.cures |= item.cures
        group.members.add(item.rank, item)
        group.signatures[item.signature] = group.signatures.get(item.signature, 0) + 1

    def _part(self, item: QueuedInstance) -> None:
        group = item.group
        assert group is not None
        item.group = None
        group.members.removed()
        group.signatures[item.signature] -= 1
        if not group.signatures[item.signature]:
            del group.signatures[item.signature]
        if not group.members:
            del self.groups[group.key]
            of_model = self._groups_of_model[group.model_id]
            del of_model[group.key]
            if not of_model:
                del self._groups_of_model[group.model_id]
