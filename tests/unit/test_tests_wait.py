"""Tests wait in one place: none reads by itself, at once, what a process logs or counts, and none sleeps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
WAITING = {TESTS / "waiting.py", TESTS / "acceptance" / "daemon.py"}
"""Where it is done: everybody else asks these."""
IN_PROCESS = TESTS / "unit" / "daemon" / "test_http.py"
"""Asks the pages themselves, with nothing going on behind them."""
RAW = {"_lines", "_events", "_faults", "_matching"}
"""What a `Daemon` has heard so far."""
PAGES = {"/metrics", "/readyz"}
SLEEPERS = {"time", "anyio", "asyncio", "trio"}


def modules() -> list[Path]:
    """All modules of tests but those that measure: those have a pace of their own."""
    found = [p for p in TESTS.rglob("*.py") if "bench" not in p.relative_to(TESTS).parts]
    return sorted(set(found) - WAITING)


def offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what it does by itself)."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="sleep")) if module in SLEEPERS:
                yield node.lineno, f"{module}.sleep"
            case ast.ImportFrom(module=module, names=names) if module in SLEEPERS:
                yield from ((node.lineno, f"{module}.sleep") for n in names if n.name == "sleep")
            case ast.Attribute(value=value, attr=attr) if attr in RAW and not _is_self(value):
                yield node.lineno, f".{attr}"
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=page), *_]) if (
                page in PAGES
            ):
                yield node.lineno, f"GET {page}"
            case _:
                pass


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_whoever_wants_a_line_a_metric_or_time_to_pass_asks_the_helper() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {what}"
        for path in modules()
        for line, what in offences(ast.parse(path.read_text()))
        if path != IN_PROCESS or not what.startswith("GET")
    ]
    assert found == [], "tests/README.md says how to wait:\n" + "\n".join(found)


def test_what_it_looks_for_is_found() -> None:
    text = """
from time import sleep
async def test(daemon):
    await anyio.sleep(1)
    assert daemon._lines[-1]
    await daemon.get("/metrics")
"""
    assert [what for _, what in offences(ast.parse(text))] == [
        "time.sleep",
        "anyio.sleep",
        "._lines",
        "GET /metrics",
    ]
