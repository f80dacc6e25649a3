"""A queue of keys in its plainest form: first come, first served; a key waits once, and is never at work
twice."""

from __future__ import annotations

from typing import Any

Found = tuple[dict[str, Any] | None, float, float]


def play(ops: list[dict[str, Any]]) -> dict[int, Found]:
    """What each `get` and `get_nothing` gets: key, and the last that was said of it (None = nothing in time),
    after how long, and how long after the start."""
    now, waiting, at_work, again = 0.0, [], set(), set()
    later: dict[str, float] = {}
    said: dict[str, tuple[str, Any]] = {}
    found: dict[int, Found] = {}

    def enter(key: str) -> None:
        if key in at_work:
            again.add(key)
        elif key not in waiting:
            waiting.append(key)

    for n, op in enumerate(ops):
        key, what = op.get("key", ""), op["op"]
        if what.startswith("add"):
            change = {"UPDATED": "MODIFIED", "CREATED": "ADDED"}.get(
                op.get("type", "MODIFIED"), op.get("type", "MODIFIED")
            )
            if not (said.get(key, ("", 0))[0] == "DELETED" and change == "MODIFIED"):
                said[key] = change, op.get("obj")
        if what == "add":
            later.pop(key, None)
            enter(key)
        elif what == "add_after":
            later[key] = now + op["delay_s"]
        elif what == "done":
            at_work.discard(key)
            if key in again:
                again.discard(key)
                enter(key)
        elif what == "sleep":
            now += next(op[k] for k in ("seconds", "duration_s", "s", "delay_s") if k in op)
        elif what in ("get", "get_nothing"):
            began = now
            end = now + op.get("within_s", op.get("timeout_s", 0.1 if what == "get_nothing" else 1.0))
            while True:
                for due in sorted(later, key=lambda k: later[k]):
                    if later[due] <= now:
                        del later[due]
                        enter(due)
                if waiting or now >= end:
                    break
                now = min([end, *later.values()])
            if not waiting:
                found[n] = None, now - began, now
                continue
            taken = waiting.pop(0)
            at_work.add(taken)
            value = {"key": taken, "type": said[taken][0], "obj": said[taken][1]}
            found[n] = value, now - began, now
    return found
