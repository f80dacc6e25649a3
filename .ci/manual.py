"""Keeps docs/manual.md in step with the code: `make docs` writes it, `--check` only says whether it is.

Between a pair of markers, `<!-- generated: NAME -->` and `<!-- end: NAME -->`, the file holds what the code
says: commands, settings, tables, metrics, log events. Everything outside is written by hand, and so is the
last cell of each row of settings and tables: what a setting or a column means is said there and nowhere else.
The rows come from the code, their last cells are kept.
"""

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MANUAL = ROOT / "docs" / "manual.md"
_FOREVER = 315_360_000
"""Seconds of ten years, the bound of every duration: not worth a word."""
_WIDTH = 110
"""Columns of the help texts, whatever terminal `make docs` runs in."""

Kept = Mapping[tuple[str, str], str]
"""(section, first cell) -> the last cell, written by hand. A section is a heading or the marker's name."""


# --- commands ----------------------------------------------------------------------------------------------


def commands(_: Kept) -> Iterator[str]:
    """Every command with the help that it prints."""
    import typer

    from gpustackd.cli.program import app

    program = typer.main.get_command(app)
    width = {"terminal_width": _WIDTH, "max_content_width": _WIDTH}
    above = program.make_context("gpustackd", [], resilient_parsing=True, **width)
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        context = command.make_context(name, [], parent=above, resilient_parsing=True, **width)
        yield f"### `gpustackd {name}`\n"
        yield "```text"
        yield "\n".join(line.rstrip() for line in command.get_help(context).strip().splitlines())
        yield "```\n"


# --- settings ----------------------------------------------------------------------------------------------


def settings(kept: Kept) -> Iterator[str]:
    """Every variable with its default and what it may be."""
    from gpustackd.settings import VARIABLES, Settings

    schema = Settings.model_json_schema()
    told, definitions = schema["properties"], schema.get("$defs", {})
    yield from _rows(
        ("variable", "default", "values", "meaning"),
        (
            (
                f"`{variable}`",
                _setting_default(Settings.model_fields[name].default),
                _values(told[name], definitions),
            )
            for name, variable in VARIABLES.items()
        ),
        "settings",
        kept,
    )


