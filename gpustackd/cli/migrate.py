"""`gpustackd migrate`: bring the schema to a revision."""

from __future__ import annotations

import sys
from typing import Annotated

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, database


def migrate(
    to: Annotated[
        str, typer.Option("--to", metavar="REV", help="The revision to bring it to, newer or older.")
    ] = "head",
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the statements instead of running them; needs no database.")
    ] = False,
    config: ConfigOption = None,
    database_url: DatabaseOption = None,
) -> None:
    """Bring the schema to a revision; safe when several run at once.

    Each step is a transaction of its own: after a run that was cut short, run it again.

    Example: gpustackd migrate
    """
    from gpustackd.store.postgres import migrate as schema

    if sql:
        print(schema.sql(to))
        return
    url = database(config, database_url)
    before, after = anyio.run(lambda: schema.migrate(url, to, say=lambda text: print(text, file=sys.stderr)))
    if before == after:
        print(f"the schema is already at {after or 'nothing'}")
    else:
        print(f"migrated the schema from {before or 'nothing'} to {after or 'nothing'}")
