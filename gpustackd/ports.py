"""What the daemon needs from the outside, as protocols: a store and a reader of models.

`store.postgres` and `store.memory` satisfy `Store` alike; one suite of tests runs over both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """A PENDING instance as read, before anyone works on it."""

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
    """Signature of the refusal written on the row; None = never decided."""
    hints: PlacementHints = NO_HINTS


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to work on one instance: ours until the lease ends, fenced by `epoch`."""

    id: int
    name: str
    model_id: int
    epoch: int
    attempts: int
    priority: int
    waited_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A placement to commit for a claimed instance."""

    claim: Claim
    model_version: int
    decision: Placed
    duration_ms: float = 0.0


class CommitCode(StrEnum):
    """Why a proposal was not committed."""

    LOST = "lost"
    """The claim is not ours any more (lease over, epoch moved on, row deleted or locked by a delete)."""
    MODEL_CHANGED = "model_changed"
    CONFLICT = "conflict"
    """A GPU or worker does not offer what was decided on; `gpu_ids` and `worker_ids` name them."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """`code` None = committed."""

    instance_id: int
    code: CommitCode | None = None
    gpu_ids: tuple[int, ...] = ()
    worker_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Back to PENDING with a reason, tried again after `retry_in` seconds (None = when a cure comes)."""

    claim: Claim
    outcome: NoFit
    record: str = "NO_FIT"
    """Outcome written to `scheduling_decisions`."""
    retry_in: float | None = None
    to_error: bool = False
    """ANALYZING -> ERROR instead: nothing but an edit can help."""
    duration_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetChanges:
    """What changed since a mark. With `complete`, rows not listed are gone."""

    mark: str
    workers: Sequence[WorkerRow] = ()
    gpus: Sequence[GpuRow] = ()
    complete: bool = False


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One row of `models`: the checked spec, or why the row cannot be used."""

    id: int
    version: int
    name: str
    spec: ModelSpec | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class DatabaseHealth:
    """What `/readyz` and `check` want to know of the database."""

    writable: bool
    revision: str | None
    server_version: str = ""


class Store(Protocol):
    """Everything that speaks to the database, by intent. Sizes in bytes, times by its clock.

    Raises `DatabaseUnavailable` when the server cannot be reached (nothing was written, or nobody
    knows: every write is conditional, so that trying again is safe).
    """

    async def fleet_changes(self, since: str | None) -> FleetChanges:
        """Workers and GPUs changed since a mark; everything (`complete`) for None."""

    async def fleet_sums(self) -> tuple[int, int, int, int]:
        """Number of workers, sum of their versions, number of GPUs, sum of their versions."""

    async def bookings(self, worker_ids: Sequence[int] | None) -> Sequence[Booking]:
        """Ledger rows on these workers (None = all)."""

    async def waiting(self, ids: Sequence[int] | None, limit: int = 100_000) -> Sequence[WaitingInstance]:
        """PENDING instances among `ids` (None = all), by priority, then age."""

    async def pending_ids(self) -> Sequence[int]:
        """Ids of all PENDING instances."""

    async def models(self, ids: Sequence[int]) -> Sequence[ModelRecord]:
        """Models by id; missing ones are left out."""

    async def ready_files(self) -> Mapping[str, Mapping[int, int]]:
        """READY model files: source_index (and `path:<resolved_path>`) -> {worker id: size}; those that are
        being downloaded by `downloading:<source_index>`."""

    async def pools(self) -> Pools:
        """Instance types, and what clusters report of their nodes' cards."""

    async def backends(self) -> Backends:
        """Registered inference backends."""

    async def foreign_memory(self, fresh: float) -> Mapping[int, int]:
        """GPU id -> bytes that processes of others hold beyond the worker's reserve, by usage samples no
        older than `fresh` seconds. Zeros are left out."""

    async def claim(self, owner: UUID, wanted: Sequence[tuple[int, int]], lease: float) -> Sequence[Claim]:
        """PENDING -> ANALYZING for (id, epoch seen) pairs that are still so; others are left out."""

    async def renew(self, owner: UUID, ids: Sequence[int], lease: float) -> set[int]:
        """Extend our leases; returns the ids that are still ours."""

    async def commit(self, owner: UUID, replica: str, batch: Sequence[Proposal]) -> Sequence[CommitResult]:
        """ANALYZING -> SCHEDULED with capacity, ledger and decision record, an outcome per proposal."""

    async def refuse(self, owner: UUID, replica: str, batch: Sequence[Refusal]) -> set[int]:
        """ANALYZING -> PENDING (or ERROR) with the reasons; returns the ids written."""

    async def hand_back(self, owner: UUID) -> Sequence[int]:
        """ANALYZING -> PENDING for everything this owner holds (shutdown)."""

    async def expire_leases(self) -> Sequence[int]:
        """ANALYZING -> PENDING where the lease is over; returns those ids."""

    async def autofill(self, model_id: int, version: int, patch: Mapping[str, Any]) -> bool:
        """Write columns of a model that the daemon found out, for the version it looked at; wakes nobody.
        False = the model was edited meanwhile."""

    async def health(self) -> DatabaseHealth:
        """Raises DatabaseUnavailable."""


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
    """Reads what a model is made of; caches; raises ModelUnreadable."""

    def cached(self, spec: ModelSpec) -> ModelFacts | None:
        """Facts at hand without any IO, or None."""

    async def facts(self, spec: ModelSpec) -> ModelFacts:
        """Read (once at a time per source and revision) within the time-outs of the spec."""

    def doubt(self) -> None:
        """Files or workers came: what could not be read before may be there now, so do not answer from
        memory for it."""


@dataclass(frozen=True, slots=True)
class Wake:
    """One notification: what happened, and which rows where it is known."""

    kind: str
    """`created`, `capacity`, `worker`, `model`, `files`, `backends`, `deleted`, `replicas`, `overflow`."""
    ids: tuple[int, ...] = field(default=())
    payload: Mapping[str, Any] = field(default_factory=dict)
