"""A document of an instance that already runs somewhere, turned into a placement and booked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from gpustackd.domain.bookings import ledger_rows, worker_booking
from gpustackd.domain.lifecycle import PLACED, InstanceState, WorkerState
from gpustackd.domain.outcome import Part, Placed, Placement
from gpustackd.errors import Refused
from gpustackd.ports import Claim, CommitCode, CommitResult, Proposal
from gpustackd.store.documents import fields as f
from gpustackd.store.documents.kinds import PLACEMENT
from gpustackd.store.documents.reading import Document, refuse
from gpustackd.store.postgres import commit_call
from gpustackd.store.postgres.connect import Connection

ADOPTABLE = tuple(sorted([*PLACED, InstanceState.ERROR]))
"""States that a document may give together with a place."""
REPLICA = "apply"
"""The column `replica` of the decision record."""

LedgerRow = tuple[Any, ...]
"""Worker id, GPU id or None, part, VRAM, RAM."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What the instance holds on one worker, as its document says."""

    worker: int | str
    gpu_type: str | None
    gpu_indexes: tuple[int, ...]
    vram: tuple[int, ...]
    ram: int
    gpu_addresses: tuple[str, ...] = ()
    total_gpus: int | None = None
    offload_layers: int | None = None


def is_placed(document: Document) -> bool:
    """Whether a ModelInstance document says where its instance runs."""
    return "worker_id" in document.references or any(document.values.get(c) is not None for c in PLACEMENT)


def another_model(document: Document) -> Refused:
    """For an instance that exists and has another model."""
    return _wrong(document, "model", "an instance keeps its model", "delete the instance and apply it again")


def without_place(document: Document, state: str) -> Refused:
    """For a new instance in a state that needs a place, where the document names none."""
    return _wrong(
        document,
        "state",
        f"a new instance in state {state} must name its place",
        "give worker, gpu_type, gpu_indexes and computed_resource_claim, or leave state out",
    )


WORKER_COLUMNS = ("id", "name", "version", "unified_memory", "ip", "advertise_address", "ifname")


class KnownRows(Protocol):
    """Where workers and their GPUs are looked up: the database, or a copy of it."""

    async def worker(self, key: int | str) -> Mapping[str, Any] | None:
        """`WORKER_COLUMNS` of a worker by id or name."""

    async def gpus(self, worker_id: int, gpu_type: str | None) -> Sequence[Mapping[str, Any]]:
        """Its GPUs of one type: id, index, version."""


async def placement_of(known: KnownRows, document: Document) -> Placement:
    """Read a placement from a document and look up its workers and GPUs. Raises Refused naming the field."""
    values = document.values
    state = values.get("state", InstanceState.SCHEDULED)
    if state not in ADOPTABLE:
        raise _wrong(
            document, "state", f"must be one of {', '.join(ADOPTABLE)} where the document names a worker"
        )
    worker = document.references.get("worker_id") or values.get("worker_id")
    if worker is None:
        raise _wrong(document, "worker", "is missing, while other fields of a placement are there")
    claim = _claim(document, values.get("computed_resource_claim"), "computed_resource_claim")
    main = _share(document, worker, values, claim, "")
    servers = values.get("distributed_servers") or {}
    shares = [main, *_subordinates(document, servers)]
    parts = [await _part(known, document, share) for share in shares]
    split = claim.get("tensor_split")
    # a GGUF model is split over devices, and a worker may appear once for each of its devices
    workers = [p.worker_id for p in parts]
    devices = [g for p in parts for g in p.gpu_ids]
    repeated = len(set(workers if split is None else devices)) != len(workers if split is None else devices)
    if repeated or workers[0] in workers[1:]:
        raise _wrong(document, "distributed_servers", "names a worker twice")
    return Placement(
        parts=tuple(parts),
        vram_utilization=claim.get("vram_utilization"),
        offload_layers=claim.get("offload_layers"),
        total_layers=claim.get("total_layers"),
        tensor_split=None if split is None else tuple(split),
        sized_for=claim.get("sized_for"),
        mode=servers.get("mode"),
        strategy="adopted",
    )


