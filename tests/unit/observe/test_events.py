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
    root = Path(gpustackd.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                first = node.args[0]
                if (
                    node.func.attr in LEVELS
                    and isinstance(first, ast.Constant)
                    and isinstance(first.value, str)
                ):
                    yield first.value, f"{path.relative_to(root)}:{node.lineno}"


def test_the_events_of_the_contract_are_listed() -> None:
    assert EVENTS.keys() >= CONTRACT


def test_every_event_in_the_code_is_listed() -> None:
    assert [(event, where) for event, where in logged() if event not in EVENTS] == []


def test_names_of_events_have_one_form() -> None:
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z]+\.[a-z_]+", name)] == []
