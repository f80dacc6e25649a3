"""`gpustackd explain`: why an instance is where it is, or why it waits and what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from gpustackd.cli.explain_text import show
from gpustackd.cli.get import place
from gpustackd.cli.options import ConfigOption, DatabaseOption, Form, FormOption, load_settings
from gpustackd.cli.output import console, print_json
from gpustackd.domain.lifecycle import WAITING
from gpustackd.domain.outcome import Cure, NoFit, Placed

if TYPE_CHECKING:
    from gpustackd.daemon.whatif.explain import Explanation
    from gpustackd.settings import Settings
    from gpustackd.store.postgres.connect import Connection
    from gpustackd.store.postgres.store import PostgresStore

Row = Mapping[str, Any]

RETRIED_WHEN: Mapping[Cure, str] = {
    Cure.CAPACITY: "memory is freed or a GPU uncordoned",
    Cure.WORKER: "a worker or GPU is added or changes",
    Cure.MODEL: "the model is edited",
    Cure.FILES: "one of its files becomes ready",
    Cure.BACKENDS: "a backend or instance type changes",
}
"""What makes a daemon try a waiting instance again."""
MISSES_SHOWN = 3


def explain(
    instance: Annotated[str, typer.Argument(metavar="NAME", help="The instance.")],
    output: FormOption = Form.TEXT,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Say why an instance is where it is, or why it waits.

    For one that waits: the reasons, the nearest miss, when it is tried again, and the smallest changes that
    would make it fit. Each change was checked by deciding with it; nothing is written.

    Example: gpustackd explain qwen-1
    """
    settings = load_settings(config, database_url)
    answer = anyio.run(explain_instance, settings, settings.require_database(), instance)
    if output is Form.JSON:
        print_json(answer)
    else:
        show(console(), answer)


async def explain_instance(settings: Settings, url: str, name: str) -> dict[str, Any]:
    """All that is known of an instance, as data. Raise Refused where there is none of that name,
    DatabaseUnavailable or WrongRevision."""
    from gpustackd.daemon.compose import no_garbage_collection
    from gpustackd.store.postgres.inventory import InventoryReads
    from gpustackd.store.postgres.snapshot import snapshot

    async with no_garbage_collection(), snapshot(url, "gpustackd explain") as (store, connection):
        inventory = InventoryReads(connection)
        (row,) = await inventory.rows("instances", name)
        decisions = await inventory.decisions(row["id"])
        known = None
        if row["worker"] is None and row["state"] in WAITING:
            known = await _explained(settings, store, connection, row)
    return explanation(row, decisions, known)


async def _explained(
    settings: Settings, store: PostgresStore, connection: Connection, row: Row
) -> Explanation | None:
    """The decision that a daemon with these settings would make now; None where one is being made."""
    from gpustackd.daemon.compose import foreign_memory, open_snapshot
    from gpustackd.daemon.whatif.explain import explain
    from gpustackd.placement.advice.changes import Holder
    from gpustackd.ports import WaitingInstance
    from gpustackd.store.postgres.inventory import InventoryReads

    queue = await store.waiting(None)
    mine = next((w for w in queue if w.id == row["id"]), None)
    if mine is None:  # a daemon has claimed it at this moment
        created = datetime.fromisoformat(row["created_at"])
        mine = WaitingInstance(row["id"], row["name"], row["model_id"], row["placement_epoch"],
                               row["attempts"], row["priority"], created, 0.0, None)  # fmt: skip
    holders = {
        h["id"]: Holder(h["id"], h["name"], h["model"], h["model_id"], h["priority"])
        for h in await InventoryReads(connection).holders()
    }
    async with open_snapshot(store, settings, await foreign_memory(store, settings)) as current:
        return await explain(current, mine, queue, holders)


def explanation(
    row: Row, decisions: Sequence[Row], known: Explanation | None = None, now: datetime | None = None
) -> dict[str, Any]:
    """The answer as data: `placement` where it has a place, else `waiting`; `history`, newest first."""
    placed = row["worker"] is not None
    latest = decisions[0] if decisions else None
    made = next((d for d in decisions if d["outcome"] == "PLACED"), None) if placed else None
    answer: dict[str, Any] = {k: row[k] for k in ("name", "model", "state", "state_message", "attempts")}
    answer["placement"] = None
    answer["waiting"] = None
    if placed:
        candidates = (made["candidates"] if made else None) or []
        answer["placement"] = {
            **{k: row[k] for k in ("worker", "gpu_type", "gpu_indexes", "vram", "ram", "subordinates")},
            "place": place(row),
            "decided_by": made["replica"] if made else None,
            "decided_at": made["created_at"] if made else row["scheduled_at"],
            "pool": (made["pool"] if made else None) or [],
            "candidates": candidates,
            "won": why_it_won(candidates),
            **{k: row.get(k) for k in ("restart_count", "failures", "restart_on_error", "draining_since")},
        }
    else:
        answer["waiting"] = _waiting(row, latest, known, now or datetime.now(UTC))
    answer["history"] = [
        {k: d[k] for k in ("outcome", "attempt", "replica", "created_at", "duration_ms")} for d in decisions
    ]
    return answer


