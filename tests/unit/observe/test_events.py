"""Every event that the code logs is listed, so that people can rely on the list."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import gpustackd
from gpustackd.observe.events import EVENTS

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
CONTRACT = {
    "daemon.started", "daemon.stopping", "rescan.done", "instance.enqueued", "instance.analyzing",
    "instance.scheduled", "instance.unschedulable", "placement.conflict", "lease.expired",
    "instance.preempted", "worker.state_changed", "replicas.synced", "database.lost", "database.back",
}  # fmt: skip


def logged() -> Iterator[tuple[str, str]]:
    """Names given to a logger's methods, and to `event` of the daemon's reports after the level."""
    root = Path(gpustackd.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            named = node.args[:1] if node.func.attr in LEVELS else []
            if node.func.attr == "event":
                named = node.args[1:2]
            for part in (part for argument in named for part in ast.walk(argument)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value, f"{path.relative_to(root)}:{node.lineno}"


def test_the_search_finds_events_that_are_surely_logged() -> None:
    assert {"daemon.started", "instance.scheduled", "http.error"} <= {event for event, _ in logged()}


def test_the_events_of_the_contract_are_listed() -> None:
    assert EVENTS.keys() >= CONTRACT


def test_every_event_in_the_code_is_listed() -> None:
    assert [(event, where) for event, where in logged() if event not in EVENTS] == []


def test_names_of_events_have_one_form() -> None:
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z]+\.[a-z_]+", name)] == []
