"""Documents applied to a copy of the database in memory: what `apply` would make of the rows.

The documents, the checks and the order are those of `apply`; nothing leaves the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from gpustackd.domain.lifecycle import InstanceState
from gpustackd.domain.model_spec import model_spec
from gpustackd.domain.outcome import Placed
from gpustackd.errors import BadRow, Refused
from gpustackd.ports import Proposal
from gpustackd.store.documents import adoption
from gpustackd.store.documents.kinds import KINDS, ORDER
from gpustackd.store.documents.reading import Document, refuse
from gpustackd.store.memory.database import MemoryDatabase
from gpustackd.store.memory.records import InstanceRecord, WorkerRecord
from gpustackd.store.memory.store import MemoryStore

_INSTANCE_COLUMNS = ("name", "model_id", "priority")
"""Columns of an instance that a plan looks at."""


@dataclass(slots=True)
class OverlayResult:
    """What the documents did, by ids of the copy."""

    models: list[int] = field(default_factory=list)
    """Models of the documents and of their instances, in the order of the documents."""
    new_models: set[int] = field(default_factory=set)
    instances: list[int] = field(default_factory=list)
    """Instances that documents ask to be placed, in their order."""
    fleet: bool = False
    """Whether a row changed that could help other instances too."""


class Overlay:
    """Applies files of documents to one copy, one after another."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._database = store.database
        self.done = OverlayResult()
        self._now = self._database.clock()
        """One time for all rows, as in one transaction."""

    async def write(self, documents: Sequence[Document]) -> None:
        """Apply the documents of one file. Raises Refused naming document and field."""
        for d in sorted(documents, key=lambda d: (ORDER[d.kind.name], d.number)):
            try:
                await self._write(d)
            except Refused as error:
                if str(error.problem).startswith(d.file):
                    raise
                raise refuse(d.where, error.problem, error.remedy) from error

    async def _write(self, d: Document) -> None:
        values = dict(d.values)
        if d.kind.name == "ModelInstance":
            await self._instance(d, values)
            return
        for column, name in d.references.items():
            values[column] = self._resolve(d, column, name)
        if d.kind.name == "Worker":
            self._worker(d, values)
        elif d.kind.name == "Model":
            self._model(values)
        else:
            self._plain(d, values)

    def _resolve(self, d: Document, column: str, name: str) -> Any:
        """What a name in a reference stands for, as `apply` resolves it."""
        said, (_, kind) = next((k, v) for k, v in d.kind.references.items() if v[0] == column)
        rows = self._database.table(KINDS[kind].table)
        row = next((r for r in rows.values() if _value(r, "name") == name), None)
        if row is None:
            raise refuse(f"{d.where}, {said}", f"there is no {kind} {name}",
                         f"apply the {kind} first, or in the same file")  # fmt: skip
        if column != "source_index":
            return _value(row, "id")
        try:
            columns = {"id": row.id, "name": row.name, "version": row.version, **row.columns}
            return model_spec(columns).source_index
        except BadRow as error:
            raise refuse(f"{d.where}, {said}", f"model {name} cannot be used: {error}") from error

    def _plain(self, d: Document, values: Mapping[str, Any]) -> None:
        """Clusters, files, backends and instance types: rows without rules of their own in memory."""
        rows = self._database.table(d.kind.table)
        same = next(
            (i for i, r in rows.items() if all(r.get(c) == values.get(c) for c in d.kind.identity)), None
        )
        self.done.fleet = True
        if same is not None:
            self._database.update(d.kind.table, same, **values)
            return
        blank: dict[str, Any] = dict.fromkeys(d.kind.fields)
        self._database.insert(d.kind.table, **{**blank, **d.kind.defaults, **values})

    def _worker(self, d: Document, values: Mapping[str, Any]) -> None:
        known = {k: v for k, v in values.items() if k in WorkerRecord.__slots__}
        row = next((w for w in self._database.workers.values() if w.name == d.name), None)
        self.done.fleet = True
        if row is None:
            worker_id = self._database.insert("workers", **known)
        else:
            worker_id = row.id
            self._database.update("workers", worker_id, **known)
        if d.gpus is None:
            return
        dropped = {(g.type, g.index): g.id for g in self._database.gpus_of(worker_id)}
        for gpu in d.gpus:
            if (gpu_id := dropped.pop((gpu["type"], gpu["index"]), None)) is not None:
                self._database.update("gpu_devices", gpu_id, **gpu)
            else:
                self._database.insert("gpu_devices", worker_id=worker_id, **gpu)
        self._database.delete("gpu_devices", *dropped.values())

    def _model(self, values: Mapping[str, Any]) -> None:
        rows = self._database.models
        row = next((m for m in rows.values() if m.name == values["name"]), None)
        if row is None:
            model_id = self._database.insert("models", **values)
            self.done.new_models.add(model_id)
        else:
            model_id = row.id
            self._database.update("models", model_id, **values)
        self._note_model(model_id)

    def _note_model(self, model_id: int) -> None:
        if model_id not in self.done.models:
            self.done.models.append(model_id)

    # -- instances ------------------------------------------------------------------------------------

    async def _instance(self, d: Document, values: dict[str, Any]) -> None:
        if "model_id" in d.references:
            values["model_id"] = self._resolve(d, "model_id", d.references["model_id"])
        row = next((i for i in self._database.model_instances.values() if i.name == d.name), None)
        if row is not None and row.model_id != values["model_id"]:
            raise adoption.another_model(d)
        if values["model_id"] not in self._database.models:
            raise refuse(f"{d.where}, model_id", f"there is no model {values['model_id']}")
        self._note_model(values["model_id"])
        if adoption.is_placed(d):
            await self._adopt(d, values, row)
            return
        plain = {k: v for k, v in values.items() if k in _INSTANCE_COLUMNS}
        if row is not None:
            row.priority = plain.get("priority", row.priority)
            self.done.instances.append(row.id)
        elif values.get("state", InstanceState.PENDING) != InstanceState.PENDING:
            raise adoption.without_place(d, values["state"])
        else:
            self.done.instances.append(self.insert(**plain))

    def insert(self, **columns: Any) -> int:
        """Insert an instance with the file's time; its id."""
        return self._database.insert("model_instances", created_at=self._now, **columns)

    def insert_named(self, names: Sequence[str], **columns: Any) -> list[int]:
        """Insert instances that differ in name only; their ids."""
        return self._database.insert_named(names, created_at=self._now, **columns)

    async def _adopt(self, d: Document, values: Mapping[str, Any], row: InstanceRecord | None) -> None:
        """Book an instance where its document says that it runs, or refuse it as a commit would."""
        placement = await adoption.placement_of(_MemoryRows(self._database), d)
        if row is None:
            plain = {k: v for k, v in values.items() if k in _INSTANCE_COLUMNS}
            row = self._database.model_instances[self.insert(**plain)]
        else:
            ledger = self._database.ledger.get(row.id, ())
            held = {(b.worker_id, b.gpu_id, b.part, b.vram, b.ram) for b in ledger}
            if held == adoption.ledger_of(placement):
                return
            self._database.evict([row.id], "moved by apply")
        owner = uuid4()
        (claim,) = await self._store.claim(owner, [(row.id, row.placement_epoch)], 60.0)
        version = self._database.models[row.model_id].version
        (result,) = await self._store.commit(
            owner, adoption.REPLICA, [Proposal(claim, version, Placed(placement))]
        )
        if result.code is not None:
            raise refuse(
                f"{d.where}, computed_resource_claim",
                f"it does not fit where it says it is ({placement.parts[0].worker_name})",
                "see what is there with `gpustackd get gpus`",
            )
        row.state = InstanceState(values.get("state", InstanceState.SCHEDULED))


class _MemoryRows:
    """`adoption.KnownRows` over a database in memory."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    async def worker(self, key: int | str) -> Mapping[str, Any] | None:
        rows = self._database.workers.values()
        row = next((w for w in rows if key in (w.id, w.name)), None)
        return None if row is None else {n: getattr(row, n) for n in adoption.WORKER_COLUMNS}

    async def gpus(self, worker_id: int, gpu_type: str | None) -> Sequence[Mapping[str, Any]]:
        return [
            {"id": g.id, "index": g.index, "version": g.version}
            for g in self._database.gpus_of(worker_id)
            if g.type == gpu_type
        ]


def _value(row: Any, name: str) -> Any:
    return row[name] if isinstance(row, dict) else getattr(row, name)
