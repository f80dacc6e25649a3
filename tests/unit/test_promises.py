"""What the code promises, it keeps: settings are read, events logged, metrics counted, definitions used."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

import pytest

from gpustackd.observe.events import EVENTS
from tests.package import Package, cycles

METRICS = ("counter", "gauge", "histogram")


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


def test_every_setting_is_read(package: Package) -> None:
    """`settings.name` or `self._settings.name` outside the module of the settings, or `self.name` in a method
    of theirs."""
    module = package.modules["gpustackd.settings"]
    settings = module.top_level["Settings"]
    assert isinstance(settings, ast.ClassDef)
    fields = {
        n.target.id for n in settings.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    read = {
        node.attr
        for where, node in package.attributes()
        if ast.unparse(node.value) in ("settings", "self._settings")
        or (where is module and ast.unparse(node.value) == "self")
    }
    assert "lease" in fields
    assert sorted(fields - read) == []


def test_every_event_listed_is_logged(package: Package) -> None:
    said = {
        node.value
        for module in package.modules.values()
        if module.name != "gpustackd.observe.events"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert sorted(EVENTS.keys() - said) == []


def test_every_event_logged_is_listed(package: Package) -> None:
    """First arguments of a logger's methods, and the one after the level of `log` and `event`."""
    logged: dict[str, str] = {}
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                first = {"log": 1, "event": 1}.get(node.func.attr, 0)
                if first or node.func.attr in ("debug", "info", "warning", "error", "exception", "critical"):
                    for part in (p for argument in node.args[first : first + 1] for p in ast.walk(argument)):
                        if isinstance(part, ast.Constant) and isinstance(part.value, str):
                            logged[part.value] = f"{module.name}:{node.lineno}"
    assert {"daemon.started", "instance.scheduled", "http.error"} <= logged.keys()
    assert {event: where for event, where in logged.items() if event not in EVENTS} == {}


def test_every_metric_is_counted(package: Package) -> None:
    """An attribute that holds a metric is used in a method other than `__init__`."""
    idle: list[str] = []
    seen = 0
    for module in package.modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                made = metrics_of(node)
                seen += len(made)
                used = {
                    a.attr
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and method.name != "__init__"
                    for a in ast.walk(method)
                    if isinstance(a, ast.Attribute)
                }
                idle += [f"{module.name}.{node.name}.{name}" for name in made if name not in used]
    assert seen > 20
    assert idle == []


def metrics_of(node: ast.ClassDef) -> list[str]:
    """Attributes that are set to a Counter, Gauge or Histogram in the class, or to a partial call of one."""
    return [
        target.attr
        for a in ast.walk(node)
        if isinstance(a, ast.Assign) and isinstance(a.value, ast.Call)
        if ast.unparse(a.value.func).lower() in METRICS
        for target in a.targets
        if isinstance(target, ast.Attribute)
    ]


def test_every_public_definition_is_used(package: Package) -> None:
    used = package.uses()
    unused = {".".join(d) for d in package.public_definitions() if d not in used}
    assert sorted(unused) == sorted(USED_BY_OTHERS)


USED_BY_OTHERS = {
    f"gpustackd.store.tables.{name}": "a table that migrations are compared with, through SQLModel's metadata"
    for name in (
        "catalogue.InferenceBackend",
        "catalogue.InstanceType",
        "catalogue.ModelFile",
        "decisions.SchedulingDecision",
        "fleet.Cluster",
        "fleet.GpuDevice",
        "fleet.Worker",
        "instances.InstanceClaim",
        "instances.ModelInstance",
        "models.Model",
    )
} | {
    "gpustackd.store.tables.metadata": "migrations/env.py",
    "gpustackd.observe.events.EVENTS": "the list for people; tests hold the code to it",
}


def test_every_public_method_is_called(package: Package) -> None:
    """By name, since types are not known here: `x.name` somewhere outside the method itself."""
    seen: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for module, attribute in package.attributes():
        seen[attribute.attr].append((module.name, attribute.lineno))
    unused = {
        f"{module}.{owner}.{method.name}"
        for (module, owner), method in package.public_methods()
        if all(
            m == module and method.lineno <= line <= (method.end_lineno or 0) for m, line in seen[method.name]
        )
    }
    assert sorted(unused) == sorted(CALLED_BY_LIBRARIES)


CALLED_BY_LIBRARIES = {
    "gpustackd.daemon.surface.http._Server.capture_signals": "uvicorn",
    "gpustackd.daemon.surface.http._Server.startup": "uvicorn",
    "gpustackd.daemon.surface.http._Connection.connection_made": "asyncio, of a protocol",
    "gpustackd.daemon.surface.http._Connection.connection_lost": "asyncio, of a protocol",
    "gpustackd.observe.logging._LibraryLines.emit": "logging, of a handler",
    "gpustackd.observe.metrics._WithoutBirths.collect": "prometheus_client, of a collector",
    "gpustackd.store.documents.reading._Loader.flatten_mapping": "PyYAML, of a loader",
}


def test_no_two_public_classes_share_a_name(package: Package) -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module, name in package.public_definitions():
        if isinstance(package.modules[module].top_level[name], ast.ClassDef):
            homes[name].append(module)
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_no_import_cycles(package: Package) -> None:
    """Imports for types alone and inside functions are looked at too."""
    assert cycles(package.import_graph()) == []


REFERENCE = re.compile(
    r"\bcompat(ibility)?\b|\bthe peer\b|\bpeer's\b|\bDo better\b|\bFR-?\d|\bDESIGN\b|\bthe contract\b"
    r"|\b(spec|specification|contract|design)('s)? sections?\b|\bsections? \d",
    re.IGNORECASE,
)


def test_every_citation_can_be_opened(package: Package) -> None:
    """No word points to a document that a reader of this repository does not have; papers have an address."""
    broken = [
        f"{module.name}:{number}: {line.strip()}"
        for module in package.modules.values()
        for number, line in enumerate(module.text.splitlines(), 1)
        if REFERENCE.search(line) and "arXiv" not in line
    ]
    assert broken == []