def _setting_default(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    value = getattr(value, "value", value)  # of an enumeration
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _values(told: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a field takes, out of its JSON schema."""
    if "$ref" in told:
        told = definitions[told["$ref"].rpartition("/")[2]]
    if told.get("type") == "boolean":
        return "on, off"
    if "enum" in told:
        return ", ".join(told["enum"])
    words = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}
    limits = [f"{word} {told[name]:g}" for name, word in words.items() if name in told]
    seconds = f"to {_FOREVER:g}" in limits
    return " ".join(["seconds"] * seconds + [x for x in limits if x != f"to {_FOREVER:g}"])


# --- tables ------------------------------------------------------------------------------------------------


def tables(kept: Kept) -> Iterator[str]:
    """Every table with its columns, in the order in which rows refer to each other."""
    from sqlmodel import SQLModel

    import gpustackd.store.tables  # noqa: F401  - fills the metadata

    classes = {c.__tablename__: c for c in SQLModel.__subclasses__() if hasattr(c, "__tablename__")}
    for table in SQLModel.metadata.sorted_tables:
        yield f"### `{table.name}`\n"
        yield f"{_paragraph(classes[table.name].__doc__ or '')}\n"
        yield from _rows(
            ("column", "type", "default", "meaning"),
            (
                (f"`{c.name}`", _column_type(c), _column_default(c))
                for c in table.columns
                if c.name not in _EVERYWHERE
            ),
            table.name,
            kept,
        )
        yield ""


_EVERYWHERE = {"id", "created_at", "updated_at"}
"""Columns of every table, explained once."""


def _column_type(column: Any) -> str:
    from sqlalchemy.dialects import postgresql

    kind = column.type.compile(dialect=postgresql.dialect()).lower()
    kind = kind.replace("timestamp with time zone", "timestamptz")
    return kind + "".join(f" -> `{key.target_fullname}`" for key in column.foreign_keys)


def _column_default(column: Any) -> str:
    if column.identity is not None:
        return "identity"
    if column.server_default is not None:
        return f"`{column.server_default.arg}`".replace("::jsonb", "")
    return "NULL" if column.nullable else "required"


# --- metrics -----------------------------------------------------------------------------------------------

_WATCHED = {"watch_total": "counter", "watch_gauge": "gauge"}


def metrics(_: Kept) -> Iterator[str]:
    """Every metric: those of `Metrics` itself, and those that parts of a daemon add where the code names
    them."""
    added = [m for path in sorted((ROOT / "gpustackd").rglob("*.py")) for m in _added_in(path)]
    yield from _rows(("metric", "kind", "labels", "meaning"), sorted([*_registered(), *added]))


def _registered() -> Iterator[tuple[str, str, str, str]]:
    from gpustackd.observe.metrics import Metrics

    registry = Metrics(version="", replica="").registry
    for collector in list(registry._collector_to_names):
        labels = getattr(collector, "_labelnames", ())
        for family in collector.collect():
            if family.name.startswith("gpustackd_"):
                yield _metric(
                    family.name,
                    family.type,
                    labels or getattr(family, "_labelnames", ()),
                    family.documentation,
                )


def _added_in(path: Path) -> Iterator[tuple[str, str, str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _WATCHED and len(node.args) > 1:
            name, text = (a.value if isinstance(a, ast.Constant) else None for a in node.args[:2])
            if isinstance(name, str):
                yield _metric(name, _WATCHED[node.func.attr], (), str(text))


def _metric(name: str, kind: str, labels: Iterable[str], text: str) -> tuple[str, str, str, str]:
    total = "_total" if kind == "counter" else ""
    return f"`{name}{total}`", kind, ", ".join(f"`{label}`" for label in labels) or "–", text


# --- log events --------------------------------------------------------------------------------------------


def events(_: Kept) -> Iterator[str]:
    """Every log event and what it says."""
    from gpustackd.observe.events import EVENTS

    yield from _rows(("event", "says"), ((f"`{name}`", text) for name, text in EVENTS.items()))


# --- the file ----------------------------------------------------------------------------------------------

SECTIONS: Mapping[str, Callable[[Kept], Iterable[str]]] = {
    "commands": commands, "settings": settings, "tables": tables, "metrics": metrics, "events": events,
}  # fmt: skip


def _rows(
    heads: tuple[str, ...], rows: Iterable[tuple[str, ...]], section: str = "", kept: Kept | None = None
) -> Iterator[str]:
    """A table; with `kept` the last cell of a row is the one that stands in the file."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        cells = row if kept is None else (*row, kept.get((section, row[0]), ""))
        yield f"| {' | '.join(_cell(c) if kept is None else c for c in cells)} |"


def _cell(text: str) -> str:
    return _paragraph(text).replace("|", "\\|")


def _paragraph(text: str) -> str:
    return " ".join(text.split())


def render(text: str) -> str:
    """The manual as the code would have it."""
    kept = _kept(text)
    for name, make in SECTIONS.items():
        pattern = re.compile(f"(<!-- generated: {name} -->\n).*?(\n?<!-- end: {name} -->)", re.DOTALL)
        made = "\n".join(make(kept)).rstrip()
        text, times = pattern.subn(lambda m, made=made: f"{m[1]}\n{made}\n{m[2]}", text)
        if times != 1:
            raise SystemExit(f"{MANUAL.name} has no pair of markers for {name}, or several")
    return text


def unexplained(text: str) -> list[str]:
    """Settings and columns whose last cell says nothing yet."""
    return [f"{section}: {first}" for (section, first), last in _kept(text).items() if not last]


def _kept(text: str) -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    section = ""
    for line in text.splitlines():
        if mark := re.match(r"<!-- generated: (\w+) -->|### `(\w+)`$", line):
            section = mark[1] or mark[2]
        elif line.startswith("<!-- end:"):
            section = ""
        elif section and line.startswith("| `"):
            cells = [c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]]
            found[section, cells[0]] = cells[-1]
    return found


def main() -> int:
    text = MANUAL.read_text(encoding="utf-8")
    made = render(text)
    if made != text and "--check" not in sys.argv[1:]:
        MANUAL.write_text(made, encoding="utf-8")
        print(f"wrote {MANUAL.relative_to(ROOT)}")
    elif made != text:
        print(
            "docs/manual.md is out of step with the code; bring it up to date with: make docs",
            file=sys.stderr,
        )
        return 1
    if empty := unexplained(made):
        print("docs/manual.md: say in the last cell what these mean:", *empty, sep="\n  ", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
