"""What the daemon needs from outside, as protocols: a store and a reader of models.

Both `store.postgres` and `store.memory` implement `Store`; one suite of tests runs over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol
from uuid import UUID

from gpustackd.domain.backends import Backends
from gpustackd.domain.bookings import Booking
from gpustackd.domain.facts import ModelFacts
from gpustackd.domain.fleet.rows import GpuRow, WorkerRow
from gpustackd.domain.model_spec import ModelSpec
from gpustackd.domain.outcome import NoFit, Placed
from gpustackd.domain.placement_hints import NO_HINTS, PlacementHints
from gpustackd.domain.pools import Pools
from gpustackd.replicas.replica import Replica
from gpustackd.replicas.sync_plan import SyncPlan


@dataclass(frozen=True, slots=True)
class WaitingInstance:
    """A PENDING instance as read, before it is claimed."""

    id: int
    name: str
    model_id: int
    epoch: int
    attempts: int
    priority: int
    created_at: datetime
    due_in: float
    """Seconds until `next_attempt_at` by the database's clock; 0 or less = now."""
    signature: str | None
    """Signature of the refusal written on the row; None = there is none."""
    hints: PlacementHints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to decide for one instance, until the lease ends; `epoch` fences late writes."""

    id: int
    name: str
    model_id: int
    epoch: int
    attempts: int
    priority: int
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement to commit for a claimed instance. `model_version`: the one decided on."""

    claim: Claim
    model_version: int
    decision: Placed
    duration_ms: float = 0.0


class CommitCode(StrEnum):
    """Why a proposal was not committed."""

    LOST = "lost"
    """The claim is not ours any more: the lease expired, the epoch rose, or the row is (being) deleted."""
    MODEL_CHANGED = "model_changed"
    """The model was edited since it was read."""
    CONFLICT = "conflict"
    """Rows no longer offer what was decided on; `gpu_ids` and `worker_ids` name them."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of one proposal. `code` None = committed."""

    instance_id: int
    code: CommitCode | None = None
    gpu_ids: tuple[int, ...] = ()
    worker_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """An instance to write back to PENDING with its reasons."""

    claim: Claim
    outcome: NoFit
    record: str = "NO_FIT"
    """Outcome of the decision record."""
    retry_in: float | None = None
    """Seconds until it is tried again; None = after an event that could help."""
    to_error: bool = False
    """Write it to ERROR instead: only an edit of the model can help."""
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """Workers and GPUs that changed since a mark. With `complete`, rows that are not listed do not exist."""

    mark: str
    workers: Sequence[WorkerRow] = ()
    gpus: Sequence[GpuRow] = ()
    complete: bool = False


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One row of `models`: its checked spec, or in `error` why the row cannot be used."""

    id: int
    version: int
    name: str
    spec: ModelSpec | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class DatabaseHealth:
    """State of the database. `revision` None = there is no schema."""

    writable: bool
    revision: str | None
    server_version: str = ""


class Store(Protocol):
    """What the daemon asks of the database. Sizes in bytes, times by the database's clock.

    Every method raises `DatabaseUnavailable` where the server cannot be reached, and `Contended` where
    another transaction was in the way. It may be unknown whether a write happened; every write states what it
    expects of the rows, so it can be repeated safely.
    """

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        """Workers and GPUs that changed since a mark; all of them (`complete`) for None."""

    async def fleet_sums(self) -> tuple[int, int, int, int]:
        """Number of workers, sum of their versions, number of GPUs, sum of their versions: the view is up to
        date where its own sums are the same."""

    async def bookings(self, worker_ids: Sequence[int] | None) -> Sequence[Booking]:
        """Ledger rows on these workers (None = all)."""

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[WaitingInstance]:
        """PENDING instances among `ids` (None = all), by priority, then age; at most `limit`."""

    async def pending_ids(self) -> Sequence[int]:
        """Ids of all PENDING instances."""

    async def models(self, ids: Sequence[int]) -> Sequence[ModelRecord]:
        """Models by id; ids without a row are left out."""

    async def ready_files(self) -> Mapping[str, Mapping[int, int]]:
        """Model files on workers: key -> {worker id: bytes, 0 = unknown}. Keys of READY files are
        `<source_index>` and `path:<resolved_path>`, of files on their way `downloading:<source_index>`."""

    async def pools(self) -> Pools:
        """Pools of cards, and what clusters report of their nodes' cards."""

    async def backends(self) -> Backends:
        """Registered inference backends."""

    async def foreign_memory(self, fresh: float) -> Mapping[int, int]:
        """GPU id -> bytes that other processes hold beyond the worker's reserve, by usage samples no older
        than `fresh` seconds. Zeros are left out."""

    async def claim(self, owner: UUID, wanted: Sequence[tuple[int, int]], lease: float) -> Sequence[Claim]:
        """PENDING -> ANALYZING with a lease of `lease` seconds, for (id, epoch) pairs that are still so;
        others are left out."""

    async def renew(self, owner: UUID, ids: Sequence[int], lease: float) -> set[int]:
        """Extend leases to `lease` seconds from now; returns the ids that are still the owner's."""

    async def commit(self, owner: UUID, replica: str, batch: Sequence[Proposal]) -> Sequence[CommitResult]:
        """ANALYZING -> SCHEDULED with allocation, ledger and decision record; an outcome per proposal, sorted
        by instance. Raises ValueError where the batch names an instance twice."""

    async def refuse(self, owner: UUID, replica: str, batch: Sequence[Refusal]) -> set[int]:
        """ANALYZING -> PENDING (or ERROR) with the reasons; returns the ids written."""

    async def hand_back(self, owner: UUID) -> Sequence[int]:
        """ANALYZING -> PENDING for all claims of this owner, at shutdown; returns the ids."""

    async def expire_leases(self) -> Sequence[int]:
        """ANALYZING -> PENDING where the lease has expired; returns the ids."""

    async def autofill(self, model_id: int, version: int, patch: Mapping[str, Any]) -> bool:
        """Write columns of a model that the daemon detects itself, without a notification. False = the model
        does not have this version any more."""

    async def health(self) -> DatabaseHealth:
        """Whether the server is writable, and the revision of its schema."""


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """A model and its instances as read. The digests let a write check that nothing changed since."""

    model_id: int
    name: str
    replicas: int | None
    instances: Sequence[Replica]
    names: frozenset[str]
    """Names of the instances."""
    now: datetime
    """By the database's clock, with its zone."""
    zone: str = "UTC"
    """The database's time zone."""
    roles: Any = None
    scaling_schedule: Any = None
    placement_strategy: str | None = None
    members_digest: str | None = None
    """Of the set of instances with their roles, groups and drains."""
    states_digest: str | None = None
    """Of the instances' states and places."""
    schedule_digest: str | None = None