def _subordinates(document: Document, servers: Mapping[str, Any]) -> list[_Share]:
    at = "distributed_servers.subordinate_workers"
    raw = servers.get("subordinate_workers") or []
    if not isinstance(raw, list) or not all(isinstance(x, Mapping) for x in raw):
        raise _wrong(document, at, "must be a list of maps")
    shares = []
    for n, item in enumerate(raw):
        here = f"{at}[{n}]."
        worker = item.get("worker") or item.get("worker_name") or item.get("worker_id")
        if worker is None or isinstance(worker, bool) or not isinstance(worker, int | str):
            raise _wrong(document, f"{here}worker", "must name a worker, or worker_id its id")
        where = f"{here}computed_resource_claim"
        claim = _claim(document, item.get("computed_resource_claim"), where)
        shares.append(_share(document, worker, item, claim, here))
    return shares


def _claim(document: Document, raw: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise _wrong(
            document, at, 'is missing; it says what is booked, as in {"vram": {"0": 21474836480}, "ram": 0}'
        )
    return raw


def _share(
    document: Document, worker: int | str, raw: Mapping[str, Any], claim: Mapping[str, Any], at: str
) -> _Share:
    claim_at = f"{at}computed_resource_claim"
    try:
        vram = {int(k): f.size(v) for k, v in f.mapping(claim.get("vram") or {}).items()}
    except ValueError as error:
        raise _wrong(document, f"{claim_at}.vram", f"must map GPU indexes to bytes: {error}") from None
    try:
        ram = f.size(claim.get("ram") or 0)
        indexes = f.indexes(raw.get("gpu_indexes") or [])
        addresses = f.texts(raw.get("gpu_addresses") or [])
        total = None if raw.get("total_gpus") is None else f.count(raw["total_gpus"])
        gpu_type = None if raw.get("gpu_type") is None else f.name(raw["gpu_type"])
        layers = None if claim.get("offload_layers") is None else f.count(claim["offload_layers"])
    except ValueError as error:
        raise _wrong(document, f"{at}gpu_indexes, gpu_type, ram", str(error)) from None
    if set(indexes) != set(vram):
        raise _wrong(
            document,
            f"{at}gpu_indexes",
            f"are {sorted(indexes)}, but {claim_at}.vram is for {sorted(vram)}; name each GPU in both",
        )
    if indexes and gpu_type is None:
        raise _wrong(document, f"{at}gpu_type", "is missing; indexes are counted within a type")
    return _Share(
        worker, gpu_type, tuple(indexes), tuple(vram[i] for i in indexes), ram, tuple(addresses), total,
        layers if at else None,
    )  # fmt: skip


_WORKER = f"SELECT {', '.join(WORKER_COLUMNS)} FROM workers WHERE "
_BY_ID = _WORKER + "id = $1"
_BY_NAME = _WORKER + "name = $1"


class DatabaseRows:
    """`KnownRows` over a connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def worker(self, key: int | str) -> Mapping[str, Any] | None:
        row: Mapping[str, Any] | None = await self._connection.fetchrow(
            _BY_ID if isinstance(key, int) else _BY_NAME, key
        )
        return row

    async def gpus(self, worker_id: int, gpu_type: str | None) -> Sequence[Mapping[str, Any]]:
        rows: Sequence[Mapping[str, Any]] = await self._connection.fetch(
            "SELECT id, index, version FROM gpu_devices WHERE worker_id = $1 AND type = $2",
            worker_id,
            gpu_type,
        )
        return rows


async def _part(known: KnownRows, document: Document, share: _Share) -> Part:
    row = await known.worker(share.worker)
    if row is None:
        raise _wrong(document, "worker", f"there is no worker {share.worker}", "apply the Worker first")
    gpus = {gpu["index"]: gpu for gpu in await known.gpus(row["id"], share.gpu_type)}
    missing = [i for i in share.gpu_indexes if i not in gpus]
    if missing:
        there = ", ".join(str(i) for i in sorted(gpus)) or "none"
        raise _wrong(
            document,
            "gpu_indexes",
            f"worker {row['name']} has no {share.gpu_type} GPU {missing[0]} (it has {there})",
            "apply the Worker with its gpus first",
        )
    return Part(
        worker_id=row["id"],
        worker_name=row["name"],
        gpu_type=share.gpu_type,
        gpu_ids=tuple(gpus[i]["id"] for i in share.gpu_indexes),
        gpu_indexes=share.gpu_indexes,
        gpu_versions=tuple(gpus[i]["version"] for i in share.gpu_indexes),
        vram=share.vram,
        ram=share.ram,
        worker_version=row["version"],
        unified=row["unified_memory"],
        total_gpus=share.total_gpus,
        gpu_addresses=share.gpu_addresses,
        worker_ip=row["ip"],
        worker_advertise_address=row["advertise_address"],
        worker_ifname=row["ifname"],
        offload_layers=share.offload_layers,
    )


async def adopt(connection: Connection, instance_id: int, epoch: int, placement: Placement) -> CommitResult:
    """Claim a PENDING instance and book its placement in the caller's transaction, by the functions that the
    daemon uses. The instance is SCHEDULED afterwards, unless the result has a code."""
    owner = uuid4()
    claimed = await connection.fetch(
        "SELECT * FROM gpustackd_claim($1, $2, $3, $4)", owner, [instance_id], [epoch], 60.0
    )
    if not claimed:
        return CommitResult(instance_id, CommitCode.LOST)
    row = claimed[0]
    claim = Claim(row["id"], row["name"], row["model_id"], row["epoch"], row["attempts"], 0)
    version = await connection.fetchval("SELECT version FROM models WHERE id = $1", claim.model_id)
    batch = [Proposal(claim, version, Placed(placement))]
    rejected = await connection.fetch(commit_call.SQL, *commit_call.arguments(owner, REPLICA, batch))
    return commit_call.results(batch, rejected)[0]


async def held_ledger(connection: Connection, instance_id: int) -> set[LedgerRow]:
    """The ledger rows of an instance."""
    rows = await connection.fetch(
        "SELECT worker_id, gpu_device_id, part, vram, ram FROM instance_claims WHERE instance_id = $1",
        instance_id,
    )
    return {tuple(r) for r in rows}


def ledger_of(placement: Placement) -> set[LedgerRow]:
    """The ledger rows that a placement would have."""
    return {
        (part.worker_id, gpu_id, name, vram, ram)
        for part, name, gpu_id, _, vram, ram in ledger_rows(placement)
    }


async def why_not(connection: Connection, placement: Placement, result: CommitResult) -> tuple[str, str]:
    """Why a placement was not committed, and what to do about it: (problem, remedy)."""
    if result.code is not CommitCode.CONFLICT:
        return "it or its model was changed at the same time", "apply it again"
    cards = await connection.fetch(
        "SELECT g.id, w.name || ':' || g.type || ':' || g.index AS card, w.state, g.schedulable,"
        " g.over_committed, g.capacity, g.vram_allocated"
        " FROM gpu_devices g JOIN workers w ON w.id = g.worker_id WHERE g.id = ANY ($1) ORDER BY 1",
        list(result.gpu_ids),
    )
    for r in cards:
        if r["state"] != WorkerState.READY:
            return f"{r['card']}: its worker is {r['state']}", "set the worker READY first"
        if not r["schedulable"]:
            return f"{r['card']} is not schedulable", "set schedulable to true first"
        if r["capacity"] is None:
            return f"{r['card']} has no known memory", "give its vram_total first"
        if r["over_committed"]:
            return f"{r['card']} is over-committed and takes nothing new", "free something there first"
        free = r["capacity"] - r["vram_allocated"]
        need = sum(v for p in placement.parts for g, v in zip(p.gpu_ids, p.vram, strict=True) if g == r["id"])
        return (
            f"it does not fit on {r['card']}: {need} bytes are needed, {free} of {r['capacity']} are free",
            "see what is there with `gpustackd get gpus`",
        )
    host = await connection.fetchrow(
        "SELECT id, name, state, ram_capacity, ram_allocated FROM workers WHERE id = ANY ($1) ORDER BY id",
        list(result.worker_ids),
    )
    if host is None:
        return "a worker or GPU was deleted at the same time", "apply it again"
    if host["state"] != WorkerState.READY:
        return f"worker {host['name']} is {host['state']}", "set the worker READY first"
    if host["ram_capacity"] is None:
        return f"worker {host['name']} has no known RAM", "give its ram_total first"
    free = host["ram_capacity"] - host["ram_allocated"]
    need = sum(worker_booking(p) or 0 for p in placement.parts if p.worker_id == host["id"])
    room = f"{need} bytes are needed, {free} of {host['ram_capacity']} are free"
    return (
        f"it does not fit into the RAM of worker {host['name']}: {room}",
        "see what is there with `gpustackd get workers`",
    )


def _wrong(document: Document, at: str, problem: str, remedy: str = "") -> Refused:
    return refuse(f"{document.where}, {at}", problem, remedy)