def _waiting(row: Row, latest: Row | None, known: Explanation | None, now: datetime) -> dict[str, Any]:
    from gpustackd.store.documents.change_sql import statements

    outcome = known.outcome if known is not None else None
    refusal = outcome if isinstance(outcome, NoFit) else None
    reasons = [r.as_json() for r in refusal.reasons] if refusal is not None else row["reasons"]
    pool = [s.as_json() for s in outcome.pool] if outcome is not None and outcome.pool else None
    cures = refusal.cures if refusal is not None else Cure.ANY
    again = row["next_attempt_at"]
    if again is not None and datetime.fromisoformat(again) <= now:
        again = None  # overdue: the daemon that works on it has not written yet
    advice = known.advice if known is not None else None
    misses = [m.as_json() | {"text": m.text} for m in advice.misses[:MISSES_SHOWN]] if advice else []
    return {
        "message": refusal.message if refusal is not None else row["state_message"],
        "reasons": reasons,
        "counts": _counts(reasons),
        "pool": pool or (latest["pool"] if latest else None) or [],
        "next_attempt_at": again,
        "cures": [c.name.lower() for c in RETRIED_WHEN if c in cures and c.name],
        "tried_again": _retried(cures),
        "ahead": known.ahead if known is not None else None,
        "fits_now": _parts(outcome) if isinstance(outcome, Placed) else None,
        "nearest_miss": misses[0] if misses else None,
        "misses": misses,
        "suggestions": [
            {**s.as_json(), "sql": statements(s.change.as_json())}
            for s in (advice.suggestions if advice else ())
        ],
        "advised": advice is not None,
    }


def _counts(reasons: Any) -> list[dict[str, Any]]:
    """How many workers each reason holds for, as far as it counts any."""
    counts = []
    for r in reasons if isinstance(reasons, list) else ():
        params = r.get("params") if isinstance(r, Mapping) else None
        if not isinstance(params, Mapping):
            continue
        count = params.get("dropped", params.get("workers"))
        if isinstance(count, int) and not isinstance(count, bool):
            counts.append({"filter": r.get("filter"), "code": r.get("code"), "workers": count})
    return counts


def _retried(cures: Cure) -> str:
    words = [text for cure, text in RETRIED_WHEN.items() if cure in cures]
    if not words:
        return "at every rescan"
    joined = words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, or {words[-1]}"
    return f"when {joined}; and at every rescan"


def _parts(placed: Placed) -> list[dict[str, Any]]:
    return [
        {"worker": p.worker_name, "gpu_type": p.gpu_type, "gpu_indexes": list(p.gpu_indexes)}
        for p in placed.placement.parts
    ]


def why_it_won(candidates: Sequence[Row]) -> str | None:
    """Why the first of the candidates was taken, in a sentence."""
    if not candidates:
        return None
    first = candidates[0]
    name = first.get("worker", "?")
    if len(candidates) == 1:
        return f"{name} was the only candidate"
    second = candidates[1]
    best, next_best = first.get("score"), second.get("score")
    if not isinstance(best, int | float) or not isinstance(next_best, int | float):
        return None
    ahead = round(best - next_best, 4)
    other = second.get("worker", "?")
    if ahead <= 0:
        even = sum(c.get("score") == best for c in candidates)
        return (
            f"{name} and {even - 1} more have the same score; the tie is broken by fewer hosts, then less"
            " memory booked, then a hash of the instance's name"
        )
    mine, theirs = first.get("parts") or {}, second.get("parts") or {}
    gains = {
        k: round(v - theirs.get(k, 0), 4)
        for k, v in mine.items()
        if isinstance(v, int | float) and isinstance(theirs.get(k, 0), int | float)
    }
    made_of = ", ".join(f"{k} {v:+g}" for k, v in sorted(gains.items(), key=lambda g: -g[1]) if v)
    return f"{name} is {ahead:g} ahead of {other}" + (f" ({made_of})" if made_of else "")
