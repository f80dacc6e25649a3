"""The tables as the code names them against those that migrations make."""

from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from gpustackd.store.tables import metadata


def difference(connection: Connection) -> list[object]:
    """What tables and migrations disagree on (empty = in step)."""
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, metadata))
