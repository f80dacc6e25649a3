"""Cases of queues: scripts of operations on a queue of keys, and what wakes instances up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import anyio

from tests.gpustack_reference.cases import Case, Unreadable, known, needed, one_of
from tests.gpustack_reference.judgement import Between, Finding
from tests.gpustack_reference.production import queues

OPTIONS = {
    "backoff", "backoff_base", "backoff_max", "backoff_jitter", "dedup_window", "dedup_max_wait",
}  # fmt: skip
OPS = {
    "add", "add_after", "add_rate_limited", "get", "get_nothing", "done", "len", "sleep", "forget",
    "failures", "backoff",
}  # fmt: skip
FIELDS = {
    "op", "key", "type", "obj", "delay_s", "timeout_s", "within_s", "expect", "rand", "seconds", "duration_s",
    "s", "elapsed_at_least_s", "elapsed_at_most_s", "elapsed_since_start_at_least_s",
    "elapsed_since_start_at_most_s",
}  # fmt: skip
TYPES = {"ADDED", "CREATED", "MODIFIED", "UPDATED", "DELETED"}
START = {"subscribed_event_types", "replay_existing", "full_scans_before_live_at_least"}
KINDS = ("CREATED", "UPDATED", "DELETED", "HEARTBEAT")


def judge(case: Case) -> Iterator[Finding]:
    """Findings of one case."""
    inputs, expect = case["inputs"], case["expect"]
    known(inputs, {"queue", "ops", "on", "existing_pending_instances", "events"}, "inputs")
    known(
        expect,
        {"all_op_expectations_hold", "evaluated", "full_scans", "single_instance_evaluations", *START},
        "expect",
    )
    if "ops" in inputs:
        yield from script(case)
    if "on" in inputs:
        one_of(inputs["on"], {"scheduler_start"}, "inputs.on")
        yield from _start(inputs, expect)
    if "events" in inputs:
        yield from _events(inputs, expect)


# -- scripts -------------------------------------------------------------------------------------------------


def script(case: Case) -> Iterator[Finding]:
    """Play the operations; what they expect are findings."""
    given = case["inputs"].get("queue") or {}
    known(given, OPTIONS, "inputs.queue")
    keys = queues.Keys(*queues.settings(given))
    rand = (given.get("backoff") or {}).get("rand")
    for n, op in enumerate(case["inputs"]["ops"]):
        where = f"inputs.ops[{n}]"
        known(op, FIELDS, where)
        one_of(op.get("op"), OPS, f"{where}.op")
        yield from _play(keys, op, n, rand)


def _play(keys: queues.Keys, op: dict[str, Any], n: int, rand: float | None) -> Iterator[Finding]:
    what, key, name = op["op"], op.get("key", ""), f"op {n} {op['op']}"
    if what in ("add", "add_after", "add_rate_limited"):
        change = one_of(op.get("type", "MODIFIED"), TYPES, f"inputs.ops[{n}].type")
        keys.said(key, {"UPDATED": "MODIFIED", "CREATED": "ADDED"}.get(change, change), op.get("obj"))
    match what:
        case "add":
            keys.add(key)
        case "add_after":
            keys.add_after(key, needed(op, "delay_s", f"inputs.ops[{n}]"))
        case "add_rate_limited":
            keys.add_rate_limited(key)
        case "get" | "get_nothing":
            yield from _get(keys, op, n, name)
        case "done":
            keys.done(key)
        case "sleep":
            keys.now += _seconds(op, n)
        case "len":
            yield Finding(name, needed(op, "expect", f"inputs.ops[{n}]"), len(keys))
        case "backoff":
            found = keys.backoff(key, op.get("rand", rand))
            if "expect" in op:
                yield Finding(name, op["expect"], found, 1e-6)
        case "failures":
            yield Finding(name, needed(op, "expect", f"inputs.ops[{n}]"), keys.failures(key))
        case "forget":
            keys.forget(key)


def _get(keys: queues.Keys, op: dict[str, Any], n: int, name: str) -> Iterator[Finding]:
    nothing = op["op"] == "get_nothing" or ("expect" in op and op["expect"] is None)
    began = keys.now
    key = keys.get(
        op.get("within_s" if nothing else "timeout_s", op.get("timeout_s", 0.1 if nothing else 1.0))
    )
    found = None if key is None else {"key": key, "type": keys.rows[key][0], "obj": keys.rows[key][1]}
    if nothing:
        yield Finding(name, None, found)
        return
    expected = dict(op.get("expect") or {})
    known(expected, {"key", "type", "obj"}, f"inputs.ops[{n}].expect")
    if expected.get("type") == "CREATED":
        expected["type"] = "ADDED"
    yield Finding(name, expected, found and {k: found[k] for k in expected})
    for field, since in (("elapsed", began), ("elapsed_since_start", 0.0)):
        least, most = op.get(f"{field}_at_least_s"), op.get(f"{field}_at_most_s")
        if least is not None or most is not None:
            limits = Between(least or 0.0, math.inf if most is None else most)
            yield Finding(f"{name} {field}", limits, keys.now - since)


def _seconds(op: dict[str, Any], n: int) -> float:
    for name in ("seconds", "duration_s", "s", "delay_s"):
        if name in op:
            return float(op[name])
    raise Unreadable(f"inputs.ops[{n}]", "does not say for how long")


# -- instances -----------------------------------------------------------------------------------------------


def _start(inputs: dict[str, Any], expect: dict[str, Any]) -> Iterator[Finding]:
    """A daemon that starts."""
    full, replayed = queues.at_start()
    if "subscribed_event_types" in expect:
        expected = [
            {"ADDED": "CREATED", "MODIFIED": "UPDATED"}.get(t, t) for t in expect["subscribed_event_types"]
        ]
        yield Finding("subscribed_event_types", sorted(expected), sorted(queues.heard(KINDS)))
    if "replay_existing" in expect:
        yield Finding("replay_existing", expect["replay_existing"], replayed)
    if "full_scans_before_live_at_least" in expect:
        limits = Between(expect["full_scans_before_live_at_least"], math.inf)
        yield Finding("full_scans_before_live", limits, int(full))
    there = inputs.get("existing_pending_instances") or []
    ids = (
        range(1, there + 1)
        if isinstance(there, int)
        else [i if isinstance(i, int) else i["id"] for i in there]
    )
    yield Finding("found by the scan", sorted(ids), anyio.run(queues.found_by_scan, ids))


def _events(inputs: dict[str, Any], expect: dict[str, Any]) -> Iterator[Finding]:
    """Each event makes the queue take up the instance that it names, if that waits, and no other one."""
    evaluated, scans = [], 0
    for n, event in enumerate(inputs["events"]):
        known(event, {"instance_id", "instance", "id", "eligible", "type"}, f"inputs.events[{n}]")
        named = next((event[k] for k in ("instance_id", "id", "instance") if event.get(k) is not None), None)
        if isinstance(named, dict):
            named = named.get("id")
        kind, waits = event.get("type", "CREATED"), bool(event.get("eligible", True))
        ids, full = anyio.run(lambda n=named, w=waits, k=kind: queues.evaluated(n, waits=w, kind=k))
        evaluated.append(ids)
        scans += full
    if "evaluated" in expect:
        yield Finding("evaluated", expect["evaluated"], evaluated)
    if "full_scans" in expect:
        yield Finding("full_scans", expect["full_scans"], scans)
    if "single_instance_evaluations" in expect:
        flat = [i for ids in evaluated for i in ids]
        expected = expect["single_instance_evaluations"]
        yield Finding(
            "single_instance_evaluations", expected, len(flat) if isinstance(expected, int) else flat
        )
