"""Workers written into the database, by the same way as `gpustackd apply` writes them."""

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

_MOST_GPUS = 1024
_FROM = "gpustackd worker"


def cards(text: str) -> list[dict[str, Any]]:
    """`8x80GiB`, or `4x24GiB+2x80GiB`, as entries of a Worker document. Raise UsageError."""
    found: list[dict[str, Any]] = []
    for part in filter(None, text.replace(" ", "").split("+")):
        number, times, each = part.partition("x")
        try:
            total, count = size(each), int(number)
        except ValueError:
            total = count = 0
        if not times or not 0 < count <= _MOST_GPUS or total <= 0:
            raise UsageError(
                f"--gpus {text}: {part!r} is no number of cards", "write it as in --gpus 8x80GiB"
            )
        found += [{"type": "cuda", "vendor": "nvidia", "vram_total": total}] * count
    return [{"index": n, **card} for n, card in enumerate(found)]


def simulated(name: str, ram: str, gpus: Sequence[Mapping[str, Any]], cluster: str | None) -> dict[str, Any]:
    """A made-up worker as a document. Raise UsageError where `ram` is no size."""
    try:
        memory = size(ram)
    except ValueError as error:
        raise UsageError(f"--ram {ram}: {error}", "write it as in --ram 512GiB") from None
    document = {"kind": "Worker", "name": name, "ram_total": memory, "gpus": list(gpus)}
    return document | ({"cluster": cluster} if cluster else {})


async def register(connection: Connection, document: Mapping[str, Any]) -> tuple[str, str]:
    """Create a worker READY, or bring its facts up to date and leave its state alone: (action, note).

    Raise Refused.
    """
    there = await worker_reports.worker_states(connection, [document["name"]])
    whole = dict(document) if there else {"state": "READY", **document}
    (applied,) = await apply_documents(connection, read_documents(json.dumps(whole), _FROM))
    return applied.action, applied.note


async def find(connection: Connection, names: Sequence[str]) -> dict[str, int]:
    """Ids of workers that exist. Raise Refused where one does not."""
    there = await worker_reports.worker_states(connection, names)
    missing = [n for n in names if n not in there]
    if missing:
        raise Refused(
            f"there is no worker {', '.join(missing)}",
            "add --create (with --gpus 8x80GiB and --ram 512GiB) to make it up, or look at `get workers`",
        )
    return {name: there[name][0] for name in names}
