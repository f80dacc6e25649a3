"""The answer of `gpustackd explain` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from gpustackd.cli.output import as_list, gib, moment, on_gpus, print_table, print_text, state
from gpustackd.domain.lifecycle import InstanceState

Row = Mapping[str, Any]


def show(out: Console, answer: Row) -> None:
    """Print what `explain.explanation` returns."""
    out.print(f"{answer['name']}, an instance of {answer['model']}, is ", end="", markup=False)
    out.print(state(answer["state"]), end="")
    if answer["placement"]:
        out.print(f" on {answer['placement']['place']}", markup=False)
        _show_state(out, answer)
        _show_placement(out, answer["placement"])
    else:
        out.print()
        _show_waiting(out, answer)
    if len(answer["history"]) > 1:
        out.print("\nEarlier decisions, newest first:")
        rows = [
            (moment(h["created_at"]), h["outcome"], h["attempt"], h["replica"]) for h in answer["history"][1:]
        ]
        print_table(out, ["WHEN", "OUTCOME", "ATTEMPT", "BY"], rows, right=["ATTEMPT"])


def _show_state(out: Console, answer: Row) -> None:
    """What a worker reported of an instance that has a place, and what will happen to it."""
    placement = answer["placement"]
    for line in (answer.get("state_message") or "").strip().splitlines():
        print_text(out, line)
    failures, restarts = placement.get("failures") or 0, placement.get("restart_count") or 0
    if failures or restarts:
        out.print(f"  failed here {_times(failures)}, restarted {_times(restarts)} since it last was stable")
    if answer["state"] == InstanceState.ERROR:
        if placement.get("restart_on_error") is False:
            out.print("  it is not restarted: its model has restart_on_error = false")
        else:
            out.print("  it will be restarted here or placed elsewhere after its backoff")
    if placement.get("draining_since"):
        out.print(
            f"  draining since {moment(placement['draining_since'])}: it is surplus and will be deleted"
        )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


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
        out.print("\nBest candidates (the first was chosen):")
        for n, candidate in enumerate(placement["candidates"], 1):
            print_text(out, candidate_words(candidate), "     ", f"  {n}. ")
        if placement["won"]:
            print_text(out, placement["won"])


def _show_waiting(out: Console, answer: Row) -> None:
    waiting = answer["waiting"]
    if waiting["fits_now"]:
        out.print(f"  it would fit now, on {_where(waiting['fits_now'])}", markup=False)
    elif waiting["message"]:
        for line in waiting["message"].strip().splitlines():
            print_text(out, line)
    if not waiting["message"] or waiting["fits_now"]:
        if not answer["history"]:
            out.print("  no daemon has looked at it yet; is one running? (`gpustackd run`)")
        if not waiting["fits_now"]:
            return
    _show_pool(out, waiting["pool"])
    for n, miss in enumerate(waiting["misses"]):
        print_text(out, miss["text"], " " * 14, "         then: " if n else "Nearest miss: ")
    _show_suggestions(out, waiting)
    if waiting["ahead"]:
        count = waiting["ahead"]
        ahead = f"{count} waiting instances are" if count > 1 else "1 waiting instance is"
        out.print(f"\n{ahead} ahead of it in the queue.")
    at = f"at {moment(waiting['next_attempt_at'])}, or " if waiting["next_attempt_at"] else ""
    out.print()
    print_text(out, f"Next try {at}{waiting['tried_again']}.", "")


def _show_suggestions(out: Console, waiting: Row) -> None:
    if waiting["suggestions"]:
        out.print("\nAny one of these changes would make it fit, smallest first (each was checked):")
        for n, one in enumerate(waiting["suggestions"], 1):
            print_text(out, one["text"], "     ", f"  {n}. ")
            out.print(f"     then on {_where(one['placement'])}", markup=False, style="dim")
    elif waiting["advised"]:
        out.print("\nNone of the single changes that were checked would make it fit.")


def _where(parts: Sequence[Row]) -> str:
    return " + ".join(on_gpus(p["worker"], p["gpu_type"], p["gpu_indexes"]) for p in parts)


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
