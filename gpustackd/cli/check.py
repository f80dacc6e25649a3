"""`gpustackd check`: can a daemon work with these settings and this database?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, Form, FormOption, load_settings
from gpustackd.cli.output import console, print_json, print_text
from gpustackd.errors import DatabaseUnavailable, WrongRevision
from gpustackd.redaction import mask_url

if TYPE_CHECKING:
    from gpustackd.settings import Settings


@dataclass(frozen=True, slots=True)
class Result:
    """One check and its outcome. `exit_code` counts where it is not `ok`."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    exit_code: int = 3


def check(
    output: FormOption = Form.TEXT, config: ConfigOption = None, database_url: DatabaseOption = None
) -> None:
    """Check settings, database, rights, schema and notifications.

    Says whether a daemon can work with these settings and this database, and what to fix where it cannot.

    Exit 2 for settings, 3 for the database or its schema, 1 where only notifications do not arrive.

    Example: gpustackd check --config /etc/gpustackd.toml
    """
    settings = load_settings(config, database_url)
    settings.require_database()
    results = [_settings(settings), *anyio.run(_database, settings)]
    codes = [r.exit_code for r in results if not r.ok]
    if output is Form.JSON:
        checks = [{"name": r.name, "ok": r.ok, "detail": r.detail, "remedy": r.remedy} for r in results]
        print_json({"ok": not codes, "checks": checks})
    else:
        out = console()
        for r in results:
            mark = "[green]ok  [/]" if r.ok else "[red]FAIL[/]"
            out.print(f"{mark} {r.name:14}", end="")
            print_text(out, r.detail, " " * 20, "")
            if r.remedy:
                print_text(out, r.remedy, " " * 26, f"{'':20}next: ")
    if codes:
        raise typer.Exit(max(codes))


async def _database(settings: Settings) -> list[Result]:
    from gpustackd.store.postgres import database_checks
    from gpustackd.store.postgres.connect import connected
    from gpustackd.store.postgres.revision import check_revision, read_revision

    url = settings.require_database()
    results: list[Result] = []
    try:
        async with connected(url, "gpustackd check", any_revision=True) as connection:
            where = mask_url(url) if settings.database_url else "the server that the PG* variables name"
            results.append(_server(await database_checks.server_version(connection), where))
            writable = await database_checks.is_writable(connection)
            results.append(_writable(writable, await database_checks.tables_without_rights(connection)))
            results.append(_schema(await read_revision(connection), check_revision))
            results.append(await _notifications(settings.require_listen_database(), connection))
    except DatabaseUnavailable as error:
        results.append(Result("database", False, error.problem, error.remedy, error.exit_code))
    return results


def _settings(settings: Settings) -> Result:
    if not settings.ignored:
        return Result("settings", True, "all known, all valid")
    from gpustackd.settings import IGNORED

    return Result(
        "settings",
        True,
        f"valid, but these have no effect: {', '.join(settings.ignored)}",
        f"unset them: {IGNORED}",
    )


def _server(version: str, where: str) -> Result:
    from gpustackd.store.postgres.database_checks import MAX_VERSION, MIN_VERSION

    if int(version.partition(".")[0]) < MIN_VERSION:
        supported = f"use PostgreSQL {MIN_VERSION} to {MAX_VERSION}"
        return Result("database", False, f"PostgreSQL {version} at {where} is too old", supported)
    return Result("database", True, f"PostgreSQL {version} at {where}")


def _writable(writable: bool, denied: Sequence[str]) -> Result:
    if not writable:
        return Result("writable", False, "the server is read-only", "connect to the primary")
    if denied:
        rights = "grant it SELECT, INSERT, UPDATE and DELETE"
        return Result("writable", False, f"this user may not write to {', '.join(denied)}", rights)
    return Result("writable", True, "yes")


def _schema(now: str | None, judge: Callable[[str | None], None]) -> Result:
    try:
        judge(now)
    except WrongRevision as error:
        return Result("schema", False, error.problem, error.remedy, error.exit_code)
    return Result("schema", True, f"at {now}, as this version of gpustackd needs")


async def _notifications(listen_url: str, sender: Any) -> Result:
    from gpustackd.store.postgres import database_checks

    try:
        took = await database_checks.notification_delay(listen_url, sender)
    except DatabaseUnavailable as error:
        return Result("notifications", False, error.problem, "check GPUSTACKD_LISTEN_DATABASE_URL", 1)
    if took is None:
        return Result(
            "notifications",
            False,
            f"none arrived within {database_checks.NOTIFICATION_TIMEOUT:.0f} s; new instances would wait for"
            " the rescan",
            "a connection pooler may swallow them: set GPUSTACKD_LISTEN_DATABASE_URL to the server itself",
            1,
        )
    return Result("notifications", True, f"arrived after {took * 1000:.1f} ms")
