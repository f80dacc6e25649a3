"""`gpustackd run`: the daemon, in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, LogFormatOption, LogLevelOption, load_settings
from gpustackd.errors import UsageError

if TYPE_CHECKING:
    from gpustackd.settings import Settings


def run(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Start a PostgreSQL of its own, with its data in DIR.")
    ] = False,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="With --embedded: directory of the data. [default: ~/.local/share/gpustackd]",
        ),
    ] = None,
    migrate: Annotated[bool, typer.Option("--migrate", help="Bring the schema up to date first.")] = False,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Address for health and metrics, or off."),
    ] = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
    replica: Annotated[
        str | None,
        typer.Option(
            "--replica", metavar="NAME", help="Its name in logs and records. [default: host and process id]"
        ),
    ] = None,
) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    Any number of them can run on one database.

    Example: gpustackd run --embedded ./data
    """
    if directory is not None and not embedded:
        raise UsageError(f"run does not take {directory}", "a directory goes with --embedded")
    if embedded and database_url:
        raise UsageError("--embedded and --database-url name two databases", "give one of them")
    settings = load_settings(
        config, database_url, http=http, log_level=log_level, log_format=log_format, replica=replica
    )
    if not embedded:
        settings.require_database()
    where = (directory or default_directory()) if embedded else None
    anyio.run(_daemon, settings, where, migrate, backend="asyncio", backend_options=_loop())


async def _daemon(settings: Settings, embedded: Path | None, migrate: bool) -> None:
    from gpustackd.daemon import compose

    await compose.run(settings, embedded=embedded, migrate=migrate)


def default_directory() -> Path:
    """Where `run --embedded` keeps its data by default."""
    base = os.environ.get("XDG_DATA_HOME")
    try:
        return (Path(base) if base else Path.home() / ".local" / "share") / "gpustackd"
    except RuntimeError:  # no home
        return Path("gpustackd-data")


def _loop() -> dict[str, Any]:
    """The faster event loop where it is installed."""
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return {}
    return {"use_uvloop": True}
