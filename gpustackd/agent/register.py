"""Workers written into the database, the way `gpustackd apply` writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpustackd.errors import Refused, UsageError
from gpustackd.store.documents.apply import apply_documents
from gpustackd.store.documents.fields import size
from gpustackd.store.documents.reading import read_documents
from gpustackd.store.postgres import worker_reports

if TYPE_CHECKING:
    from gpustackd.store.postgres.connect import Connection

_MAX_GPUS = 1024
_SOURCE = "gpustackd worker"
"""Stands for the file name in messages."""


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """`8x80GiB`, or `4x24GiB+2x80GiB`, as entries of a Worker document. Raises UsageError."""
    gpus: list[dict[str, Any]] = []
    for part in filter(None, text.replace(" ", "").split("+")):
        number, times, each = part.partition("x")
        try:
            total, count = size(each), int(number)
        except ValueError:
            total = count = 0
        if not times or not 0 < count <= _MAX_GPUS or total <= 0:
            raise UsageError(
                f"--gpus {text}: {part!r} is not a number of GPUs", "write it as in --gpus 8x80GiB"
            )
        gpus += [{"type": "cuda", "vendor": "nvidia", "vram_total": total}] * count
    return [{"index": n, **gpu} for n, gpu in enumerate(gpus)]


def simulated_document(
    name: str, ram: str, gpus: Sequence[Mapping[str, Any]], cluster: str | None
) -> dict[str, Any]:
    """A simulated worker as a document. Raises UsageError where `ram` is not a size."""
    try:
        memory = size(ram)
    except ValueError as error:
        raise UsageError(f"--ram {ram}: {error}", "write it as in --ram 512GiB") from None
    document = {"kind": "Worker", "name": name, "ram_total": memory, "gpus": list(gpus)}
    return document | ({"cluster": cluster} if cluster else {})


async def register(connection: Connection, document: Mapping[str, Any]) -> tuple[str, str]:
    """Create a worker in state READY, or update its facts and keep its state. Returns (action, note).

    Raises Refused.
    """
    exists = await worker_reports.worker_states(connection, [document["name"]])
    whole = dict(document) if exists else {"state": "READY", **document}
    (applied,) = await apply_documents(connection, read_documents(json.dumps(whole), _SOURCE))
    return applied.action, applied.note


async def require_workers(connection: Connection, names: Sequence[str]) -> None:
    """Raise Refused unless workers of these names exist."""
    existing = await worker_reports.worker_states(connection, names)
    missing = [n for n in names if n not in existing]
    if missing:
        raise Refused(
            f"there is no worker {', '.join(missing)}",
            "add --create (with --gpus 8x80GiB and --ram 512GiB) to register it, or see `get workers`",
        )
