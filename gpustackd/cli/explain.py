"""`gpustackd explain`: why an instance is where it is, or why it is nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console

from gpustackd.cli.get import as_list, place
from gpustackd.cli.options import ConfigOption, DatabaseOption, Form, FormOption, database
from gpustackd.cli.output import console, gib, moment, print_json, print_table, state

Row = Mapping[str, Any]

RETRIES = (
    "when memory is freed, a worker or GPU comes or changes, the model is edited, or one of its files gets "
    "ready; and at every rescan"
)


def explain(
    instance: Annotated[str, typer.Argument(help="The instance's name.")],
    output: FormOption = Form.TEXT,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Why an instance is where it is, or nowhere.

    Where it waits: the reasons, and when it is tried again.

    Example: gpustackd explain qwen-1
    """
    from gpustackd.store.inventory import Inventory, connected

    url = database(config, database_url)

    async def run() -> tuple[Row, Sequence[Row]]:
        async with connected(url, "gpustackd explain") as connection:
            inventory = Inventory(connection)
            (found,) = await inventory.rows("instances", instance)
            return found, await inventory.decisions(found["id"])

    row, decisions = anyio.run(run)
    answer = explanation(row, decisions)
    if output is Form.JSON:
        print_json(answer)
    else:
        show(console(), answer)


def explanation(row: Row, decisions: Sequence[Row]) -> dict[str, Any]:
    """The answer as data: `placement` where it has a place, else `waiting`; `history`, newest first."""
    placed = row["worker"] is not None
    latest = decisions[0] if decisions else None
    made = next((d for d in decisions if d["outcome"] == "PLACED"), None) if placed else None
    answer: dict[str, Any] = {k: row[k] for k in ("name", "model", "state", "state_message", "attempts")}
    answer["placement"] = None
    answer["waiting"] = None
    if placed:
        answer["placement"] = {
            **{k: row[k] for k in ("worker", "gpu_type", "gpu_indexes", "vram", "ram", "subordinates")},
            "place": place(row),
            "decided_by": made["replica"] if made else None,
            "decided_at": made["created_at"] if made else row["scheduled_at"],
            "pool": (made["pool"] if made else None) or [],
            "candidates": (made["candidates"] if made else None) or [],
        }
    else:
        answer["waiting"] = {
            "reasons": row["reasons"],
            "pool": (latest["pool"] if latest else None) or [],
            "next_attempt_at": row["next_attempt_at"],
            "tried_again": RETRIES,
        }
    answer["history"] = [
        {k: d[k] for k in ("outcome", "attempt", "replica", "created_at", "duration_ms")} for d in decisions
    ]
    return answer


def show(out: Console, answer: Row) -> None:
    """The same for people."""
    out.print(f"{answer['name']}, an instance of {answer['model']}, is ", end="", markup=False)
    out.print(state(answer["state"]), end="")
    if answer["placement"]:
        out.print(f" on {answer['placement']['place']}", markup=False)
        _show_placement(out, answer["placement"])
    else:
        out.print()
        _show_waiting(out, answer)
    if len(answer["history"]) > 1:
        out.print("\nBefore, newest first:")
        rows = [
            (moment(h["created_at"]), h["outcome"], h["attempt"], h["replica"]) for h in answer["history"][1:]
        ]
        print_table(out, ["WHEN", "OUTCOME", "ATTEMPT", "BY"], rows, right=["ATTEMPT"])


def _show_placement(out: Console, placement: Row) -> None:
    parts = [placement, *(s for s in as_list(placement["subordinates"]) if isinstance(s, Mapping))]
    cards = sum(len(as_list(part.get("gpu_indexes"))) for part in parts)
    on = "1 GPU" if cards == 1 else f"{cards} GPUs"
    out.print(f"  holds {gib(placement['vram'])} of VRAM on {on} and {gib(placement['ram'])} of RAM")
    if placement["decided_by"]:
        out.print(
            f"  decided by {placement['decided_by']} at {moment(placement['decided_at'])}", markup=False
        )
    _show_pool(out, placement["pool"])
    if placement["candidates"]:
        out.print("\nThe best candidates, the first was taken:")
        for n, candidate in enumerate(placement["candidates"], 1):
            out.print(f"  {n}. {candidate_words(candidate)}", markup=False)


def _show_waiting(out: Console, answer: Row) -> None:
    waiting = answer["waiting"]
    if answer["state_message"]:
        for line in answer["state_message"].strip().splitlines():
            out.print(f"  {line}", markup=False)
    elif not answer["history"]:
        out.print("  nobody has looked at it yet; is a daemon running? (`gpustackd run`)")
        return
    _show_pool(out, waiting["pool"])
    if waiting["next_attempt_at"]:
        out.print(f"\nTried again at {moment(waiting['next_attempt_at'])},", markup=False)
        out.print(f"or {waiting['tried_again']}.")
    else:
        out.print(f"\nTried again {waiting['tried_again']}.")


def _show_pool(out: Console, pool: Sequence[Row]) -> None:
    if pool:
        out.print("\nWorkers left after each filter:")
        rows = [(f"  {s['filter']}", f"{s['kept']} of {s['total']}") for s in pool]
        print_table(out, ["  FILTER", "LEFT"], rows, right=["LEFT"])


def candidate_words(candidate: Row) -> str:
    """One candidate of a decision record in a line: its worker, its score and what that is made of."""
    gpus = candidate.get("gpus")
    cards = "" if not gpus else " 1 GPU" if gpus == 1 else f" {gpus} GPUs"
    parts = candidate.get("parts") or {}
    made_of = ", ".join(f"{k} {v:g}" for k, v in parts.items() if isinstance(v, int | float))
    score = candidate.get("score")
    scored = f"  score {score:g}" if isinstance(score, int | float) else ""
    layers = f"  {limit}" if (limit := candidate.get("limit")) else ""
    return f"{candidate.get('worker', '?')}{cards}{scored}" + (f"  ({made_of})" if made_of else "") + layers
