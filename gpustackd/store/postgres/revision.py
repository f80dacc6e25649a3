"""The schema's revision: which one this build works with, which one a database has."""

from __future__ import annotations

from typing import Any

from gpustackd.errors import WrongRevision

REVISIONS = ("0001",)
"""All revisions, oldest first; a test compares them with the folder of migrations."""
HEAD = REVISIONS[-1]
"""The revision that this build works with."""


async def read_revision(connection: Any) -> str | None:
    """The revision of the schema; None where there is no schema of ours."""
    if not await connection.fetchval("SELECT to_regclass('alembic_version') IS NOT NULL"):
        return None
    version = await connection.fetchval("SELECT version_num FROM alembic_version")
    return None if version is None else str(version)


def check_revision(revision: str | None) -> None:
    """Raise WrongRevision unless the schema has the revision that this build works with."""
    if revision == HEAD:
        return
    if revision is None:
        raise WrongRevision("the database has no gpustackd schema", "run `gpustackd migrate`")
    if revision in REVISIONS:
        raise WrongRevision(
            f"schema is older ({revision}) than this build ({HEAD})", "run `gpustackd migrate`"
        )
    raise WrongRevision(
        f"schema is newer ({revision}) than this build ({HEAD})", "upgrade gpustackd on this machine"
    )
