"""A replica: one instance of a model, as decisions on the number of replicas see it.

Anybody may have written the row. What cannot be read counts as missing, which lowers the replica's rank; it
never prevents others from being ranked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpustackd.domain.lifecycle import TAKEN, InstanceState, WorkerState

_LOST = frozenset({WorkerState.NOT_READY, WorkerState.UNREACHABLE, WorkerState.DELETING, WorkerState.ERROR})


@dataclass(frozen=True, slots=True)
class ReplicaPart:
    """What a replica holds on one worker. Sizes in bytes."""

    worker_id: int | None
    gpu_type: str | None = None
    gpu_indexes: tuple[int, ...] = ()
    ram: int | None = None
    vram: Mapping[int, int] | None = None
    """By GPU index; None = the claim does not state it."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One row of `model_instances`, with the state of its main worker."""

    id: int
    state: InstanceState | None
    """None = not a known state."""
    worker_id: int | None = None
    worker_state: WorkerState | None = None
    """None = it has no worker, or the worker's row is gone."""
    main: ReplicaPart = field(default_factory=lambda: ReplicaPart(None))
    subordinates: tuple[ReplicaPart, ...] = ()
    claimed: bool = False
    """Whether its row has a `computed_resource_claim`."""
    offload_layers: int | None = None
    total_layers: int | None = None
    role: str | None = None
    group_id: str | None = None
    draining_for: float | None = None
    """Seconds since `draining_since` by the database's clock; None = not draining."""
    created: float = 0.0
    """Seconds by a clock that all rows share; orders by age."""
    stale: bool = False
    """Placed before the last edit of its model, so it may run the model as it was."""

    @property
    def placed(self) -> bool:
        """Whether it is on an existing worker."""
        return self.worker_id is not None and self.worker_state is not None

    @property
    def serving(self) -> bool:
        """Whether it may be serving requests: RUNNING on a worker that is not lost."""
        return self.state is InstanceState.RUNNING and self.placed and self.worker_state not in _LOST

    @property
    def healthy(self) -> bool:
        """RUNNING on a READY worker."""
        return self.state is InstanceState.RUNNING and self.worker_state is WorkerState.READY

    @property
    def progress(self) -> int:
        """How far it is towards serving: 0 = not taken by its worker, rising to RUNNING."""
        return TAKEN.index(self.state) + 1 if self.state in TAKEN else 0

    @property
    def workers(self) -> frozenset[int]:
        """Ids of the workers on which it has a part."""
        return frozenset(p.worker_id for p in (self.main, *self.subordinates) if p.worker_id is not None)


def replica(row: Mapping[str, Any]) -> Replica:
    """Read one row. It must have an `id`; everything else may be missing or malformed."""
    claim = row.get("computed_resource_claim")
    worker_id = _whole(row.get("worker_id"))
    gpu_type = row.get("gpu_type")
    kind = gpu_type if isinstance(gpu_type, str) else None
    claim = claim if isinstance(claim, Mapping) else None
    return Replica(
        id=int(row["id"]),
        state=_known(InstanceState, row.get("state")),
        worker_id=worker_id,
        worker_state=_known(WorkerState, row.get("worker_state")),
        main=_part(worker_id, kind, row.get("gpu_indexes"), claim),
        subordinates=_subordinates(row.get("distributed_servers"), kind),
        claimed=claim is not None,
        offload_layers=_whole(claim.get("offload_layers")) if claim else None,
        total_layers=_whole(claim.get("total_layers")) if claim else None,
        role=_text(row.get("role")),
        group_id=_text(row.get("group_id")),
        draining_for=row.get("draining_for"),
        created=float(row.get("created") or 0.0),
        stale=bool(row.get("stale")),
    )


def _subordinates(servers: Any, gpu_type: str | None) -> tuple[ReplicaPart, ...]:
    parts = servers.get("subordinate_workers") if isinstance(servers, Mapping) else None
    holds = []
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, Mapping):
            continue
        kind = _text(part.get("gpu_type")) or gpu_type
        claim = part.get("computed_resource_claim")
        claim = claim if isinstance(claim, Mapping) else None
        holds.append(_part(_whole(part.get("worker_id")), kind, part.get("gpu_indexes"), claim))
    return tuple(holds)


def _part(
    worker_id: int | None, gpu_type: str | None, indexes: Any, claim: Mapping[str, Any] | None
) -> ReplicaPart:
    numbers = [_whole(i) for i in indexes] if isinstance(indexes, list) else []
    vram = claim.get("vram") if claim else None
    return ReplicaPart(
        worker_id,
        gpu_type,
        tuple(n for n in numbers if n is not None),
        _whole(claim.get("ram")) if claim else None,
        _sizes(vram) if isinstance(vram, Mapping) else None,
    )


def _sizes(vram: Mapping[Any, Any]) -> dict[int, int]:
    sizes = {}
    for key, value in vram.items():
        index, size = _whole(key), _whole(value)
        if index is not None and size is not None:
            sizes[index] = size
    return sizes


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        return int(value)
    if isinstance(value, float) and value.is_integer() and 0 <= value < 2**63:
        return int(value)
    return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _known(kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return None
