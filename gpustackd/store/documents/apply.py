"""Writes documents: rows are created or updated by name, one transaction for a file.

Locks are taken in the order in which a user's `DELETE FROM models` cascades: models, model_instances,
workers, gpu_devices, each by id.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import asyncpg

from gpustackd.domain.lifecycle import WAITING, InstanceState
from gpustackd.domain.model_spec import model_spec
from gpustackd.errors import BadRow, Refused
from gpustackd.store.documents import adoption
from gpustackd.store.documents.kinds import GPU, KINDS, ORDER, PLACEMENT
from gpustackd.store.documents.reading import Document, refuse
from gpustackd.store.postgres.connect import Connection

ATTEMPTS = 5
_RETRIED = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
    asyncpg.UniqueViolationError,
)
"""Another transaction wrote the same rows at the same time: the whole file is tried again."""

_LOCKED_FIRST = ("Model", "ModelInstance", "Worker")


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of one document. `action`: `created`, `updated`, `unchanged`, `adopted` or `moved` (booked
    anew elsewhere)."""

    kind: str
    name: str
    action: str
    id: int
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """As `gpustackd apply -o json` prints it."""
        return {"kind": self.kind, "name": self.name, "action": self.action, "id": self.id, "note": self.note}


async def apply_documents(connection: Connection, documents: Sequence[Document]) -> list[Applied]:
    """Write a file's documents in one transaction; the results are in the order of the documents.

    Raises Refused naming document and field; nothing is written then.
    """
    for attempt in range(ATTEMPTS):
        try:
            async with connection.transaction():
                return await _Writer(connection, documents).write()
        except _RETRIED as error:
            if attempt == ATTEMPTS - 1:
                file = documents[0].file if documents else ""
                raise refuse(
                    file, f"other transactions kept writing the same rows: {error}", "apply it again"
                ) from error
            await anyio.sleep(random.uniform(0.01, 0.1) * 2**attempt)
    raise AssertionError("unreachable")


