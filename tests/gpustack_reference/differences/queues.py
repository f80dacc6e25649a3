"""Where the queue of keys does otherwise."""

from __future__ import annotations

from typing import Any

from tests.gpustack_reference.cases import Case
from tests.gpustack_reference.differences.difference import KEEP, Difference
from tests.gpustack_reference.judgement import Between, Finding
from tests.gpustack_reference.oracles.keys import play

STEP = 0.002
"""Seconds by which the clock of a script may be late."""


def _ops(case: Case) -> list[dict[str, Any]]:
    return (case.get("inputs") or {}).get("ops") or []


def _options(case: Case) -> dict[str, Any]:
    return (case.get("inputs") or {}).get("queue") or {}


def _right(case: Case, finding: Finding) -> Any:
    """What a plain queue gives; only what the operation expects of it is compared."""
    _, number, *_ = finding.what.split()
    op = _ops(case)[int(number)]
    found, elapsed, since_start = play(_ops(case))[int(number)]
    if "elapsed" in finding.what:
        right = since_start if finding.what.endswith("since_start") else elapsed
        return Between(right - STEP, right + STEP)
    expected = op.get("expect")
    if found is None or not expected:
        return found if op["op"] == "get_nothing" or expected is None else found and {}
    return {k: found[k] for k in expected}


def _deleted(case: Case, finding: Finding) -> Any:
    return _right(case, finding) if any(op.get("type") == "DELETED" for op in _ops(case)) else KEEP


def _window(case: Case, finding: Finding) -> Any:
    return _right(case, finding) if _options(case).get("dedup_window") else KEEP


def _jitter(case: Case, finding: Finding) -> Any:
    """Doubled from the first delay, bounded, and from that a part by chance taken off."""
    given = _options(case)
    nested = given.get("backoff") or {}
    jitter = nested.get("jitter", given.get("backoff_jitter", 0.0))
    if not jitter:
        return KEEP
    number = int(finding.what.split()[1])
    op, failures = _ops(case)[number], 0
    for earlier in _ops(case)[:number]:
        if earlier.get("key") == op.get("key"):
            if earlier["op"] == "forget":
                failures = 0
            elif earlier["op"] in ("backoff", "add_rate_limited"):
                failures += 1
    base = nested.get("base", given.get("backoff_base", 1.0))
    most = nested.get("cap", given.get("backoff_max", 300.0))
    return min(most, base * 2**failures) * (1 - jitter * (op.get("rand", nested.get("rand")) or 0.0))


QUEUES = (
    Difference(
        "no_window_for_changes",
        "a change is looked at when its turn comes; the peer holds it back for a window",
        "The peer waits whether more is said of a key. Here what is said while a key waits or is at work "
        "makes one further look at the rows, however much it is; the first look is at once.",
        "who changes the number of replicas: it happens at once",
        ("op * get*",),
        _window,
    ),
    Difference(
        "deletions_in_their_turn",
        "a deletion takes its turn; with the peer it goes to the front",
        "With the peer a deleted model's instances go when its key is taken. Here the database deletes "
        "them, and gives back what they held, in the transaction that deletes the model; nothing waits "
        "for the queue.",
        "who deletes a model: its GPUs are free at once, whatever is in the queue",
        ("op * get*",),
        _deleted,
    ),
    Difference(
        "jitter_shortens",
        "the random part of a delay is taken off",
        "Added on top it would lengthen the longest delay beyond its bound.",
        "who sets the longest delay: nothing waits longer",
        ("op * backoff",),
        _jitter,
    ),
)
