"""Options that several commands share, and how they lead to settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gpustackd.settings import Settings


class Output(StrEnum):
    """Form of an answer."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"


class Form(StrEnum):
    """Form of an answer that has no wide table."""

    TEXT = "text"
    JSON = "json"


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="Settings as TOML. [default: the file GPUSTACKD_CONFIG names]"
    ),
]
OutputOption = Annotated[
    Output, typer.Option("--output", "-o", help="table, wide (more columns), or json (stable shape).")
]
FormOption = Annotated[Form, typer.Option("--output", "-o", help="text, or json (stable shape).")]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database-url", metavar="URL", help="The database. [default: GPUSTACKD_DATABASE_URL]"),
]

FilesOption = Annotated[
    list[Path],
    typer.Option("--file", "-f", metavar="FILE", help="YAML or JSON; - is standard input. May be repeated."),
]
LogLevelOption = Annotated[
    str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
]
LogFormatOption = Annotated[
    str | None, typer.Option("--log-format", metavar="FORMAT", help="auto, json or text.")
]


def load_settings(config: Path | None, database_url: str | None = None, **flags: Any) -> Settings:
    """The settings in force: built-in < file < environment < flags. Raise UsageError."""
    from gpustackd.settings import load

    return load(config, {"database_url": database_url, **flags})


def database(config: Path | None, database_url: str | None) -> str:
    """The database's URL. Raise UsageError where none is set."""
    return load_settings(config, database_url).require_database()
