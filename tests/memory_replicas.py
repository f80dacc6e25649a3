"""`ports.ReplicaStore` in memory, with the same guard as over PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from gpustackd.domain.lifecycle import WAITING
from gpustackd.ports import ReplicaSnapshot, SyncResult
from gpustackd.replicas.replica import Replica, replica
from gpustackd.replicas.sync_plan import SyncPlan
from gpustackd.store.memory.records import InstanceRecord, ModelRow
from gpustackd.store.memory.store import MemoryStore


class MemoryReplicas:
    """`ports.ReplicaStore` on a `MemoryStore`; its clock stands for the database's."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def out_of_sync(self, ids: Sequence[int] | None) -> Sequence[int]:
        models = self._store.database.models
        wanted = models if ids is None else [i for i in ids if i in models]
        out_of_sync = (i for i in wanted if self._is_out_of_sync(models[i]))
        return sorted(out_of_sync, key=lambda i: (-models[i].priority, i))

    def _is_out_of_sync(self, model: ModelRow) -> bool:
        number, planned = model.columns.get("replicas"), model.columns.get("scaling_schedule")
        if planned is not None:
            enabled = planned.get("enabled", False) if isinstance(planned, dict) else "none"
            if enabled is True or not isinstance(enabled, bool | None):
                return True
        there = self._there(model.id)
        leaving = sum(r.draining_since is not None for r in there)
        odd = leaving > 0 or any(r.role is not None for r in there)
        return number is not None and (odd or len(there) - leaving != number)

    async def replicas(self, model_id: int) -> ReplicaSnapshot | None:
        model = self._store.database.models.get(model_id)
        if model is None:
            return None
        there = self._there(model_id)
        members, states = self._digests(model_id)
        return ReplicaSnapshot(
            model_id=model_id,
            name=model.name,
            replicas=model.columns.get("replicas"),
            instances=[self._replica(r) for r in there],
            names=frozenset(r.name for r in there),
            now=datetime.fromtimestamp(self._store.database.clock(), UTC),
            roles=model.columns.get("roles"),
            scaling_schedule=model.columns.get("scaling_schedule"),
            placement_strategy=model.columns.get("placement_strategy"),
            members_digest=members,
            states_digest=states,
            schedule_digest=repr(model.columns.get("scaling_schedule")),
        )

    async def sync(
        self, seen: ReplicaSnapshot, replicas: int, plan: SyncPlan, names: Sequence[Sequence[str]]
    ) -> SyncResult:
        store = self._store
        model = store.database.models.get(seen.model_id)
        if model is None:
            return SyncResult.GONE
        members, states = self._digests(model.id)
        held = states == seen.states_digest or not (plan.delete or plan.drain)
        if model.columns.get("replicas") != replicas or members != seen.members_digest or not held:
            return SyncResult.CHANGED
        for i in plan.undrain:
            store.database.model_instances[i].draining_since = None
        for i in plan.drain:
            store.database.model_instances[i].draining_since = store.database.clock()
        store.database.delete("model_instances", *plan.delete)
        short = False
        for new, several in zip(plan.add, names, strict=True):
            taken = {r.name for r in store.database.model_instances.values()}
            free = [n for n in several if n not in taken][: new.number]
            for name in free:
                store.database.insert(
                    "model_instances", name=name, model_id=model.id, role=new.role, group_id=new.group_id
                )
            short |= len(free) < new.number
        return SyncResult.TAKEN if short else SyncResult.DONE

    async def set_replicas(self, seen: ReplicaSnapshot, replicas: int, until: datetime | None) -> bool:
        model = self._store.database.models.get(seen.model_id)
        if model is None or repr(model.columns.get("scaling_schedule")) != seen.schedule_digest:
            return False
        late = until is not None and self._store.database.clock() >= until.timestamp()
        if late or model.columns.get("replicas") == replicas:
            return False
        self._store.database.update("models", model.id, replicas=replicas)
        return True

    # -- inside -----------------------------------------------------------------------------------------

    def _there(self, model_id: int) -> list[InstanceRecord]:
        rows = self._store.database.model_instances.values()
        return sorted((r for r in rows if r.model_id == model_id), key=lambda r: r.id)

    def _worker_state(self, row: InstanceRecord) -> str | None:
        host = self._store.database.workers.get(row.worker_id or 0)
        return None if host is None else str(host.state)

    def _digests(self, model_id: int) -> tuple[str, str]:
        there = self._there(model_id)
        who = [(r.id, r.draining_since, r.role, r.group_id) for r in there]
        standing = [
            (r.id, r.state not in WAITING and r.state, r.worker_id, self._worker_state(r)) for r in there
        ]
        return repr(who), repr(standing)

    def _replica(self, row: InstanceRecord) -> Replica:
        since = row.draining_since
        columns: dict[str, Any] = {
            "id": row.id,
            "state": row.state,
            "worker_id": row.worker_id,
            "worker_state": self._worker_state(row),
            "gpu_type": row.gpu_type,
            "gpu_indexes": row.gpu_indexes,
            "computed_resource_claim": row.computed_resource_claim,
            "distributed_servers": row.distributed_servers,
            "role": row.role,
            "group_id": row.group_id,
            "draining_for": None if since is None else self._store.database.clock() - since,
            "created": row.created_at,
        }
        return replica(columns)
