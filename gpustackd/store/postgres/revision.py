"""Which revision of the schema this build works with, and what to say of another one."""

from __future__ import annotations

from gpustackd.errors import WrongRevision

HEAD = "0001"
"""The newest revision; a test holds it against the folder of migrations."""


def judge(revision: str | None) -> None:
    """Raise WrongRevision unless the schema's revision is the one that this build works with."""
    if revision == HEAD:
        return
    if revision is None:
        raise WrongRevision("the database has no gpustackd schema", "run `gpustackd migrate`")
    from gpustackd.store.postgres.migrate import revisions  # heavy, and wanted only for the difference

    if revision in revisions():
        raise WrongRevision(
            f"schema is older ({revision}) than this build ({HEAD})", "run `gpustackd migrate`"
        )
    raise WrongRevision(
        f"schema is newer ({revision}) than this build ({HEAD})", "upgrade gpustackd on this machine"
    )