class SyncResult(StrEnum):
    """What became of an attempt to bring a model to its number of replicas."""

    DONE = "done"
    BUSY = "busy"
    """Another transaction holds the model or one of its instances."""
    CHANGED = "changed"
    """The rows are not as they were read."""
    GONE = "gone"
    """The model was deleted."""
    TAKEN = "taken"
    """Not all names were free any more; as many instances as possible were added."""


class ReplicaStore(Protocol):
    """What keeping models at their number of replicas needs of the database; errors as `Store`."""

    async def out_of_sync(self, ids: Sequence[int] | None) -> Sequence[int]:
        """Models (among these; None = all) whose number of instances may be wrong, or may change with time:
        the count differs from `replicas`, an instance drains or has a role, a schedule is enabled or cannot
        be read. By priority, then age; a model whose `replicas` is NULL is left out unless it has a
        schedule."""

    async def replicas(self, model_id: int) -> ReplicaSnapshot | None:
        """None = there is no such model."""

    async def sync(
        self, seen: ReplicaSnapshot, replicas: int, plan: SyncPlan, names: Sequence[Sequence[str]]
    ) -> SyncResult:
        """Write the plan if the rows are as they were read and the model still asks for `replicas`. `names`
        holds, for each entry of `plan.add`, candidate names in order of preference, more than are needed."""

    async def set_replicas(self, seen: ReplicaSnapshot, replicas: int, until: datetime | None) -> bool:
        """Write the number that the schedule asks for, if the schedule is the one read and `until` has not
        passed. Returns whether it was written."""


class ModelReader(Protocol):
    """Reads the files of models, and caches what they say."""

    def cached(self, spec: ModelSpec) -> ModelFacts | None:
        """Cached facts, without I/O; None = not cached."""

    async def facts(self, spec: ModelSpec) -> ModelFacts:
        """Facts, cached or read; concurrent calls for one source share one read. Raises ModelUnreadable."""

    def retry_failures(self) -> None:
        """Read models again of which parts could not be read: new files or workers may have them."""


@dataclass(frozen=True, slots=True)
class Wake:
    """One notification: what happened, and to which rows if known."""

    kind: str
    """`created`, `capacity`, `worker`, `model`, `files`, `backends`, `deleted`, `replicas`, `overflow`."""
    ids: tuple[int, ...] = ()
