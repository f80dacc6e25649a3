"""The code of gpustackd as data: its modules parsed, who defines what, and who uses it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = tuple[str, str]
"""Module and name at its top level."""


@dataclass(frozen=True)
class Module:
    """One file. `name` is dotted; a package's is that of its `__init__.py`."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text("utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def top_level(self) -> dict[str, ast.stmt]:
        """What the module defines, by name: functions, classes and assigned names."""
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[node.name] = node
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            found[name.id] = node
        return found

    @cached_property
    def imports(self) -> dict[str, Definition]:
        """Local name -> (module, name there); the name is empty where a module itself is imported."""
        found: dict[str, Definition] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    found[alias.asname or alias.name.partition(".")[0]] = (alias.name, "")
        return found


class Package:
    """All modules of `root/gpustackd`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.modules: dict[str, Module] = {}
        for path in sorted((root / "gpustackd").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(name, path)

    def public_definitions(self) -> Iterator[Definition]:
        """Functions, classes and constants at the top of a module, without those that begin with `_`."""
        for module in self.modules.values():
            yield from ((module.name, name) for name in module.top_level if not name.startswith("_"))

    def public_methods(self) -> Iterator[tuple[Definition, Function]]:
        """Methods and properties of classes, by the class they are in."""
        for module in self.modules.values():
            for name, node in module.top_level.items():
                if isinstance(node, ast.ClassDef):
                    for item in node.body:
                        if isinstance(item, Function) and not item.name.startswith("_"):
                            yield (module.name, name), item

    def home(self, module: str, name: str) -> Definition | None:
        """Where a name that can be imported from `module` is defined; None outside gpustackd."""
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}", ""
        if module not in self.modules:
            return None
        here = self.modules[module]
        if name in here.top_level:
            return module, name
        return self.home(*here.imports[name]) if name in here.imports else None

    def uses(self) -> set[Definition]:
        """Definitions at the top of a module that are used: read outside their own definition. An import
        alone is no use."""
        found: set[Definition] = set()
        for module in self.modules.values():
            for statement in module.tree.body:
                own = {name for name, node in module.top_level.items() if node is statement}
                for node in ast.walk(statement):
                    used = self._used(module, node)
                    if used is not None and not (used[0] == module.name and used[1] in own):
                        found.add(used)
        return found

    def _used(self, module: Module, node: ast.AST) -> Definition | None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id in module.imports:
                return self.home(*module.imports[node.id])
            return (module.name, node.id) if node.id in module.top_level else None
        if isinstance(node, ast.Attribute):
            owner = self._used(module, node.value)
            return self.home(owner[0], node.attr) if owner is not None and not owner[1] else None
        return None

    def attributes(self) -> Iterator[tuple[Module, ast.Attribute]]:
        """Every `x.name` that is read."""
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.Attribute):
                    yield module, node

    def import_graph(self) -> dict[str, set[str]]:
        """Module -> modules of gpustackd that it imports, those for types and inside functions included."""
        graph: dict[str, set[str]] = {name: set() for name in self.modules}
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ImportFrom) and node.module in self.modules:
                    for alias in node.names:
                        inner = f"{node.module}.{alias.name}"
                        graph[module.name].add(inner if inner in self.modules else node.module)
                elif isinstance(node, ast.Import):
                    graph[module.name] |= {a.name for a in node.names if a.name in self.modules}
            graph[module.name].discard(module.name)
        return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or by way of others."""
    reachable: dict[str, set[str]] = {}
    for start, imported in graph.items():
        seen: set[str] = set()
        stack = list(imported)
        while stack:
            if (name := stack.pop()) not in seen:
                seen.add(name)
                stack += graph[name]
        reachable[start] = seen
    groups = {
        tuple(sorted({a} | {b for b in reachable[a] if a in reachable[b]}))
        for a in graph
        if a in reachable[a]
    }
    return [list(group) for group in sorted(groups)]
