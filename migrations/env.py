"""Alembic's entry: a connection is handed in by `gpustackd.store.postgres.migrate`, or made from the settings."""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from gpustackd.store.tables import metadata

config = context.config


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transaction_per_migration=True,
        compare_type=True,
        compare_server_default=False,
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # others double every % of a function body
        target_metadata=metadata,
        literal_binds=True,
        transaction_per_migration=True,
        output_buffer=config.output_buffer,
    )
    with context.begin_transaction():
        context.run_migrations()
elif (connection := config.attributes.get("connection")) is not None:
    _run(connection)
else:
    import anyio

    from gpustackd.store.postgres.migrate import on_connection

    anyio.run(on_connection, os.environ.get("GPUSTACKD_DATABASE_URL", ""), _run)