class _Writer:
    """One attempt at one file, inside its transaction."""

    def __init__(self, connection: Connection, documents: Sequence[Document]) -> None:
        self.connection = connection
        self.documents = documents
        self.ids: dict[tuple[str, str], Any] = {}
        """(kind and column, name) -> what a reference was resolved to."""

    async def write(self) -> list[Applied]:
        await self._lock()
        applied: dict[int, Applied] = {}
        for d in sorted(self.documents, key=lambda d: (ORDER[d.kind.name], d.number)):
            try:
                applied[id(d)] = await self._write_one(d)
            except _RETRIED:
                raise
            except asyncpg.PostgresError as error:
                raise _refused_by_database(d, error) from error
            except (asyncpg.DataError, OverflowError) as error:
                raise refuse(d.where, str(error)) from error
        return [applied[id(d)] for d in self.documents]

    async def _write_one(self, d: Document) -> Applied:
        values = dict(d.values)
        if d.kind.name != "ModelInstance" or not adoption.is_placed(d):
            for column, name in d.references.items():
                values[column] = await self._resolve(d, column, name)
        if d.kind.name == "ModelInstance":
            return await self._instance(d, values)
        row_id, action = await self._upsert(d, values)
        note = await self._gpus(d, row_id) if d.gpus is not None else ""
        if note and action == "unchanged":
            action = "updated"
        return Applied(d.kind.name, d.name, action, row_id, note)

    # -- locks ----------------------------------------------------------------------------------------

    async def _lock(self) -> None:
        """Lock the existing rows, in order, before the first write."""
        names = {kind: [d.name for d in self.documents if d.kind.name == kind] for kind in _LOCKED_FIRST}
        touched = await self._instances_losing_gpus(names["Worker"])
        await self._fetch(
            "SELECT 1 FROM models WHERE name = ANY ($1) ORDER BY id FOR NO KEY UPDATE", names["Model"]
        )
        await self._fetch(
            "SELECT 1 FROM model_instances WHERE name = ANY ($1) OR id = ANY ($2)"
            " ORDER BY id FOR NO KEY UPDATE",
            names["ModelInstance"],
            touched,
        )
        workers = [
            r["id"]
            for r in await self._fetch(
                "SELECT id FROM workers WHERE name = ANY ($1) ORDER BY id FOR NO KEY UPDATE", names["Worker"]
            )
        ]
        await self._fetch(
            "SELECT 1 FROM gpu_devices WHERE worker_id = ANY ($1) ORDER BY id FOR NO KEY UPDATE", workers
        )

    async def _instances_losing_gpus(self, names: Sequence[str]) -> list[int]:
        """Instances on GPUs that these documents do not list, and so remove."""
        kept = {(d.name, g["type"], g["index"]) for d in self.documents if d.gpus is not None for g in d.gpus}
        listing = {d.name for d in self.documents if d.gpus is not None}
        gone = [
            r["id"]
            for r in await self._fetch(
                "SELECT g.id, g.type, g.index, w.name FROM gpu_devices g JOIN workers w ON w.id = g.worker_id"
                " WHERE w.name = ANY ($1)",
                names,
            )
            if r["name"] in listing and (r["name"], r["type"], r["index"]) not in kept
        ]
        if not gone:
            return []
        rows = await self._fetch(
            "SELECT DISTINCT instance_id FROM instance_claims WHERE gpu_device_id = ANY ($1)", gone
        )
        return [r["instance_id"] for r in rows]

    # -- rows -----------------------------------------------------------------------------------------

    async def _resolve(self, d: Document, column: str, name: str) -> Any:
        """What a name in a reference stands for: an id, or the `source_index` of a model's files."""
        field, (_, kind) = next((k, v) for k, v in d.kind.references.items() if v[0] == column)
        key = (f"{kind}.{column}", name)
        if key not in self.ids:
            table = KINDS[kind].table
            row = await self.connection.fetchrow(f"SELECT * FROM {table} WHERE name = $1", name)
            if row is None:
                raise refuse(
                    f"{d.where}, {field}",
                    f"there is no {kind} {name}",
                    f"apply the {kind} first, or in the same file",
                )
            try:
                self.ids[key] = model_spec(dict(row)).source_index if column == "source_index" else row["id"]
            except BadRow as error:
                raise refuse(f"{d.where}, {field}", f"model {name} cannot be used: {error}") from error
        return self.ids[key]

    async def _upsert(self, d: Document, values: Mapping[str, Any]) -> tuple[int, str]:
        identity = {c: values.get(c) for c in d.kind.identity}
        row = await self._existing(d.kind.table, identity, values)
        if row is None:
            return await self._insert(d.kind.table, values), "created"
        changed = {c: v for c, v in values.items() if row[c] != v}
        if not changed:
            return row["id"], "unchanged"
        await self._update(d.kind.table, row["id"], changed)
        return row["id"], "updated"

    async def _existing(self, table: str, identity: Mapping[str, Any], columns: Iterable[str]) -> Any:
        where = " AND ".join(f"{_quoted(c)} IS NOT DISTINCT FROM ${n}" for n, c in enumerate(identity, 1))
        wanted = ", ".join(["id", *(_quoted(c) for c in columns)])
        return await self.connection.fetchrow(
            f"SELECT {wanted} FROM {table} WHERE {where} FOR NO KEY UPDATE",
            *identity.values(),
        )

    async def _insert(self, table: str, values: Mapping[str, Any]) -> int:
        sql = f"{_insertion(table, values)} RETURNING id"
        return int(await self.connection.fetchval(sql, *values.values()))

    async def _insert_many(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """One round trip for all rows of the same columns."""
        alike: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        for row in rows:
            alike.setdefault(tuple(row), []).append(tuple(row.values()))
        for columns, values in alike.items():
            await self.connection.executemany(_insertion(table, columns), values)

    async def _update(self, table: str, row_id: int, values: Mapping[str, Any]) -> None:
        sets = ", ".join(f"{_quoted(c)} = ${n}" for n, c in enumerate(values, 2))
        await self.connection.execute(
            f"UPDATE {table} SET {sets}, updated_at = now() WHERE id = $1",
            row_id,
            *values.values(),
        )

    async def _fetch(self, sql: str, *arguments: Any) -> Any:
        return await self.connection.fetch(sql, *arguments)

    # -- GPUs of a worker -----------------------------------------------------------------------------

    async def _gpus(self, d: Document, worker_id: int) -> str:
        """Make a worker's GPUs those of the document, by type and index; others are deleted. Returns a note
        on what changed."""
        columns = ", ".join(_quoted(c) for c in GPU.fields)
        existing = {
            (r["type"], r["index"]): r
            for r in await self._fetch(
                f"SELECT id, {columns} FROM gpu_devices WHERE worker_id = $1",
                worker_id,
            )
        }
        added: list[dict[str, Any]] = []
        changed = 0
        for gpu in d.gpus or ():
            row = existing.pop((gpu["type"], gpu["index"]), None)
            if row is None:
                added.append({"worker_id": worker_id, **gpu})
            elif news := {c: v for c, v in gpu.items() if row[c] != v}:
                await self._update("gpu_devices", row["id"], news)
                changed += 1
        await self._insert_many("gpu_devices", added)
        notes = [f"{_gpus(n)} {what}" for n, what in ((len(added), "added"), (changed, "changed")) if n]
        if existing:
            gone = [r["id"] for r in existing.values()]
            hit = await self.connection.fetchval(
                "SELECT count(DISTINCT instance_id) FROM instance_claims WHERE gpu_device_id = ANY ($1)", gone
            )
            await self.connection.execute("DELETE FROM gpu_devices WHERE id = ANY ($1)", gone)
            notes.append(f"{_gpus(len(gone))} removed")
            if hit:
                notes.append(f"{hit} instance{'s' if hit > 1 else ''} sent back to PENDING")
        return ", ".join(notes)

    # -- instances ------------------------------------------------------------------------------------

    async def _instance(self, d: Document, values: dict[str, Any]) -> Applied:
        if "model_id" in d.references:
            values["model_id"] = await self._resolve(d, "model_id", d.references["model_id"])
        row = await self.connection.fetchrow("SELECT * FROM model_instances WHERE name = $1", d.name)
        if row is not None and row["model_id"] != values["model_id"]:
            raise adoption.another_model(d)
        if adoption.is_placed(d):
            return await self._place(d, values, row)
        plain = {c: v for c, v in values.items() if c not in PLACEMENT}
        if row is None:
            if plain.get("state", InstanceState.PENDING) != InstanceState.PENDING:
                raise adoption.without_place(d, plain["state"])
            return Applied(d.kind.name, d.name, "created", await self._insert("model_instances", plain))
        if plain.get("state") == InstanceState.PENDING and row["state"] in WAITING:
            del plain["state"]  # ANALYZING is a kind of PENDING
        changed = {c: v for c, v in plain.items() if row[c] != v}
        if changed:
            await self._update("model_instances", row["id"], changed)
        return Applied(d.kind.name, d.name, "updated" if changed else "unchanged", row["id"])

    async def _place(self, d: Document, values: Mapping[str, Any], row: Any) -> Applied:
        """Adopt an instance where it runs, or book it anew where its document names another place."""
        placement = await adoption.placement_of(adoption.DatabaseRows(self.connection), d)
        plain = {c: v for c, v in values.items() if c not in PLACEMENT and c != "state"}
        state = values.get("state", InstanceState.SCHEDULED)
        action = "adopted"
        if row is None:
            row_id, epoch = await self._insert("model_instances", plain), 0
        elif row["worker_id"] is not None and await self._is_there(row, placement):
            news = {c: v for c, v in plain.items() if row[c] != v}
            if "state" in values and row["state"] != state:
                news["state"] = state
            if news:
                await self._update("model_instances", row["id"], news)
            return Applied(d.kind.name, d.name, "updated" if news else "unchanged", row["id"])
        else:
            row_id, action = row["id"], "moved" if row["worker_id"] is not None else "adopted"
            epoch = await self._free(row)
        result = await adoption.adopt(self.connection, row_id, epoch, placement)
        if result.code is not None:
            problem, remedy = await adoption.why_not(self.connection, placement, result)
            raise refuse(f"{d.where}, computed_resource_claim", problem, remedy)
        news = {c: v for c, v in plain.items() if c not in ("name", "model_id")}
        if state != InstanceState.SCHEDULED:
            news["state"] = state
        if news:
            await self._update("model_instances", row_id, news)
        return Applied(d.kind.name, d.name, action, row_id, f"on {placement.parts[0].worker_name}")

    async def _is_there(self, row: Any, placement: Any) -> bool:
        same = list(row["gpu_indexes"] or []) == list(placement.parts[0].gpu_indexes)
        return same and await adoption.held_ledger(self.connection, row["id"]) == adoption.ledger_of(
            placement
        )

    async def _free(self, row: Any) -> int:
        """Bring an instance back to PENDING, whatever its state; return its epoch."""
        if row["worker_id"] is not None:
            await self.connection.execute("SELECT gpustackd_evict($1, $2)", [row["id"]], "moved by apply")
        elif row["state"] != InstanceState.PENDING:
            await self.connection.execute(
                "UPDATE model_instances SET state = 'PENDING', lease_owner = NULL, lease_until = NULL,"
                " placement_epoch = placement_epoch + 1, updated_at = now() WHERE id = $1",
                row["id"],
            )
        epoch = await self.connection.fetchval(
            "SELECT placement_epoch FROM model_instances WHERE id = $1", row["id"]
        )
        return int(epoch)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _insertion(table: str, columns: Collection[str]) -> str:
    named = ", ".join(_quoted(c) for c in columns)
    places = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
    return f"INSERT INTO {table} ({named}) VALUES ({places})"


def _quoted(column: str) -> str:
    return f'"{column}"'


def _refused_by_database(d: Document, error: asyncpg.PostgresError) -> Refused:
    """An error of the database, in terms of the document."""
    where = d.where
    if isinstance(error, asyncpg.NotNullViolationError) and error.column_name:
        return refuse(f"{where}, {error.column_name}", "must not be null")
    if isinstance(error, asyncpg.ForeignKeyViolationError):
        return refuse(where, error.detail or error.message or "refers to a row that is not there")
    problem = error.message or str(error)
    if error.constraint_name and isinstance(error, asyncpg.CheckViolationError):
        problem = f"breaks the rule {error.constraint_name.replace('_', ' ')!r}"
    return refuse(where, problem, error.hint or error.detail or "")
